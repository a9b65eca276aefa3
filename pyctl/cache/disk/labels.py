"""What the snapshots of one fingerprint say, for people who look through the directory.

One line of JSON per snapshot, ``["<name>", "<text>"]``, appended; nothing depends on it, and bad lines are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from pyctl.atomic_file import write_atomic

__all__ = ["Labels"]


class Labels:
    """The file at ``path``. OSError when it cannot be written; reading never fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, name: str, text: str) -> None:
        """Note the text of a snapshot; one write, so that several processes may append."""
        line = json.dumps([name, text], ensure_ascii=False) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode("utf-8", "replace"))

    def load(self) -> dict[str, str]:
        """Texts by name."""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return {}
        found = {}
        for line in lines:
            try:
                name, text = json.loads(line)
            except (ValueError, TypeError):
                continue
            if isinstance(name, str) and isinstance(text, str):
                found[name] = text
        return found

    def keep(self, names: Collection[str]) -> None:
        """Forget all but ``names``."""
        texts = {name: text for name, text in self.load().items() if name in names}
        lines = [json.dumps(pair, ensure_ascii=False) + "\n" for pair in texts.items()]
        write_atomic(self.path, "".join(lines).encode("utf-8", "replace"), sync=False)

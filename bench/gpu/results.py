"""Records of a measurement, kept after each one, so that nothing is lost when time runs out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from bench.gpu.tables import document

__all__ = ["Clock", "Results"]

Record = dict[str, Any]


class Clock:
    """The time until ``end``, in monotonic seconds, and estimates that learn from what was measured."""

    def __init__(self, end: float, tokens_per_second: float) -> None:
        self._began = time.monotonic()
        self._end = end
        self.tokens_per_second = tokens_per_second

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def fits(self, seconds: float) -> bool:
        return time.monotonic() + seconds <= self._end

    def prefill(self, n_tokens: int) -> float:
        """Seconds that evaluating so many tokens takes, a little pessimistic."""
        return 1.1 * n_tokens / self.tokens_per_second + 0.5

    def learn(self, n_tokens: int, seconds: float) -> None:
        """A long prefill tells how fast the next one will be."""
        if n_tokens >= 2000:
            self.tokens_per_second = n_tokens / seconds


class Results:
    """Everything about one model, in ``<directory>/gpu-side-by-side-<shape>.json`` and .md.

    A section measured again replaces what it had found before; others stay, and so does one that finds nothing.
    """

    def __init__(self, directory: Path, shape: str, header: dict[str, str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"gpu-side-by-side-{shape}.json"
        self.data: dict[str, Any] = {"shape": shape, "records": []}
        if self._path.exists():
            self.data = json.loads(self._path.read_text(encoding="utf-8"))
        self.data["machine"] = header
        self._old: dict[str, list[Record]] = {}

    @property
    def records(self) -> list[Record]:
        return list(self.data["records"])

    def records_of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    def begin(self, section: str) -> None:
        """From the next finding on, forget what an earlier run had in this section."""
        mine = [record for record in self.records if record["section"] == section]
        self._old[section] = [record for record in mine if record["kind"] != "skipped"]
        self.data["records"] = [r for r in self.records if r["section"] != section or r["kind"] != "skipped"]

    def add(self, section: str, kind: str, **fields: Any) -> None:
        """Keep one finding, and write both files."""
        if kind != "skipped":
            old = self._old.pop(section, [])
            self.data["records"] = [record for record in self.records if record not in old]
        self.data["records"].append({"section": section, "kind": kind, **fields})
        self.save()

    def skip(self, section: str, what: str, why: str) -> None:
        print(f"    skipped: {section}: {what} ({why})", flush=True)
        self.add(section, "skipped", what=what, why=why)

    def save(self) -> None:
        for path, text in (
            (self._path, json.dumps(self.data, indent=1)),
            (self._path.with_suffix(".md"), document(self.data)),
        ):
            temporary = path.with_suffix(f"{path.suffix}.tmp")
            temporary.write_text(text + "\n", encoding="utf-8")
            temporary.replace(path)

"""Remembered replies in a file, so that prompts are unbroken after a restart too: one JSON object per line, appended.

The members are those of Said, with ``key`` for what the reply means; bytes are hexadecimal. A line that is cut off or
makes no sense is passed over. Several processes may append; who finds the file too long writes it anew.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyctl.prompt import Tokens, as_tokens

__all__ = ["ReplayLog", "Said"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Said:
    """A reply as it was written: ``head`` is the text from the token that begins the message to the first sampled one,
    ``text`` and ``tokens`` are what was sampled, tokens None if they are not known.

    It was message number ``place``, with calls of these ``ids`` and with reasoning of this digest.
    """

    head: str
    text: str
    tokens: Tokens | None
    place: int
    ids: tuple[str, ...]
    reasoning: bytes


class ReplayLog:
    """The file at ``path``. What the disk refuses is a warning and no error; not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __len__(self) -> int:
        """Bytes of the file."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def read(self) -> Iterator[tuple[bytes, Said]]:
        """Every reply in the file with its key, the oldest first."""
        try:
            with self._path.open("rb") as file:
                for line in file:
                    try:
                        yield _unpacked(json.loads(line))
                    except (ValueError, KeyError, TypeError, OverflowError):
                        continue
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("remembered replies could not be read: %s", error)

    def append(self, key: bytes, said: Said) -> None:
        """Add a reply at the end."""
        try:
            # One write, so that lines of several processes do not mix; a line cut off before is ended first.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
                os.write(descriptor, (b"" if whole else b"\n") + _packed(key, said))
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("a reply could not be remembered on disk: %s", error)

    def replace(self, entries: Iterator[tuple[bytes, Said]]) -> None:
        """Write the file anew."""
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.writelines(_packed(key, said) for key, said in entries)
            os.replace(temporary, self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            log.warning("remembered replies could not be written: %s", error)


def _packed(key: bytes, said: Said) -> bytes:
    fields = {
        "key": key.hex(),
        "head": said.head,
        "text": said.text,
        "tokens": said.tokens.tolist() if said.tokens is not None else None,
        "place": said.place,
        "ids": said.ids,
        "reasoning": said.reasoning.hex(),
    }
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _unpacked(fields: dict[str, object]) -> tuple[bytes, Said]:
    head, text, tokens, place, ids = (fields[name] for name in ("head", "text", "tokens", "place", "ids"))
    if not isinstance(head, str) or not isinstance(text, str) or not isinstance(place, int):
        raise TypeError("another kind of value")
    if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
        raise TypeError("another kind of id")
    if tokens is not None and not isinstance(tokens, list):
        raise TypeError("another kind of tokens")
    said = Said(
        head,
        text,
        as_tokens(tokens) if tokens is not None else None,
        place,
        tuple(ids),
        bytes.fromhex(str(fields["reasoning"])),
    )
    return bytes.fromhex(str(fields["key"])), said

"""Replies as they were sampled, in a file: appended, cut while it grows, read at the start."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

from pyctl.atomic_file import open_private, write_atomic
from pyctl.prompt import Tokens, as_tokens

__all__ = ["ReplayLog", "SampledReply"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SampledReply:
    """A reply as it was written: ``header`` is the text from the token that begins the message to the first
    sampled one, ``text`` and ``tokens`` are what was sampled, tokens None if they are not known.

    Its calls had these ``ids``, and its reasoning this digest.
    """

    header: str
    text: str
    tokens: Tokens | None
    ids: tuple[str, ...]
    reasoning: bytes


class ReplayLog:
    """Replies in the file at ``path`` and one of older replies beside it, together never more than ``max_bytes``.

    A file that is half of that becomes the older one, whose place it takes: nothing has to be rewritten, and what was
    not used since the last time is forgotten. ``spend`` is asked before bytes are written, and says no when there were
    enough today. What the disk refuses is a warning and no error. Several processes may append; within one, one thread
    at a time.
    """

    def __init__(self, path: Path, max_bytes: int, spend: Callable[[int], bool] = lambda n_bytes: True) -> None:
        self._path = path
        self._spend = spend
        self._older = path.with_name(f"{path.name}.older")
        self._half = max_bytes // 2
        self._inode = 0
        self._fresh: WeakSet[SampledReply] = WeakSet()  # those in the newer file

    @property
    def n_bytes(self) -> int:
        """Bytes of both files."""
        return _size(self._path) + _size(self._older)

    def read(self) -> Iterator[tuple[bytes, SampledReply]]:
        """Every reply with its key, the oldest first."""
        for path in (self._older, self._path):
            try:
                with path.open("rb") as file:
                    self._note(os.fstat(file.fileno()).st_ino)
                    for line in file:
                        try:
                            key, reply = _unpacked(json.loads(line))
                        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                            continue
                        self._fresh.add(reply)
                        yield key, reply
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("remembered replies could not be read: %s", error)

    def has(self, reply: SampledReply) -> bool:
        """Whether it is in the newer file; any thread may ask."""
        return reply in self._fresh

    def append(self, key: bytes, reply: SampledReply) -> None:
        """Add a reply at the end, unless it is in the newer file."""
        line = b"" if reply in self._fresh else _packed(key, reply)
        if not 0 < len(line) < self._half:
            return
        try:
            if not self._spend(len(line)):
                return
            descriptor = self._opened(len(line) + 1)
            try:
                # One write, so that lines of several processes do not mix; a line cut off before is ended first.
                size = os.fstat(descriptor).st_size
                whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
                os.write(descriptor, (b"" if whole else b"\n") + line)
            finally:
                os.close(descriptor)
            self._fresh.add(reply)
        except OSError as error:
            log.warning("a reply could not be remembered on disk: %s", error)

    def replace(self, entries: Iterable[tuple[bytes, SampledReply]]) -> None:
        """Write only these, the oldest first, as far as there is room for the newest; for files of another limit."""
        lines: list[bytes] = []
        n_bytes = 0
        for key, reply in reversed(list(entries)):
            line = _packed(key, reply)
            n_bytes += len(line)
            if n_bytes >= self._half:
                break
            lines.append(line)
        try:
            write_atomic(self._path, b"".join(reversed(lines)))
            self._older.unlink(missing_ok=True)
        except OSError as error:
            log.warning("remembered replies could not be written: %s", error)

    def _opened(self, n_bytes: int) -> int:
        """The newer file, which has room for so many bytes."""
        while True:
            descriptor = open_private(self._path, os.O_RDWR | os.O_APPEND)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                found = os.fstat(descriptor)
                if _inode(self._path) == found.st_ino:
                    self._note(found.st_ino)
                    if found.st_size + n_bytes <= self._half:
                        return descriptor
                    os.replace(self._path, self._older)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # which unlocks it, here or where another process has just put it aside

    def _note(self, inode: int) -> None:
        if inode != self._inode:
            self._inode = inode
            self._fresh.clear()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


_FORM = 2
"""Of a line: 1 had keys without the conversation before the reply, and a place instead."""


def _packed(key: bytes, reply: SampledReply) -> bytes:
    fields = {
        "key": key.hex(),
        "head": reply.header,
        "text": reply.text,
        "tokens": reply.tokens.tolist() if reply.tokens is not None else None,
        "of": _FORM,
        "ids": reply.ids,
        "reasoning": reply.reasoning.hex(),
    }
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _unpacked(fields: dict[str, object]) -> tuple[bytes, SampledReply]:
    header, text, tokens, form, ids = (fields[name] for name in ("head", "text", "tokens", "of", "ids"))
    if not isinstance(header, str) or not isinstance(text, str) or form != _FORM:
        raise TypeError("another kind of value")
    if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
        raise TypeError("another kind of id")
    if tokens is not None and not isinstance(tokens, list):
        raise TypeError("another kind of tokens")
    reply = SampledReply(
        header,
        text,
        as_tokens(tokens) if tokens is not None else None,
        tuple(ids),
        bytes.fromhex(str(fields["reasoning"])),
    )
    return bytes.fromhex(str(fields["key"])), reply

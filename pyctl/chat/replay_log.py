"""The file of replies as they were sampled."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from weakref import WeakSet

import msgspec

from pyctl.files.atomic_file import inode, open_regular
from pyctl.prompt import Tokens, as_tokens

__all__ = ["ReplayLog", "SampledReply"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SampledReply:
    """A reply as it was written: ``header`` is the text from the token that starts the message to
    the first sampled one, ``text`` and ``tokens`` are the sampled ones, tokens None if they are not
    known.

    Its calls had these ``ids``, and its reasoning this digest.
    """

    header: str
    text: str
    tokens: Tokens | None
    ids: tuple[str, ...]
    reasoning: bytes


class ReplayLog:
    """The log of replies in the file at ``path`` and in one of older replies next to it, together
    never more than ``max_bytes``.

    A file that is half of that becomes the older one, whose place it takes: nothing has to be
    rewritten, and replies unused since the last time are forgotten. ``spend`` is called before
    bytes are written, and returns False after enough today. A refusal of the disk is a warning and
    no error. Several processes may append; within one, one thread at a time.
    """

    def __init__(
        self, path: Path, max_bytes: int, spend: Callable[[int], bool] = lambda n_bytes: True
    ) -> None:
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
        """Yield every reply with its key, the oldest first."""
        for path in (self._older, self._path):
            try:
                with os.fdopen(open_regular(path), "rb") as file:
                    self._count_file(os.fstat(file.fileno()).st_ino)
                    for line in file:
                        try:
                            key, reply = _unpacked(line)
                        except (msgspec.ValidationError, ValueError, OverflowError, RecursionError):
                            continue  # damaged, or of another version
                        self._fresh.add(reply)
                        yield key, reply
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("cannot read remembered replies: %s", error)

    def has(self, reply: SampledReply) -> bool:
        """Return whether the reply is in the newer file; any thread may call it."""
        return reply in self._fresh

    def append(self, key: bytes, reply: SampledReply) -> None:
        """Add a reply at the end, unless it is in the newer file or too large for one."""
        if reply in self._fresh:
            return
        line = _packed(key, reply)
        if len(line) >= self._half:
            return
        try:
            if not self._spend(len(line)):
                return
            descriptor = self._opened(len(line) + 1)
            try:
                # One write, so that lines of several processes do not mix; a line cut off before is
                # ended first.
                if not _ends_a_line(descriptor):
                    line = b"\n" + line
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
            self._fresh.add(reply)
        except OSError as error:
            log.warning("cannot write a remembered reply: %s", error)

    def shrink(self) -> None:
        """Drop the older file, and the newer one too if it exceeds the limit, which was larger
        before.
        """
        for path in (self._older, self._path):
            if self.n_bytes > 2 * self._half:
                self._fresh.clear()
                with suppress(OSError):
                    path.unlink()

    def _opened(self, n_bytes: int) -> int:
        """Return the newer file, with room for that many bytes."""
        while True:
            descriptor = open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                status = os.fstat(descriptor)
                if inode(self._path) == status.st_ino:
                    self._count_file(status.st_ino)
                    if status.st_size + n_bytes <= self._half:
                        return descriptor
                    os.replace(self._path, self._older)
            except BaseException:
                os.close(descriptor)
                raise
            # The newer file was full, or another process has put it aside: unlock and try again.
            os.close(descriptor)

    def _count_file(self, inode: int) -> None:
        if inode != self._inode:
            self._inode = inode
            self._fresh.clear()


def _ends_a_line(descriptor: int) -> bool:
    """Return whether the file is empty or ends with a line break."""
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


class _Line(msgspec.Struct):
    """A reply in the file. ``of`` is the form of the line: in the first, keys left out the
    conversation before it.
    """

    key: str
    head: str
    text: str
    tokens: list[int] | None
    of: Literal[2]
    ids: list[str]
    reasoning: str


def _packed(key: bytes, reply: SampledReply) -> bytes:
    tokens = reply.tokens.tolist() if reply.tokens is not None else None
    line = _Line(
        key=key.hex(),
        head=reply.header,
        text=reply.text,
        tokens=tokens,
        of=2,
        ids=list(reply.ids),
        reasoning=reply.reasoning.hex(),
    )
    return json.dumps(msgspec.to_builtins(line), separators=(",", ":")).encode() + b"\n"


def _unpacked(text: bytes) -> tuple[bytes, SampledReply]:
    line = msgspec.convert(json.loads(text), _Line)
    tokens = as_tokens(line.tokens) if line.tokens is not None else None
    reply = SampledReply(
        header=line.head,
        text=line.text,
        tokens=tokens,
        ids=tuple(line.ids),
        reasoning=bytes.fromhex(line.reasoning),
    )
    return bytes.fromhex(line.key), reply

"""A snapshot's chain under the names that its files have, from RAM to disk and back."""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32

from pyctl.cache.disk.files import read_header, read_jobs
from pyctl.cache.disk.format import Damage, Header, What
from pyctl.cache.disk.names import TAG_BYTES, SegmentName, StateName
from pyctl.cache.prefix import DIGEST_BYTES
from pyctl.cache.segment import Block, Segment, Snapshot
from pyctl.prompt import Tokens, as_tokens

__all__ = ["Checksums", "Found", "Link", "check_tokens", "find", "identify"]


class Checksums:
    """CRC-32 of blocks that stay the same for as long as they live, computed once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Block], int]] = {}

    def of(self, block: Block) -> int:
        known = self._known.get(id(block))
        if known is not None and known[0]() is block:
            return known[1]
        crc = crc32(block.data)
        key = id(block)
        self._known[key] = weakref.ref(block, lambda _: self._known.pop(key, None)), crc
        return crc


@dataclass(frozen=True)
class Link:
    """A segment with what was its content when it was named, and the files that it is and hangs on ("" for none)."""

    name: SegmentName
    needs: str
    tokens: Tokens
    ends: tuple[int, ...]
    rows: Block

    @property
    def blocks(self) -> dict[What, Block]:
        ends = np.array(self.ends, "<u4")
        return {
            What.TOKENS: np.ascontiguousarray(self.tokens, "<i4").view(np.uint8),
            What.ENDS: ends.view(np.uint8),
            What.ROWS: self.rows,
        }


def identify(snapshot: Snapshot, checksums: Checksums) -> list[Link]:
    """The chain of ``snapshot``, the segment at 0 first."""
    links: list[Link] = []
    running = hashlib.blake2b(digest_size=DIGEST_BYTES)
    needs = ""
    for segment, last in reversed(snapshot.reach.items()):
        rows = np.ascontiguousarray(segment.rows)
        whole = running.copy()
        whole.update(_bytes(segment.tokens))
        crc = checksums.of(segment.rows if rows is segment.rows else rows)
        tag = hashlib.blake2b(needs.encode() + b"\0", digest_size=TAG_BYTES)
        tag.update(np.array(segment.ends, "<u4").tobytes() + struct.pack("<QI", rows.nbytes, crc))
        name = SegmentName(segment.start, segment.end, whole.digest(), tag.digest())
        links.append(Link(name, needs, segment.tokens, segment.ends, rows))
        running.update(_bytes(segment.tokens[: last - segment.start]))
        needs = str(name)
    return links


@dataclass(frozen=True)
class Found:
    """A file of a chain on disk and the bytes that are read into place; ``last`` is up to where it counts.

    ``outs`` has space for what is small; that for rows or a state is put there when they are to be read.
    """

    path: Path
    header: Header
    last: int
    outs: dict[What, Block]

    @property
    def start(self) -> int:
        return self.header.name.start if isinstance(self.header.name, SegmentName) else 0

    @property
    def tokens(self) -> Tokens:
        return self.outs[What.TOKENS].view("<i4").astype(np.int32, copy=False)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(int(end) for end in self.outs[What.ENDS].view("<u4"))

    def size_of(self, what: What) -> int:
        """Bytes of a part."""
        return next(part.size for part in self.header.parts if part.what == what)

    def jobs(self, *parts: What) -> list[Callable[[], None]]:
        """What to run on any thread to fill ``parts``."""
        return list(read_jobs(self.path, self.header, {what: self.outs[what] for what in parts if what in self.outs}))

    def segment(self, parent: Segment | None) -> Segment:
        """The segment in RAM; its rows are what `outs` has space for."""
        return Segment(self.start, as_tokens(self.tokens), self.outs[What.ROWS], parent, self.ends)


def find(directory: Path, state: StateName) -> tuple[Found, list[Found]]:
    """The headers of a state and of its chain over [0, n), the segment at 0 first; FileNotFoundError or Damage."""
    header = read_header(directory / str(state))
    top = Found(directory / str(state), header, state.n, _space(header))
    chain: list[Found] = []
    below, n = header, state.n
    while below.needs:
        path = directory / below.needs
        below = read_header(path)
        chain.append(Found(path, below, n, _space(below)))
        n = chain[-1].start
    return top, chain[::-1]


def check_tokens(chain: list[Found], state: StateName) -> Tokens:
    """The tokens of the chain, shape (state.n,); Damage unless they are those of every name on it."""
    running = hashlib.blake2b(digest_size=DIGEST_BYTES)
    pieces = []
    for found in chain:
        whole = running.copy()
        whole.update(_bytes(found.tokens))
        if whole.digest() != found.header.name.digest:
            raise Damage(found.path.name, "other tokens than its name says")
        pieces.append(found.tokens[: found.last - found.start])
        running.update(_bytes(pieces[-1]))
    if running.digest() != state.digest:
        raise Damage(str(state), "hangs on other tokens than its name says")
    return as_tokens(np.concatenate(pieces))


def _space(header: Header) -> dict[What, Block]:
    small = (What.TOKENS, What.ENDS)
    return {part.what: np.empty(part.size, np.uint8) for part in header.parts if part.what in small}


def _bytes(tokens: Tokens) -> bytes:
    return tokens.astype("<i4", copy=False).tobytes()

"""A snapshot as a chain of files: naming, lookup and reading."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import msgspec
import numpy as np
from isal.isal_zlib import crc32

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.snapshot import (
    DIGEST_BYTES,
    NOTHING,
    Block,
    Segment,
    Snapshot,
    State,
    StoredFileRef,
)
from pyctl.disk.file_format import (
    TAG_BYTES,
    CorruptFileError,
    Header,
    Name,
    PartKind,
    SegmentName,
    StateName,
    fits_draft_model,
    parent_text,
)
from pyctl.disk.segment_files import read_header, read_jobs
from pyctl.errors import NotWrittenError
from pyctl.prompt import Tokens, as_tokens

__all__ = ["ChainNames", "Runner", "StoredFile", "open_chain", "segment_blocks"]

Runner: TypeAlias = Callable[[Iterable[Callable[[], None]]], object]
"""Runs jobs and raises their first error."""

SMALL = (PartKind.TOKENS, PartKind.ENDS)

DRAFTS = (PartKind.DRAFT_ROWS, PartKind.DRAFT_STATE)


def segment_blocks(segment: Segment) -> dict[PartKind, Block]:
    """Return the parts of the file of ``segment``, as bytes."""
    blocks = {
        PartKind.TOKENS: np.ascontiguousarray(segment.tokens, "<i4").view(np.uint8),
        PartKind.ENDS: np.array(segment.batch_ends, "<u4").view(np.uint8),
        PartKind.ROWS: segment.rows,
    }
    return (
        {**blocks, PartKind.DRAFT_ROWS: segment.draft_rows} if segment.draft_rows.size else blocks
    )


class ChainNames:
    """The names of the files of a snapshot's chain, given from the first missing segment on.

    ``is_there`` returns whether a name that a segment got before is on disk.

    Attributes:
        missing: The segments of ``snapshot`` above the deepest one that is on disk with all that it
            depends on, the first one first.
        chain: The names of that deepest one and of the segments named since.
    """

    def __init__(self, snapshot: Snapshot, is_there: Callable[[SegmentName], bool]) -> None:
        self.chain: list[SegmentName] = []
        above: list[tuple[Segment, int]] = []
        for segment, last in snapshot.chain.items():
            name = segment.file.name
            segment.file.is_there = isinstance(name, SegmentName) and is_there(name)
            if segment.file.is_there:
                assert isinstance(name, SegmentName)
                self.chain.append(name)
                break
            above.append((segment, last))
        self.missing = [segment for segment, _ in reversed(above)]
        self._reach = dict(above)
        self._running = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for segment, last in reversed(snapshot.chain.items()):
            if segment not in self._reach:
                self._running.update(_bytes(segment.tokens[: last - segment.start]))

    def name(self, segment: Segment) -> tuple[SegmentName, SegmentName | None]:
        """Name ``segment``, the next of ``missing``, which has its rows; return its name and its
        parent's. Raises NotWrittenError if the rows were dropped.

        A name that the segment has got before is reused, since rows never change: their checksum is
        computed once. The draft model's rows are not part of the name, so a server without a draft
        model uses the same file.
        """
        if segment.dropped:
            raise NotWrittenError(f"the rows before {segment.end} were dropped")
        whole = self._running.copy()
        whole.update(_bytes(segment.tokens))
        name = segment.file.name
        parent = self.chain[-1] if self.chain else None
        if not isinstance(name, SegmentName) or segment.file.parent != parent:
            tag = hashlib.blake2b(parent_text(parent) + b"\0", digest_size=TAG_BYTES)
            crc = crc32(np.ascontiguousarray(segment.rows).data)
            tag.update(
                np.array(segment.batch_ends, "<u4").tobytes()
                + struct.pack("<QI", segment.rows.nbytes, crc)
            )
            name = SegmentName(segment.start, segment.end, whole.digest(), tag.digest())
        self._running.update(_bytes(segment.tokens[: self._reach[segment] - segment.start]))
        segment.file.name = name
        segment.file.parent = parent
        self.chain.append(name)
        return name, parent


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a chain on disk, and its bytes as far as they are read.

    Attributes:
        path: The path of the file.
        header: Its header.
        last: The position up to which the file counts in the chain.
        outs: The memory of its parts. Small parts have theirs from the start; `make_space`
            allocates it for rows or a state that are to be read.
    """

    path: Path
    header: Header
    last: int
    outs: dict[PartKind, Block]

    @property
    def name(self) -> SegmentName:
        """The name of a segment's file. A state's file fails an assertion."""
        assert isinstance(self.header.name, SegmentName)
        return self.header.name

    @property
    def start(self) -> int:
        """The position where the segment starts, 0 for a state."""
        return self.header.name.start if isinstance(self.header.name, SegmentName) else 0

    @property
    def tokens(self) -> Tokens:
        """The tokens of the segment, once they are read."""
        return self.outs[PartKind.TOKENS].view("<i4").astype(np.int32, copy=False)

    @property
    def batch_ends(self) -> tuple[int, ...]:
        """The exact batch ends in the segment, once they are read."""
        return tuple(int(end) for end in self.outs[PartKind.ENDS].view("<u4"))

    def make_space(
        self, space: Callable[[int], Block], sizes: BlockSizes | None
    ) -> list[Callable[[], None]]:
        """Allocate memory for large parts, and return the jobs that fill it.

        Parts of a draft model are read if they fit the model with ``sizes``, and skipped otherwise.
        """
        name = self.header.name
        large = [part for part in self.header.parts if part.kind not in SMALL]
        for part in large:
            if part.kind not in DRAFTS or sizes is None or fits_draft_model(name, part, sizes):
                self.outs[part.kind] = space(part.size)
        return self.jobs(*(part.kind for part in large))

    def jobs(self, *parts: PartKind) -> list[Callable[[], None]]:
        """Return jobs for any thread that fill ``parts``."""
        return list(
            read_jobs(
                self.path,
                self.header,
                {what: self.outs[what] for what in parts if what in self.outs},
            )
        )

    def segment(self, parent: Segment | None) -> Segment:
        """Return the segment in RAM. Its rows are empty unless `make_space` was called."""
        draft_rows = self.outs.get(PartKind.DRAFT_ROWS, NOTHING)
        rows = self.outs.get(PartKind.ROWS, NOTHING)
        tokens = as_tokens(self.tokens)
        mark = StoredFileRef(self.name, self.header.parent, True)
        return Segment(
            self.start, tokens, rows, parent, self.batch_ends, draft_rows=draft_rows, file=mark
        )

    def fill(
        self, segment: Segment, space: Callable[[int], Block], sizes: BlockSizes | None
    ) -> list[Callable[[], None]]:
        """Allocate memory as `make_space` does, for a ``segment`` that was made before; return the
        jobs that fill it.
        """
        jobs = self.make_space(space, sizes)
        segment.rows = self.outs.pop(PartKind.ROWS)
        segment.draft_rows = self.outs.pop(PartKind.DRAFT_ROWS, NOTHING)
        return jobs

    @property
    def large_bytes(self) -> int:
        """The bytes that `make_space` allocates."""
        return sum(part.size for part in self.header.parts if part.kind not in SMALL)

    def state(self) -> State:
        """Return the state in RAM, with the parts that `make_space` allocated."""
        return State.from_parts(
            self.outs[PartKind.STATE], self.outs.get(PartKind.DRAFT_STATE, NOTHING)
        )


def open_chain(
    directory: Path,
    state: StateName,
    sizes: BlockSizes | None,
    run: Runner,
    paths: Mapping[Name, Path] = MappingProxyType({}),
) -> tuple[StoredFile, list[StoredFile], Tokens]:
    """Read the headers of a state and of its chain over [0, n), and return them with the tokens,
    shape (n,). The segment at 0 is the first.

    ``run`` runs the jobs that read tokens. ``paths`` are the paths of files that do not have their
    names yet. Raises FileNotFoundError or CorruptFileError.

    Only headers name the parents, so they are read one after the other from the state down. Then
    the tokens of all segments are read at once.
    """
    path = paths.get(state, directory / str(state))
    header = read_header(path, sizes, str(state))
    top = StoredFile(path, header, state.n, _space(header))
    chain: list[StoredFile] = []
    parent = header.parent
    n = state.n
    while parent is not None:
        path = paths.get(parent, directory / str(parent))
        header = read_header(path, sizes, str(parent))
        chain.append(StoredFile(path, header, n, _space(header)))
        parent = header.parent
        n = chain[-1].start
    chain.reverse()
    run(job for file in chain for job in file.jobs(PartKind.TOKENS, PartKind.ENDS))
    return top, chain, _tokens(chain, state)


def _tokens(chain: list[StoredFile], state: StateName) -> Tokens:
    """Return the tokens of a chain whose tokens and ends were read, shape (state.n,).

    Raises CorruptFileError unless they match every name on it, and the ends ascend within each
    segment.
    """
    running = hashlib.blake2b(digest_size=DIGEST_BYTES)
    pieces = []
    for file in chain:
        whole = running.copy()
        whole.update(_bytes(file.tokens))
        if whole.digest() != file.header.name.digest:
            raise CorruptFileError(str(file.name), "its tokens do not match its name")
        if any(
            not first < last <= file.name.end
            for first, last in pairwise((file.start, *file.batch_ends))
        ):
            raise CorruptFileError(str(file.name), "ends outside its positions")
        pieces.append(file.tokens[: file.last - file.start])
        running.update(_bytes(pieces[-1]))
    if running.digest() != state.digest:
        raise CorruptFileError(str(state), "the tokens it depends on do not match its name")
    return as_tokens(np.concatenate(pieces))


def _space(header: Header) -> dict[PartKind, Block]:
    return {part.kind: np.empty(part.size, np.uint8) for part in header.parts if part.kind in SMALL}


def _bytes(tokens: Tokens) -> bytes:
    return tokens.astype("<i4", copy=False).tobytes()

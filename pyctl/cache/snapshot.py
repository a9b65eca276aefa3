"""The contents of the cache: prefixes, segments of rows, states, and snapshots."""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from pyctl.cache.positions import ReplySpans, clip_reply_spans, last_common_end
from pyctl.prompt import Tokens, common_prefix

__all__ = [
    "DIGEST_BYTES",
    "DRAFT",
    "NOTHING",
    "OUTPUT",
    "RECURRENT",
    "Block",
    "BlockBytes",
    "HeldRows",
    "Prefix",
    "PromptFacts",
    "PromptMatch",
    "Rows",
    "Segment",
    "Snapshot",
    "Source",
    "Span",
    "State",
    "StoredFileRef",
    "Window",
    "needed_by",
]

DIGEST_BYTES = 16

Source: TypeAlias = Literal["none", "live", "ram", "disk"]
"""The source of a restored prefix; ``live`` is the sequence inside llama.cpp."""


class Prefix(msgspec.Struct, frozen=True):
    """The first tokens of a prompt, by their digest.

    Attributes:
        digest: BLAKE2b-128 over the token ids as little-endian int32.
        n: The number of tokens.
    """

    digest: bytes
    n: int

    @property
    def name(self) -> str:
        """The name for users and URLs: ``<n>-<first 16 hex digits>``."""
        return f"{self.n}-{self.digest.hex()[:16]}"

    def __repr__(self) -> str:
        return f"Prefix({self.digest.hex()[:8]}, {self.n})"


Block: TypeAlias = NDArray[np.uint8]
"""Saved bytes, shape (size,), opaque to the cache."""

NOTHING: Block = np.empty(0, np.uint8)


class BlockBytes(NamedTuple):
    """The bytes of saved blocks.

    Attributes:
        used: Bytes of all blocks that are alive.
        held: Bytes taken from the system, for these blocks and for the next ones.
        in_flight: Bytes of the blocks that are still being copied.
    """

    used: int
    held: int
    in_flight: int


class HeldRows(Protocol):
    """Rows on the device, in cells that no sequence needs to hold. The memory that made the object
    has their places.
    """

    @property
    def n_cells(self) -> int:
        """The number of rows, each in a cell."""

    @property
    def n_bytes(self) -> int:
        """The bytes that the rows would take as a block."""


class Rows(NamedTuple):
    """Rows in two parts: the model's and its draft model's.

    Attributes:
        own: The model's rows, as a block or held by the device; an empty block for a model without
            own rows.
        draft: The draft model's rows as a block, empty if no draft model has followed.
    """

    own: Block | HeldRows
    draft: Block = NOTHING

    @property
    def held(self) -> HeldRows | None:
        """The held rows on the device, None for a block."""
        return None if isinstance(self.own, np.ndarray) else self.own

    @property
    def block(self) -> Block:
        """The model's own rows in RAM, empty where the device holds them."""
        return self.own if isinstance(self.own, np.ndarray) else NOTHING


Span: TypeAlias = tuple[Rows, int, int]

"""Positions [first, last) out of saved rows."""


@dataclass(eq=False)
class StoredFileRef:
    """The file of a segment, shared by all copies of the segment.

    Attributes:
        name: Its name, opaque outside of the disk tier; None if it has none yet.
        parent: The name of the parent's file, opaque outside of the disk tier.
        is_there: Whether the file existed when the disk tier looked last.
    """

    name: object = None
    parent: object = None
    is_there: bool = False


@dataclass(eq=False)
class Segment:
    """The rows of tokens [start, start + len(tokens)), and the segment that covers the tokens
    before.

    Tokens and rows never change, but the rows may move. They lie in RAM (``rows``), on the device
    (``held``), or both. A model without own rows (whole-sequence states) has neither, and its
    segments still hold the tokens.

    Attributes:
        start: The position of the first token.
        tokens: The tokens, shape (end - start,).
        rows: The model's rows in RAM, empty if RAM has none.
        parent: The segment before, None at position 0. It may reach past ``start``: its rows from
            there on belong to another branch.
        batch_ends: The batch ends in (start, end] that a cold run would also have.
        reply_spans: The ranges of positions whose tokens were generated; not in files.
        references: The number of snapshots and segments that need this one. Only the cache that
            counts the bytes changes it.
        dropped: Whether that cache has given up the rows.
        draft_rows: The draft model's rows, empty if there was none. Only drafts depend on them, so
            a segment is whole without.
        held: The model's rows on the device, None if it holds none.
        file: The file of the segment, for the disk tier.
    """

    start: int
    tokens: Tokens
    rows: Block
    parent: Segment | None
    batch_ends: tuple[int, ...] = ()
    reply_spans: ReplySpans = ()
    references: int = 0
    dropped: bool = False
    draft_rows: Block = field(default_factory=lambda: NOTHING)
    held: HeldRows | None = None
    file: StoredFileRef = field(default_factory=StoredFileRef, repr=False)

    @property
    def end(self) -> int:
        return self.start + int(self.tokens.size)

    @property
    def n_bytes(self) -> int:
        """The bytes in RAM of all rows and tokens, without the parent's."""
        return int(self.rows.nbytes) + int(self.draft_rows.nbytes) + int(self.tokens.nbytes)

    @property
    def parts(self) -> Rows:
        """The rows as a memory loads them: from the device, if it holds them."""
        return Rows(self.rows if self.held is None else self.held, self.draft_rows)

    @property
    def device_only_bytes(self) -> int:
        """The bytes that the rows would take in RAM, if only the device has them; else 0."""
        return self.held.n_bytes if self.held is not None and not self.rows.size else 0

    @property
    def alive(self) -> bool:
        """True if some snapshot still needs these rows."""
        return self.references > 0

    def drop(self) -> None:
        """Drop the rows, and free their memory even if others still refer to the segment."""
        self.rows = self.draft_rows = NOTHING
        self.held = None
        self.dropped = True


RECURRENT = "recurrent"
"""The part of a state that is the model's own."""

DRAFT = "draft"
"""The part of a state that is the draft model's."""

OUTPUT = "output"
"""The model's output at the very end of a prompt; never in files."""


class Window(Protocol):
    """The rows that layers with a sliding window see, in blocks that the states of neighbouring
    positions share.
    """

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks; each counts once however many states have it."""

    def joined(self, head: Block) -> Block:
        """Return the model's own part of a state as one block: ``head``, which no other state
        shares, then the rows.
        """


@dataclass(frozen=True, eq=False)
class State:
    """The state of a sequence at one position.

    All parts are saved, loaded, counted and dropped together.

    Attributes:
        parts: Opaque bytes by name. A model has RECURRENT, or nothing if its rows suffice; a draft
            model adds DRAFT.
        window: The part of RECURRENT that states of neighbouring positions share, None if there is
            none; RECURRENT then has only the rest.
    """

    parts: Mapping[str, Block] = field(default_factory=dict)
    window: Window | None = None

    @classmethod
    def from_parts(
        cls, recurrent: Block, draft: Block = NOTHING, window: Window | None = None
    ) -> State:
        """Return a state of the model's own part, without its ``window``, and the draft model's
        part. An empty block becomes no part.
        """
        return cls(
            {name: part for name, part in ((RECURRENT, recurrent), (DRAFT, draft)) if part.size},
            window,
        )

    @property
    def head(self) -> Block:
        """The model's own part without its ``window``; empty if there is none."""
        return self.parts.get(RECURRENT, NOTHING)

    @property
    def recurrent(self) -> Block:
        """The model's own part with its ``window``, as one block."""
        return self.window.joined(self.head) if self.window is not None else self.head

    @property
    def shared(self) -> tuple[Block, ...]:
        """The blocks of the window."""
        return self.window.blocks if self.window is not None else ()

    @property
    def draft(self) -> Block:
        """The draft model's part, empty if there is none."""
        return self.parts.get(DRAFT, NOTHING)

    @property
    def output(self) -> Block:
        """The output for choosing the next token, empty except at the end of a prompt."""
        return self.parts.get(OUTPUT, NOTHING)

    def with_output(self, output: Block) -> State:
        """Return a copy with ``output``."""
        return State({**self.parts, OUTPUT: output}, self.window)

    @property
    def own_bytes(self) -> int:
        """The bytes that no other state shares."""
        return sum(int(part.nbytes) for part in self.parts.values())

    @property
    def n_bytes(self) -> int:
        """The bytes of all parts and the window, shared or not."""
        return self.own_bytes + sum(int(block.nbytes) for block in self.shared)


@dataclass(frozen=True)
class PromptFacts:
    """Facts for policies about the prompt of a sequence or a snapshot.

    Attributes:
        turn: The cache's clock (`RamCache.turn`) when the prompt came, None for now.
        cached: Whether its request allows caching.
        for_disk: Whether a request that used the prompt wanted it on disk; otherwise it is never
            written.
        n_header: The tokens before the generation header: up to there the next turn of the
            conversation is the same.
        n_opening: The tokens before the first reply (`Prompt.opening`), 0 if unknown.
        n_system: The tokens before the first boundary: the system message and the tools of a chat;
            0 if unknown.
    """

    turn: int | None = None
    cached: bool = True
    for_disk: bool = True
    n_header: int = 0
    n_opening: int = 0
    n_system: int = 0


@dataclass(eq=False)
class Snapshot:
    """Everything needed to resume at ``prefix.n`` tokens: a chain of segments over [0, n) and the
    state at n.

    Raises ValueError unless ``segment`` covers n.

    Attributes:
        prefix: The tokens that it holds, by their digest.
        segment: The deepest segment of the chain.
        state: The state at n, without parts for models that need only rows.
        exact: Whether all of it came from batches of a cold run.
        hits: How many times it was used.
        is_turn: Whether a conversation is likely to continue here after the user's next message
            (`Prompt.turn`).
        facts: The facts of its prompt.
        made: When it was made, in monotonic seconds.
        used: When it was used last, in monotonic seconds.
    """

    prefix: Prefix
    segment: Segment
    state: State
    exact: bool = True
    hits: int = 0
    is_turn: bool = False
    facts: PromptFacts = PromptFacts()
    made: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not self.segment.start < self.prefix.n <= self.segment.end:
            covered = f"[{self.segment.start}, {self.segment.end})"
            raise ValueError(
                f"a snapshot at {self.prefix.n} needs a segment that covers it, not {covered}"
            )

    @property
    def n(self) -> int:
        """The number of tokens at which it resumes."""
        return self.prefix.n

    @property
    def is_prompt_end(self) -> bool:
        """True for the very end of a prompt: it also has the output from which a reply starts."""
        return self.state.output.size > 0

    @property
    def n_bytes(self) -> int:
        """The bytes of the whole chain and the state, shared or not."""
        return sum(segment.n_bytes for segment in self.chain) + self.state.n_bytes

    @cached_property
    def chain(self) -> dict[Segment, int]:
        """The segments of the chain from the deepest to the first, each with the position up to
        which it counts.
        """
        return dict(self.iter_chain())

    def iter_chain(self) -> Iterator[tuple[Segment, int]]:
        """Yield the pairs of `chain` one after the other.

        A parent may reach past the start of its child, and counts only up to there. An ancestor
        that starts at or after that position counts for nothing, and is left out.
        """
        n = self.n
        segment = self.segment
        while True:
            yield segment, min(n, segment.end)
            n = min(n, segment.start)
            while segment.parent is not None and n <= segment.start:
                segment = segment.parent
            if n <= segment.start:
                return

    def segment_at(self, n: int) -> Segment:
        """Return the segment that holds the row before position ``n``. Raises ValueError outside
        (0, self.n].
        """
        for segment, last in self.chain.items():
            if segment.start < n <= last:
                return segment
        raise ValueError(f"{n} is not in (0, {self.n}]")

    @property
    def batch_ends(self) -> list[int]:
        """The exact batch ends of the whole chain, ascending."""
        stems = reversed(list(self.chain.items()))
        return [end for segment, last in stems for end in segment.batch_ends if end <= last]

    def n_same_batches(self, batch_ends: Sequence[int], limit: int) -> int:
        """Return how many of the first ``limit`` rows came from the batches that end at
        ``batch_ends``.
        """
        return last_common_end(batch_ends, self.batch_ends, limit)

    @property
    def reply_spans(self) -> ReplySpans:
        """The ranges of positions whose tokens were generated, ascending."""
        spans: list[tuple[int, int]] = []
        for segment, last in reversed(self.chain.items()):
            spans += clip_reply_spans(segment.reply_spans, 0, last)
        return tuple(spans)

    def head(self, n: int) -> tuple[int, ...]:
        """Return the first ``n`` tokens, or all if there are fewer."""
        first, last = list(self.chain.items())[-1]
        return tuple(first.tokens[: min(n, last)].tolist())

    def tail(self, n: int) -> tuple[int, ...]:
        """Return the last ``n`` tokens, or all if there are fewer."""
        return tuple(self.last_tokens(n).tolist())

    def last_tokens(self, n: int) -> Tokens:
        """Return the last ``n`` tokens, or all if there are fewer, as an array of shape (n,)."""
        parts: list[Tokens] = []
        for segment, last in self.chain.items():
            parts.append(segment.tokens[: last - segment.start])
            if sum(part.size for part in parts) >= n:
                break
        return np.concatenate(parts[::-1])[-n:]

    def spans(self, first: int, last: int) -> list[Span]:
        """Return the rows [first, last) of the chain in ascending order, from the device where it
        holds them.
        """
        ranges = (
            (each, max(first, each.start), min(stop, last))
            for each, stop in reversed(self.chain.items())
        )
        return [(segment.parts, start, end) for segment, start, end in ranges if start < end]


def needed_by(snapshots: Iterable[Snapshot]) -> set[Segment]:
    """Return all segments on the chains of ``snapshots``. The common part of two chains is visited
    once.
    """
    needed: set[Segment] = set()
    for snapshot in snapshots:
        for segment, _ in snapshot.iter_chain():
            if segment in needed:
                break  # and so is all before it
            needed.add(segment)
    return needed


class PromptMatch:
    """The digests of the prefixes of ``tokens`` and its comparisons with segments, kept for the
    time of a request. ``is_raw`` is `Prompt.is_raw`.
    """

    def __init__(self, tokens: Tokens, *, is_raw: bool = False) -> None:
        self.tokens = tokens
        self.is_raw = is_raw
        self._data = memoryview(tokens.astype("<i4", copy=False).tobytes())
        self.hashed: list[tuple[int, hashlib.blake2b]] = [
            (0, hashlib.blake2b(digest_size=DIGEST_BYTES))
        ]
        self._agreed: dict[Segment, int] = {}

    def prefix(self, n: int) -> Prefix:
        """Return the prefix of ``n`` tokens. Calls with ascending lengths cost one pass over the
        tokens in all. Raises ValueError outside (0, len].
        """
        if not 0 < n <= self.tokens.size:
            raise ValueError(f"{n} is not a length within {self.tokens.size} tokens")
        index = bisect_right(self.hashed, n, key=itemgetter(0)) - 1
        start, running = self.hashed[index]
        if start < n:
            running = running.copy()
            running.update(self._data[4 * start : 4 * n])
            self.hashed.insert(index + 1, (n, running))
        return Prefix(running.digest(), n)

    def find_prefixes(self, names: Container[object], lengths: Iterable[int]) -> list[Prefix]:
        """Return the prefixes of ascending ``lengths`` within (0, len] whose (n, digest) is among
        ``names``, in one pass.
        """
        prefixes = list[Prefix]()
        data = self._data
        offset = 0
        running = hashlib.blake2b(digest_size=DIGEST_BYTES)
        # called for each of thousands of lengths
        update = running.update
        digest = running.digest
        for n in lengths:
            update(data[offset : 4 * n])
            offset = 4 * n
            if (n, name := digest()) in names:
                prefixes.append(Prefix(name, n))
        if offset:
            self.hashed.insert(
                bisect_right(self.hashed, offset // 4, key=itemgetter(0)), (offset // 4, running)
            )
        return prefixes

    def shared(self, snapshot: Snapshot) -> int:
        """Return how many leading tokens ``snapshot`` shares with the prompt, at most
        ``snapshot.n``.
        """
        return min(self._agree(snapshot.segment), snapshot.n)

    def _agree(self, segment: Segment) -> int:
        """Return the position up to which the prompt agrees with ``segment`` and its ancestors.

        The comparison starts at the nearest ancestor that an earlier call has compared. If the
        prompt leaves a chain before a segment starts, no token of that segment is compared.
        """
        chain: list[Segment] = []
        ancestor: Segment | None = segment
        while ancestor is not None and ancestor not in self._agreed:
            chain.append(ancestor)
            ancestor = ancestor.parent
        for link in reversed(chain):
            before = self._agreed[link.parent] if link.parent is not None else 0
            if before >= link.start:
                before = link.start + common_prefix(link.tokens, self.tokens[link.start :])
            self._agreed[link] = before
        return self._agreed[segment]

"""Bounds for policies on recorded sessions: tokens evaluated with so many rows of memory.

    python -m bench.traces.bound --keep    # all 710 sessions, a minute

The requests are those of bench.traces, in the order of a server that evaluates no token twice. Only
rows take memory, of the card and of RAM together. States are free, and stand after each token.

- "any policy": the future is known, and each row stays or goes alone. The rows that are needed last
  go first, which is optimal for rows of one size and cost (Belady). No policy evaluates fewer.
- "oldest first": the prompt that was used least recently loses rows first, from its end. A prompt
  without some row is evaluated from there on.

bench.oracle has a tighter bound, with states, as a linear programme for some dozen requests.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import TypeAlias

from bench.common import SIMULATED, parse, parser_of, show
from bench.traces.__main__ import CARD, MACHINES, MIB, N_CELLS, ROW_BYTES
from bench.traces.household import DECODE_SECONDS, MAX_REPLY_TOKENS
from bench.traces.prompts import SessionPrompts
from bench.traces.recording import Session, read_sessions
from bench.traces.simulated_server import TOKEN_BYTES

NEVER = 2**60
"""The number of a request that comes after all others."""

ROW_PARTS = (1.0, 0.75, 0.5)
"""Parts of RAM that rows may take; snapshots of the 27B fill the rest with states."""


@dataclass(frozen=True)
class Rows:
    """Rows [first, last) of the request with the number ``owner``, which evaluated them first."""

    owner: int
    first: int
    last: int


@dataclass(frozen=True)
class Served:
    """A request in its order.

    Attributes:
        n_prompt: Tokens of the prompt.
        floor: Tokens that no earlier request had; at least one is always evaluated.
        chain: The rows of the prompt and its reply, in their order.
    """

    n_prompt: int
    floor: int
    chain: Sequence[Rows]


@dataclass(frozen=True)
class Access:
    """A request as the pieces of rows that it uses, each wholly.

    Attributes:
        pieces: The pieces of the prompt and its reply by their number, in their order.
        n_prompt: How many of them belong to the prompt.
        floor: The floor of the request.
    """

    pieces: Sequence[int]
    n_prompt: int
    floor: int


@dataclass
class _Client:
    """A session in progress, with the rows of its requests so far."""

    session: Session
    prompts: SessionPrompts
    next_row: int = 0
    chains: dict[int, Sequence[Rows]] = field(default_factory=dict)


def served_of(sessions: Sequence[Session], n_at_once: int, n_cells: int) -> list[Served]:
    """Return the requests of ``sessions`` that fit into ``n_cells``, as a household sends them.

    ``n_at_once`` sessions run at any time; a client sends its next request the recorded pause after
    the last reply. The server takes the seconds of the floor for a prompt.
    """
    waiting = iter(sessions)
    order = count()  # requests that arrive together are served in a fixed order
    arrivals: list[tuple[float, int, _Client]] = []
    served: list[Served] = []
    free_from = 0.0

    def begin(now: float) -> None:
        session = next(waiting, None)
        if session is not None:
            client = _Client(session, SessionPrompts(session, MAX_REPLY_TOKENS))
            heapq.heappush(arrivals, (now, next(order), client))

    for _ in range(n_at_once):
        begin(0.0)
    while arrivals:
        arrived, _, client = heapq.heappop(arrivals)
        requests = client.session.requests
        request = requests[client.next_row]
        client.next_row += 1
        done = arrived
        is_served = request.n_prompt + request.n_reply < n_cells
        made = client.prompts.make(request, is_served=is_served)
        before = () if request.parent is None else client.chains[request.parent]
        chain = _clipped(before, made.n_known)
        if is_served:
            chain.append(Rows(len(served), made.n_known, made.n_seen))
            n_new = request.n_prompt - made.n_known
            served.append(Served(request.n_prompt, max(n_new, 1), chain))
            free_from = max(arrived, free_from) + CARD.batch(n_new, made.n_known)
            free_from += request.n_reply * DECODE_SECONDS
            done = free_from
        client.chains[request.row] = chain
        if client.next_row < len(requests):
            think = requests[client.next_row].think
            heapq.heappush(arrivals, (done + think, next(order), client))
        else:
            begin(done)
    return served


def _clipped(chain: Sequence[Rows], n: int) -> list[Rows]:
    """Return the rows of ``chain`` before position ``n``."""
    return [Rows(rows.owner, rows.first, min(rows.last, n)) for rows in chain if rows.first < n]


def accesses_of(served: Sequence[Served]) -> tuple[list[Access], list[int]]:
    """Return the requests by pieces of rows, and the rows of each piece.

    A piece ends wherever some request leaves the rows of another one, so each request uses it
    wholly or not at all.
    """
    ends: defaultdict[int, set[int]] = defaultdict(set)
    for request in served:
        for rows in request.chain:
            ends[rows.owner] |= {rows.first, rows.last}
        own = request.chain[-1]
        ends[own.owner].add(max(request.n_prompt, own.first))
    sizes: list[int] = []
    pieces: dict[int, list[tuple[int, int]]] = {}
    for owner, places in ends.items():
        pieces[owner] = []
        for first, last in pairwise(sorted(places)):
            pieces[owner].append((first, len(sizes)))
            sizes.append(last - first)
    accesses: list[Access] = []
    for request in served:
        used = [
            (first, piece)
            for rows in request.chain
            for first, piece in pieces[rows.owner]
            if first < rows.last
        ]
        n_prompt = sum(first < request.n_prompt for first, _ in used)
        accesses.append(Access([piece for _, piece in used], n_prompt, request.floor))
    return accesses, sizes


Rank: TypeAlias = tuple[int, int]
"""The place of a piece in the order of eviction: the lowest goes first."""


class _Memory:
    """Memory for ``capacity`` rows, in pieces of ``sizes`` rows of which a part may be there."""

    def __init__(self, sizes: Sequence[int], capacity: int) -> None:
        self._sizes = sizes
        self._capacity = capacity
        self._there = [0] * len(sizes)
        self._ranks: list[Rank] = [(0, 0)] * len(sizes)
        self._heap: list[tuple[Rank, int]] = []
        self._n_rows = 0

    def n_missing(self, piece: int) -> int:
        """Return the rows of ``piece`` that are not here."""
        return self._sizes[piece] - self._there[piece]

    def use(self, piece: int, rank: Rank) -> None:
        """Have all of ``piece``, which ``rank`` evicts."""
        self._n_rows += self.n_missing(piece)
        self._there[piece] = self._sizes[piece]
        self._ranks[piece] = rank
        heapq.heappush(self._heap, (rank, piece))

    def shrink(self) -> None:
        """Evict the rows beyond the capacity, those of the lowest rank first."""
        while self._n_rows > self._capacity:
            rank, piece = self._heap[0]
            is_current = rank == self._ranks[piece] and self._there[piece] > 0
            n_evicted = min(self._there[piece], self._n_rows - self._capacity) * is_current
            self._there[piece] -= n_evicted
            self._n_rows -= n_evicted
            if not is_current or self._there[piece] == 0:
                heapq.heappop(self._heap)


def evaluated_by_any(accesses: Sequence[Access], sizes: Sequence[int], capacity: int) -> int:
    """Return the tokens that every policy evaluates at least with ``capacity`` rows of memory."""
    memory = _Memory(sizes, capacity)
    n_evaluated = 0
    for access, next_uses in zip(accesses, _next_uses(accesses, len(sizes)), strict=True):
        missing = (memory.n_missing(piece) for piece in access.pieces[: access.n_prompt])
        n_evaluated += max(sum(missing), 1)
        for piece, next_use in zip(access.pieces, next_uses, strict=True):
            memory.use(piece, (-next_use, 0))
        memory.shrink()
    return n_evaluated


def _next_uses(accesses: Sequence[Access], n_pieces: int) -> Iterator[list[int]]:
    """Yield for each request the numbers of the requests that use its pieces next in a prompt."""
    times: defaultdict[int, list[int]] = defaultdict(list)
    for time in range(len(accesses) - 1, -1, -1):
        access = accesses[time]
        for piece in access.pieces[: access.n_prompt]:
            times[piece].append(time)
    for time, access in enumerate(accesses):
        for piece in access.pieces[: access.n_prompt]:
            assert times[piece].pop() == time
        yield [times[piece][-1] if times[piece] else NEVER for piece in access.pieces]


def evaluated_oldest_first(accesses: Sequence[Access], sizes: Sequence[int], capacity: int) -> int:
    """Return the tokens evaluated with ``capacity`` rows of memory, if the prompt that was used
    least recently loses rows first, from its end.
    """
    memory = _Memory(sizes, capacity)
    n_evaluated = 0
    for time, access in enumerate(accesses):
        prompt = access.pieces[: access.n_prompt]
        missing = [memory.n_missing(piece) for piece in prompt]
        first = next((place for place, n in enumerate(missing) if n), len(prompt))
        # A piece loses rows from its end, so only the missing ones of the first are evaluated.
        n_after = sum(sizes[piece] for piece in prompt[first + 1 :])
        n_evaluated += max(sum(missing[first : first + 1]) + n_after, 1)
        for place, piece in enumerate(access.pieces):
            memory.use(piece, (time, -place))
        memory.shrink()
    return n_evaluated


def main(argv: Sequence[str] | None = None) -> None:
    """Print the bounds for each machine and part of RAM that rows take."""
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=int, default=0, help="the first so many, 0 = all")
    parser.add_argument("--at-once", type=int, default=3, help="sessions that take turns")
    options = parse(parser, argv, sessions=2)
    sessions = read_sessions()[: options.sessions or None]
    served = served_of(sessions, options.at_once, N_CELLS)
    accesses, sizes = accesses_of(served)
    floor = sum(request.floor for request in served)
    rows: list[list[object]] = []
    for machine, mib in MACHINES.items():
        for part in ROW_PARTS:
            n_rows = N_CELLS + int(part * mib * MIB / (ROW_BYTES + TOKEN_BYTES))
            bounds = [
                evaluate(accesses, sizes, n_rows) / floor
                for evaluate in (evaluated_by_any, evaluated_oldest_first)
            ]
            shown = [f"{bound:.4f}" for bound in bounds]
            rows.append([machine, f"{100 * part:.0f}", f"{n_rows:,}", *shown])
    show(
        f"{len(sessions)} recorded sessions, {options.at_once} at once: bounds",
        ["GB", "rows, % of RAM", "rows, with the card's", "any policy", "oldest first"],
        rows,
        keep="traces-bound" if options.keep else "",
        notes=[
            f"{len(served):,} requests, floor {floor:,} tokens. Tokens evaluated per token of it."
        ],
        weights=SIMULATED,
    )


if __name__ == "__main__":
    main()

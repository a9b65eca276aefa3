"""Recorded sessions on a simulated card: the real engine, cache and policies; no model.

A household runs several sessions at once. The card serves one request at a time, in the order in
which they arrive; a client sends its next request the recorded pause after the last reply. Seconds
come from a model on a card (bench/gpu_seconds.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import cast

from bench.gpu_seconds import Device
from bench.simulated import SizedBackend, serve
from bench.traces.prompts import SessionPrompts
from bench.traces.recording import RecordedRequest, Session
from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.costs import Costs
from pyctl.cache.ram import RamCache
from pyctl.engine.backend import Backend
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings

N_SEQS = 4
"""Sequences of the server, its default."""

N_UBATCH = 512
"""Tokens of a batch, its default."""

MAX_REPLY_TOKENS = 16
"""Tokens of a reply that are generated. The rest of it is evaluated with the next prompt, and
counts as new there: simulating each token of 25 million would take hours.
"""

DECODE_SECONDS = 1 / 43
"""Seconds for each token of a reply: a 27B on an RTX 3090, without drafts."""


@dataclass(frozen=True)
class Card:
    """Memory and speed of the simulated machine.

    Attributes:
        device: Seconds for batches and copies.
        n_cells: Tokens of context, shared by all sequences.
        row_bytes: Bytes of KV for a token.
        state_bytes: Bytes of the recurrent state.
        ram_bytes: Limit of the prefix cache in RAM.
    """

    device: Device
    n_cells: int
    row_bytes: int
    state_bytes: int
    ram_bytes: int


class _CardCosts(Costs):
    """The card's seconds for tokens, where a server measures its own.

    So the speed of the machine that simulates decides nothing.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._token_seconds = device.batch(N_UBATCH, 0) / N_UBATCH
        self._depth_seconds = device.per_row

    def evaluate(self, first: int, last: int) -> float:
        n = last - first
        return n * (self._token_seconds + self._depth_seconds * (first + last) / 2)

    def record_evaluated(self, first: int, last: int, seconds: float) -> None:
        """Leave out a measurement of the simulation."""


@dataclass(frozen=True)
class Served:
    """A request that was answered.

    Attributes:
        session: The number of its session.
        request: The recorded lengths.
        n_known: Leading tokens that an earlier request or reply had.
        stats: The engine's account.
        seconds: From the arrival to the first token.
    """

    session: int
    request: RecordedRequest
    n_known: int
    stats: RequestStats
    seconds: float

    @property
    def floor(self) -> int:
        """Tokens that no earlier request had; at least one is always evaluated."""
        return max(self.request.n_prompt - self.n_known, 1)

    @property
    def n_above(self) -> int:
        """Tokens evaluated above the floor."""
        return self.stats.n_evaluated - self.floor


@dataclass
class _Client:
    """A session in progress."""

    session: Session
    prompts: SessionPrompts
    next_row: int = 0


class Household:
    """Runs sessions on a card, ``n_at_once`` of them at any time.

    ``n_refused`` counts requests that do not fit into the context, as the recording's longest do
    not; the clients leave them out.
    """

    def __init__(self, card: Card, sessions: Sequence[Session], n_at_once: int) -> None:
        """Start an empty server on ``card``; ``sessions`` begin in their order."""
        self.card = card
        self.n_refused = 0
        self._backend = SizedBackend(
            card.n_cells,
            N_SEQS,
            card.row_bytes,
            card.state_bytes,
            n_ubatch=N_UBATCH,
            batch_cost=N_UBATCH // 2,
        )
        self.cache = RamCache(0, card.ram_bytes, costs=_CardCosts(card.device))
        self._engine = Engine(cast(Backend, self._backend), self.cache, EngineSettings())
        self._waiting = iter(sessions)
        self._n_at_once = n_at_once

    def run(self) -> Iterator[Served]:
        """Yield each request as it is answered."""
        order = count()  # requests that arrive together are served in a fixed order
        arrivals: list[tuple[float, int, _Client]] = []
        for _ in range(self._n_at_once):
            self._begin(arrivals, 0.0, next(order))
        free_from = 0.0
        while arrivals:
            arrived, _, client = heapq.heappop(arrivals)
            request = client.session.requests[client.next_row]
            client.next_row += 1
            fits = request.n_prompt + request.n_reply < self.card.n_cells
            made = client.prompts.make(request, is_served=fits)
            done = arrived
            if fits:
                began = max(arrived, free_from)
                stats, seconds = serve(self._engine, self._backend, made.prompt, made.reply)
                first_token = began + seconds[self.card.device.name]
                done = first_token + request.n_reply * DECODE_SECONDS
                free_from = done
                number = client.session.number
                yield Served(number, request, made.n_known, stats, first_token - arrived)
            else:
                self.n_refused += 1
            if client.next_row < len(client.session.requests):
                think = client.session.requests[client.next_row].think
                heapq.heappush(arrivals, (done + think, next(order), client))
            else:
                self._begin(arrivals, done, next(order))

    def _begin(self, arrivals: list[tuple[float, int, _Client]], now: float, order: int) -> None:
        """Start the next session, if one is left."""
        session = next(self._waiting, None)
        if session is not None:
            heapq.heappush(
                arrivals, (now, order, _Client(session, SessionPrompts(session, MAX_REPLY_TOKENS)))
            )

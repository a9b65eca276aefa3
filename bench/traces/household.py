"""Recorded sessions on a simulated server: a household runs several sessions at once.

The card serves one request at a time, in the order in which they arrive; a client sends its next
request the recorded pause after the last reply. Seconds come from a model on a card
(bench/gpu_seconds.py). Requests of a visitor, restarts and switches of the model can come in
between.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from bench.traces.prompts import HEADER_TOKENS, ID_RANGE, SessionPrompts
from bench.traces.recording import RecordedRequest, Session
from bench.traces.simulated_server import Card, SimulatedServer, VirtualClock
from pyctl.cache.cache_stats import RequestStats
from pyctl.prompt import Prompt, as_tokens

MAX_REPLY_TOKENS = 16
"""Tokens of a reply that are generated. The rest of it is evaluated with the next prompt, and
counts as new there: simulating each token of 25 million would take hours.
"""

DECODE_SECONDS = 1 / 43
"""Seconds for each token of a reply: a 27B on an RTX 3090, without drafts."""

VISIT_TOKENS = 20_000
"""Tokens of a visitor's prompt: a document with a question."""


@dataclass(frozen=True)
class Interruptions:
    """Events between the requests of the sessions, each after so many requests; 0 for never.

    Attributes:
        restart: The server ends and starts again.
        switch: The model is unloaded for another one, and loaded again.
        visit: Another client sends a prompt that shares nothing with any other.
    """

    restart: int = 0
    switch: int = 0
    visit: int = 0


@dataclass(frozen=True)
class Served:
    """A request that was answered.

    Attributes:
        session: The number of its session.
        request: The recorded lengths.
        n_known: Leading tokens that an earlier request or reply had.
        stats: The engine's account.
        seconds: From the arrival to the first token.
        n_from_device: Rows of the restored prefix that had stayed on the device.
    """

    session: int
    request: RecordedRequest
    n_known: int
    stats: RequestStats
    seconds: float
    n_from_device: int = 0

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
    """Runs sessions on a card, ``n_at_once`` of them at any time; files lie in ``directory``.

    ``n_refused`` counts requests that do not fit into the context, as the recording's longest do
    not; the clients leave them out.
    """

    def __init__(
        self,
        card: Card,
        sessions: Sequence[Session],
        n_at_once: int,
        directory: Path,
        interruptions: Interruptions = Interruptions(),
    ) -> None:
        """Start an empty server on ``card``; ``sessions`` begin in their order."""
        self.card = card
        self.n_refused = 0
        self._clock = VirtualClock()
        self.server = SimulatedServer(card, directory, self._clock)
        self._waiting = iter(sessions)
        self._n_at_once = n_at_once
        self._interruptions = interruptions
        self._n_served = 0
        self._free_from = 0.0

    def run(self) -> Iterator[Served]:
        """Yield each request as it is answered; the server has ended after the last."""
        order = count()  # requests that arrive together are served in a fixed order
        arrivals: list[tuple[float, int, _Client]] = []
        for _ in range(self._n_at_once):
            self._begin(arrivals, 0.0, next(order))
        while arrivals:
            arrived, _, client = heapq.heappop(arrivals)
            request = client.session.requests[client.next_row]
            client.next_row += 1
            done = arrived
            if request.n_prompt + request.n_reply < self.card.n_cells:
                yield self._serve(arrived, client, request)
                done = self._free_from
            else:
                client.prompts.make(request, is_served=False)
                self.n_refused += 1
            if client.next_row < len(client.session.requests):
                think = client.session.requests[client.next_row].think
                heapq.heappush(arrivals, (done + think, next(order), client))
            else:
                self._begin(arrivals, done, next(order))
        self.server.close()

    def _begin(self, arrivals: list[tuple[float, int, _Client]], now: float, order: int) -> None:
        """Start the next session, if one is left."""
        session = next(self._waiting, None)
        if session is not None:
            heapq.heappush(
                arrivals, (now, order, _Client(session, SessionPrompts(session, MAX_REPLY_TOKENS)))
            )

    def _serve(self, arrived: float, client: _Client, request: RecordedRequest) -> Served:
        """Answer ``request``, after the interruptions that are due."""
        self._interrupt(arrived)
        self.server.idle(arrived - self._free_from)
        began = max(arrived, self._free_from)
        self._clock.advance_to(began)
        made = client.prompts.make(request)
        answer = self.server.answer(made.prompt, made.reply)
        first_token = began + answer.seconds
        self._free_from = first_token + request.n_reply * DECODE_SECONDS
        self._clock.advance_to(self._free_from)
        self._n_served += 1
        return Served(
            client.session.number,
            request,
            made.n_known,
            answer.stats,
            first_token - arrived,
            answer.n_from_device,
        )

    def _interrupt(self, now: float) -> None:
        """Run the interruptions that are due before the next request."""
        due = self._interruptions
        if _is_due(due.restart, self._n_served):
            self.server.restart()
        if _is_due(due.switch, self._n_served):
            self.server.switch_model()
        if _is_due(due.visit, self._n_served):
            self._visit(now)

    def _visit(self, now: float) -> None:
        """Answer a prompt that shares nothing with any other."""
        began = max(now, self._free_from)
        self._clock.advance_to(began)
        rng = np.random.default_rng(self._n_served)
        tokens = as_tokens(rng.integers(*ID_RANGE, size=VISIT_TOKENS, dtype=np.int32))
        header = VISIT_TOKENS - HEADER_TOKENS
        answer = self.server.answer(Prompt(tokens, (header,), (header,), header), tokens[:1])
        self._free_from = began + answer.seconds
        self._clock.advance_to(self._free_from)


def _is_due(interval: int, n_served: int) -> bool:
    """Return whether an event comes before the next request; each comes after ``interval``
    requests.
    """
    return interval > 0 and n_served > 0 and n_served % interval == 0

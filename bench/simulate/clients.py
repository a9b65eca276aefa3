"""Clients that send the recorded requests: their lengths, shared prefixes and pauses, scaled down.

Unlike bench/traces/prompts.py, a reply is the one that the server gave.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.simulate.model import FIRST_ID
from bench.simulate.server import SCALE
from bench.traces.prompts import (
    HEADER_TOKENS,
    KEPT_PROMPTS,
    MESSAGE_TOKENS,
    SYSTEM_TOKENS,
    USER_SECONDS,
)
from bench.traces.recording import RecordedRequest, Session
from pyctl.cache.request_kind import RequestKind
from pyctl.prompt import Prompt, Tokens, as_tokens

ID_RANGE = (FIRST_ID, 150_000)

REPLY_RANGE = (1, 12)
"""The least and the most tokens of a reply at this scale; the recorded ones have 4 on average."""


def scaled(n: int) -> int:
    """Return the tokens here for ``n`` recorded ones, at least one."""
    return max(n // SCALE, 1)


@dataclass
class _Sent:
    """A prompt that was made, and the reply to it."""

    prompt: Prompt
    reply: Tokens


class Client:
    """A run of a recorded session, which makes its prompts one after the other.

    Attributes:
        session: The recorded session.
        run: The number of the run; each draws other texts.
        next_row: The row of the next request.
    """

    def __init__(self, session: Session, run: int) -> None:
        self.session = session
        self.run = run
        self.next_row = 0
        self._sent: dict[int, _Sent] = {}

    @property
    def is_over(self) -> bool:
        """True after the last request."""
        return self.next_row >= len(self.session.requests)

    @property
    def think(self) -> float:
        """The seconds that the client waits before its next request."""
        return self.session.requests[self.next_row].think

    def make(self) -> tuple[Prompt, int]:
        """Return the prompt of the next request, and the tokens of its reply."""
        request = self.session.requests[self.next_row]
        parent = None if request.parent is None else self._sent.get(request.parent)
        shared = _shared(request, parent)
        n = max(scaled(request.n_prompt), shared.size + 1 + HEADER_TOKENS)
        rng = np.random.default_rng((self.session.number, self.run, request.row))
        new = rng.integers(*ID_RANGE, size=n - shared.size, dtype=np.int32)
        tokens = as_tokens(np.concatenate([shared, new]))
        starts = self._starts(request, parent, shared.size, n)
        header = n - HEADER_TOKENS
        inherited = (parent.prompt.headers or ()) if parent is not None else ()
        headers = (*(at for at in inherited if at < min(shared.size, header)), header)
        is_tool_result = request.kind is RequestKind.APPEND and request.think < USER_SECONDS
        turn = parent.prompt.turn if parent is not None and is_tool_result else header
        prompt = Prompt(tokens, starts, headers, turn if turn in starts else header)
        self._sent[request.row] = _Sent(prompt, as_tokens([]))
        self._sent.pop(request.row - KEPT_PROMPTS, None)
        self.next_row += 1
        minimum, maximum = REPLY_RANGE
        return prompt, min(max(scaled(request.n_reply), minimum), maximum)

    def receive(self, reply: Sequence[int]) -> None:
        """Keep the reply to the last request, or the beginning of it."""
        self._sent[self.next_row - 1].reply = as_tokens(list(reply))

    def _starts(
        self, request: RecordedRequest, parent: _Sent | None, n_shared: int, n: int
    ) -> tuple[int, ...]:
        """Return the starts of messages, as `SessionPrompts` places them."""
        header = n - HEADER_TOKENS
        first = max(n_shared + scaled(MESSAGE_TOKENS), scaled(SYSTEM_TOKENS))
        starts = {header, n_shared, *range(first, header, scaled(MESSAGE_TOKENS))}
        starts |= {scaled(cut) for cut in self.session.cuts[request.row]}
        if parent is not None:
            starts |= {start for start in parent.prompt.boundaries if start <= n_shared}
        return tuple(sorted(start for start in starts if 0 < start <= header))


def _shared(request: RecordedRequest, parent: _Sent | None) -> Tokens:
    """Return the leading tokens that ``request`` has from its parent and the reply to it."""
    if parent is None:
        return as_tokens([])
    before = parent.prompt.tokens
    if request.kind is RequestKind.APPEND:
        return as_tokens(np.concatenate([before, parent.reply]))
    return before[: min(scaled(request.n_common), before.size)]


def clients(sessions: Sequence[Session], rng: random.Random) -> Iterator[Client]:
    """Yield runs of all sessions in random order, for ever."""
    run = 0
    while True:
        order = list(sessions)
        rng.shuffle(order)
        for session in order:
            yield Client(session, run)
        run += 1

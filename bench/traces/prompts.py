"""Token ids for recorded requests, which have lengths and shared prefixes but no text.

An append is its parent's prompt, the reply to it, and new text; a rewrite is the shared part of its
parent's prompt and new text. Ids are drawn from the number of the session and the row, so each run
of a session has the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.traces.recording import RecordedRequest, Session
from pyctl.cache.request_kind import RequestKind
from pyctl.prompt import Prompt, Tokens, as_tokens

ID_RANGE = (1_000, 150_000)
"""Token ids that are drawn: ordinary text, no special tokens."""

HEADER_TOKENS = 3
"""Tokens of the generation header at the end of a prompt, as ChatML has them."""

SYSTEM_TOKENS = 14_000
"""Tokens of the system message at the start of a conversation, in which no message starts."""

MESSAGE_TOKENS = 1_024
"""Tokens from one message to the next in new text, about the result of a tool."""

USER_SECONDS = 20.0
"""Pauses of at least this length belong to a person; shorter ones to a tool."""

KEPT_PROMPTS = 200
"""Rows back to which the recording looks for a parent."""


@dataclass(frozen=True)
class RecordedPrompt:
    """The prompt of a request with the reply that it gets.

    Attributes:
        prompt: Tokens and message starts.
        reply: The reply's tokens, shape (n,).
        n_known: Leading tokens that a served request of the session has as well, in its prompt or
            its reply.
        is_served: False for a prompt that does not fit into the context.
    """

    prompt: Prompt
    reply: Tokens
    n_known: int
    is_served: bool

    @property
    def n_seen(self) -> int:
        """Leading tokens of the prompt and its reply that the server has seen."""
        return len(self.prompt) + self.reply.size if self.is_served else self.n_known


class SessionPrompts:
    """Makes the prompts of one session, row by row; keeps those that later rows can refer to."""

    def __init__(self, session: Session, max_reply: int) -> None:
        """Prepare the first prompt; replies have at most ``max_reply`` tokens."""
        self._session = session
        self._max_reply = max_reply
        self._made: dict[int, RecordedPrompt] = {}

    def make(self, request: RecordedRequest, *, is_served: bool = True) -> RecordedPrompt:
        """Return the prompt of ``request``; its parent's must have been made."""
        parent = None if request.parent is None else self._made[request.parent]
        shared = self._shared(request, parent)
        n_new = request.n_prompt - shared.size
        tokens = as_tokens(np.concatenate([shared, self._draw(request, 0, n_new)]))
        starts = self._message_starts(request, parent, shared.size)
        headers = self._headers(request, parent, shared.size)
        is_tool_result = request.kind is RequestKind.APPEND and request.think < USER_SECONDS
        turn = parent.prompt.turn if parent is not None and is_tool_result else headers[-1]
        prompt = Prompt(tokens, starts, headers, turn)
        n_reply = min(request.n_reply, self._max_reply)
        n_known = 0 if parent is None else min(shared.size, parent.n_seen)
        made = RecordedPrompt(prompt, self._draw(request, 1, n_reply), n_known, is_served)
        self._made[request.row] = made
        self._made.pop(request.row - KEPT_PROMPTS, None)
        return made

    def _shared(self, request: RecordedRequest, parent: RecordedPrompt | None) -> Tokens:
        """Return the leading tokens that ``request`` has from its parent and the reply to it."""
        if parent is None:
            return as_tokens([])
        before = parent.prompt.tokens
        n_after = request.n_prompt - before.size
        if request.kind is not RequestKind.APPEND or n_after <= HEADER_TOKENS:
            return before[: min(request.n_common, request.n_prompt - HEADER_TOKENS)]
        # Clients can leave reasoning out of the reply that they send back.
        n_reply = min(parent.reply.size, n_after - HEADER_TOKENS)
        return np.concatenate([before, parent.reply[:n_reply]])

    def _draw(self, request: RecordedRequest, part: int, n: int) -> Tokens:
        """Return ``n`` new ids for ``part`` 0, the prompt, or 1, the reply."""
        rng = np.random.default_rng((self._session.number, request.row, part))
        return as_tokens(rng.integers(*ID_RANGE, size=n, dtype=np.int32))

    def _message_starts(
        self, request: RecordedRequest, parent: RecordedPrompt | None, n_shared: int
    ) -> tuple[int, ...]:
        """Return the message starts: the parent's within the shared part, the start of the new
        text, one every MESSAGE_TOKENS of it, the places where later prompts leave, and the header.
        """
        header = request.n_prompt - HEADER_TOKENS
        first = max(n_shared + MESSAGE_TOKENS, SYSTEM_TOKENS)
        starts = {header, n_shared, *range(first, header, MESSAGE_TOKENS)}
        starts |= self._session.cuts[request.row]
        if parent is not None:
            starts |= {start for start in parent.prompt.boundaries if start <= n_shared}
        return tuple(sorted(start for start in starts if 0 < start <= header))

    @staticmethod
    def _headers(
        request: RecordedRequest, parent: RecordedPrompt | None, n_shared: int
    ) -> tuple[int, ...]:
        """Return the starts of replies: the parent's within the shared part, and the header."""
        header = request.n_prompt - HEADER_TOKENS
        inherited = () if parent is None else parent.prompt.headers or ()
        return (*(start for start in inherited if start < min(n_shared, header)), header)

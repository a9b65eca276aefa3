"""Recorded requests as chats: messages of random words, and the replies of the server.

A recorded prompt has lengths and shared blocks of tokens, but no text. Its chat has messages of as
many tokens, scaled. A later prompt that leaves it does so at the start of a message, since clients
replace whole messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, TypeAlias

from bench.common import words
from bench.traces.prompts import KEPT_PROMPTS, MESSAGE_TOKENS, SYSTEM_TOKENS
from bench.traces.recording import RecordedRequest, Session
from pyctl.cache.request_kind import RequestKind

__all__ = ["Message", "SessionChats", "TextScale"]

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class TextScale:
    """The text that stands for recorded tokens.

    Attributes:
        scale: Tokens of the server for each recorded token.
        chars_per_token: Characters of random words in a token of the server.
        message_tokens: Tokens that the chat template adds to a message.
    """

    scale: float
    chars_per_token: float = 1.0
    message_tokens: float = 0.0

    def tokens(self, n_recorded: int) -> int:
        """Return the server's tokens for ``n_recorded`` tokens; at least one."""
        return max(round(n_recorded * self.scale), 1)

    def chars(self, n_tokens: int) -> int:
        """Return the length of a message of ``n_tokens`` in characters, at least one."""
        return max(round((n_tokens - self.message_tokens) * self.chars_per_token), 1)

    def message(self, n_chars: int) -> float:
        """Return the server's tokens of a message of ``n_chars`` characters."""
        return self.message_tokens + n_chars / self.chars_per_token


@dataclass(frozen=True)
class _Part:
    """A message in its chat.

    Attributes:
        message: Role and text.
        end: Recorded tokens up to its end.
        n_tokens: Tokens of the server up to its end, as far as they can be known here.
    """

    message: Message
    end: int
    n_tokens: float


_START = _Part({}, 0, 0.0)
"""The place before the first message."""


class SessionChats:
    """Builds the chats of one session, row by row; keeps those that later rows can refer to."""

    def __init__(self, session: Session, text: TextScale) -> None:
        """Prepare the first chat."""
        self._session = session
        self._text = text
        self._chats: dict[int, list[_Part]] = {}
        self._replies: dict[int, _Part] = {}

    def build(self, request: RecordedRequest) -> list[Message]:
        """Return the messages of ``request``; its parent's must have been built.

        They are the messages that the parent's chat shares, with the reply to it if the request
        continues it, and new ones. A chat that starts anew has a system message first.
        """
        shared = self._shared(request)
        before = shared[-1] if shared else _START
        new = self._new(request, before)
        parts = [*shared, *new]
        self._chats[request.row] = parts
        self._forget(request.row - KEPT_PROMPTS)
        return [part.message for part in parts]

    def record_reply(self, request: RecordedRequest, message: Message) -> None:
        """Keep the server's reply to ``request``, for the chats that continue it."""
        last = self._chats[request.row][-1]
        end = last.end + request.n_reply
        n_generated = self._text.tokens(request.n_reply)
        n_tokens = last.n_tokens + self._text.message_tokens + n_generated
        self._replies[request.row] = _Part(message, end, n_tokens)

    def _shared(self, request: RecordedRequest) -> list[_Part]:
        """Return the leading parts that ``request`` has from its parent."""
        if request.parent is None:
            return []
        parts = self._chats[request.parent]
        if request.kind is not RequestKind.APPEND:
            return list(takewhile(lambda part: part.end <= request.n_common, parts))
        reply = self._replies.get(request.parent)
        if reply is None:  # the parent was not sent
            return parts
        return [*parts, reply]

    def _new(self, request: RecordedRequest, before: _Part) -> Iterator[_Part]:
        """Yield parts for the recorded tokens after ``before``; at least one, from the user.

        Each ends where its recorded tokens do, scaled: messages that are too long, since they have
        a word and their tags at least, shorten those that follow.
        """
        first = before.end
        n_tokens = before.n_tokens
        # A client can leave reasoning out of the reply that it sends back, and so shorten it.
        last = max(request.n_prompt, first + 1)
        ends = self._ends(request, first, last)
        for begin, end in pairwise([first, *ends, last]):
            n_missing = end * self._text.scale - n_tokens
            n_chars = self._text.chars(round(n_missing))
            seed = (self._session.number, request.row, begin)
            text = words(seed, n_chars).rstrip()  # templates strip messages
            message = {
                "role": "user" if begin > 0 else "system",
                "content": text.ljust(n_chars, "a"),
            }
            n_tokens += self._text.message(n_chars)
            yield _Part(message, end, n_tokens)

    def _ends(self, request: RecordedRequest, first: int, last: int) -> list[int]:
        """Return the places between ``first`` and ``last`` where one message ends and the next
        starts: those where later prompts leave, and one every MESSAGE_TOKENS. The last message has
        the rest as well.
        """
        cuts = self._session.cuts[request.row]
        ends = {cut for cut in cuts if first < cut < last}
        if first == 0:
            # A question follows the system message.
            first = min(*ends, SYSTEM_TOKENS, last // 2)
            ends.add(first)
        next_end = first + MESSAGE_TOKENS
        last_end = last - MESSAGE_TOKENS
        ends.update(range(next_end, last_end + 1, MESSAGE_TOKENS))
        return sorted(ends)

    def _forget(self, row: int) -> None:
        self._chats.pop(row, None)
        self._replies.pop(row, None)

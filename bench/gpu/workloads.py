"""Conversations and the ways in which a client returns to them. Text in, text out: no server here.

The tokenizer of the generated models has one token per byte, so lengths in characters are lengths
in tokens. A long history arrives in one request, as when a saved conversation is opened; then the
conversation grows turn by turn.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from bench.common import words

__all__ = [
    "EDITED",
    "RETURN",
    "Conversation",
    "Step",
    "alternate",
    "cut",
    "edited",
    "grow",
    "once",
    "restarted",
]

Messages = list[dict[str, str]]

SYSTEM = 2000
USER = 250
ASSISTANT = 700
OVERHEAD = 18
"""Characters per message, and tokens that the template adds to one."""


RETURN = "return after another"
EDITED = "edited at once"


@dataclass(frozen=True)
class Step:
    """A request: its relation to the one before, its conversation (by size), and the number of its
    new tokens.
    """

    way: str
    size: int
    messages: Messages
    n_new: int


Steps = Generator[Step, str, None]
"""Yields requests; the reply's text is sent back."""


class Conversation:
    """A conversation of about ``size`` tokens that goes on; the same for the same seed and the same
    replies.

    It opens with many short messages, or with ``one_message`` of everything, such as a document.
    """

    def __init__(self, seed: str, size: int, *, one_message: bool = False) -> None:
        self.size = size
        self._seed = f"{seed} {size}"
        self._count = 0
        self.messages: Messages = [self._message("system", min(SYSTEM, size // 4))]
        if one_message:
            self.messages.append(
                self._message("user", size - min(SYSTEM, size // 4) - 3 * OVERHEAD)
            )
            self.opened = 2
            return
        left = size - len(self.messages[0]["content"]) - 3 * OVERHEAD - USER
        while left >= USER + ASSISTANT + 2 * OVERHEAD:
            self.messages += [self._message("user", USER), self._message("assistant", ASSISTANT)]
            left -= USER + ASSISTANT + 2 * OVERHEAD
        self.messages.append(self._message("user", USER + max(left, 0)))
        self.opened = len(self.messages)

    def _message(self, role: str, n: int) -> dict[str, str]:
        self._count += 1
        return {"role": role, "content": words(f"{self._seed} {self._count}", n)}

    def step(self, way: str, n_new: int) -> Step:
        return Step(way, self.size, list(self.messages), n_new)

    def ask(self, way: str, n_new: int) -> Steps:
        """Send it as it is, and remember the reply."""
        reply = yield self.step(way, n_new)
        self.messages.append({"role": "assistant", "content": reply})

    def turn(self, way: str) -> Steps:
        """Append a user's message, send it, and remember the reply."""
        self.messages.append(self._message("user", USER))
        yield from self.ask(way, USER)

    def replace_last(self, way: str) -> Steps:
        """Send another message instead of the last exchange."""
        self.messages[-2:] = [self._message("user", USER)]
        yield from self.ask(way, USER)

    def regenerate(self, way: str) -> Steps:
        """Repeat the request."""
        del self.messages[-1]
        yield from self.ask(way, 0)

    def shorten(self, way: str, keep: int, n_new: int) -> Steps:
        """Send only the first ``keep`` messages, and a new one."""
        self.messages[keep:] = [self._message("user", USER)]
        yield from self.ask(way, n_new)


def grow(conversation: Conversation) -> Steps:
    """Send a new conversation and its first turns."""
    yield from conversation.ask("cold", conversation.size)
    yield from conversation.turn("append")
    yield from conversation.turn("append")
    yield from conversation.regenerate("regenerate")
    yield from conversation.replace_last("branch")


def edited(conversation: Conversation) -> Steps:
    """Replace the last message as soon as the first reply is there."""
    yield from conversation.ask("cold", conversation.size)
    yield from conversation.replace_last(EDITED)


def once(conversation: Conversation, way: str) -> Steps:
    """Send a single request without a sequel."""
    yield conversation.step(way, conversation.size)


def alternate(conversations: Sequence[Conversation], rounds: int) -> Steps:
    """Send a turn of each conversation, in turn: each returns after the others."""
    for _ in range(rounds):
        for conversation in conversations:
            yield from conversation.turn(RETURN)


def restarted(conversations: Sequence[Conversation], way: str) -> Steps:
    """Send the next turn of each in a new process."""
    for conversation in conversations:
        yield from conversation.turn(way)


def cut(conversation: Conversation) -> Steps:
    """Shorten the conversation to before the last message of its opening, then to half of that
    history.

    The history arrived in one go, so the second place is none where a message was ever the last
    one. Afterwards the conversation goes on as if this had not been.
    """
    kept = list(conversation.messages)
    yield from conversation.shorten("shortened", conversation.opened - 1, USER)
    half = (conversation.opened // 2) // 2 * 2 + 1
    yield from conversation.shorten("shortened to half", half, min(8192, conversation.size // 2))
    conversation.messages = kept

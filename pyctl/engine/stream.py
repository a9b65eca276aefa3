"""The text of a reply as it becomes final, and what ends it or its reasoning: stop strings, lines, time, budgets."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["LineLimits", "ReasoningBudget", "ReasoningLimit", "TextStream", "ends_within_character"]


class TextStream:
    """Feed it the bytes of each token; it returns the text that can be sent.

    Text that might become a stop string is held back until it cannot. Once a stop string has appeared,
    ``stopping_word`` names it and nothing after it comes out. Bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self.stopping_word = ""
        self._stop = _Stops(word for word in stop if word)
        self._rest = b""
        self._held = ""

    def feed(self, data: bytes) -> str:
        """Text that became final with ``data``; empty after a stop string."""
        # The incremental decoder of the library does the same in Python, for every token.
        data = self._rest + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return self._release(text) if self._stop else text

    def flush(self) -> str:
        """What was held back, at the end of the reply; half a character at the end becomes U+FFFD."""
        text = self._rest.decode("utf-8", "replace")
        self._rest = b""
        if not self._stop:
            return text
        text = self._release(text) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        if self.stopping_word:
            return ""
        text = self._held + text
        at, word, keep = self._stop.search(text)
        if word:
            self.stopping_word, self._held = word, ""
            return text[:at]
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class _Stops:
    """All stop strings as one automaton (Aho and Corasick): a letter costs the same however many they are."""

    def __init__(self, words: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._ends: list[tuple[str, ...]] = [()]  # the words that end in a state
        for word in sorted(set(words)):
            state = 0
            for letter in word:
                state = self._step_or_add(state, letter)
            self._ends[state] = (word,)
        self._fail = [0] * len(self._next)
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            self._ends[state] += self._ends[self._fail[state]]
            for letter, after in self._next[state].items():
                self._fail[after] = self._step(self._fail[state], letter)
                states.append(after)

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def search(self, text: str) -> tuple[int, str, int]:
        """Where a word begins first in ``text``, and that word; -1 and none if there is none, and how much of the end
        of ``text`` may be the beginning of one."""
        found, state = (len(text), ""), 0
        for at, letter in enumerate(text, 1):
            state = self._step(state, letter)
            if self._ends[state]:
                found = min(found, *((at - len(word), word) for word in self._ends[state]))
        return (*found, 0) if found[1] else (-1, "", self._depth[state])

    def _step(self, state: int, letter: str) -> int:
        while state and letter not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(letter, 0)

    def _step_or_add(self, state: int, letter: str) -> int:
        if letter not in self._next[state]:
            self._next[state][letter] = len(self._next)
            self._next.append({})
            self._depth.append(self._depth[state] + 1)
            self._ends.append(())
        return self._next[state][letter]


def ends_within_character(data: bytes) -> bool:
    """Whether more bytes have to follow for ``data`` to be whole characters."""
    return codecs.utf_8_decode(data[-3:], "ignore", False)[1] < len(data[-3:])


class LineLimits:
    """Feed it the reply's final text; `ended` becomes true where a limit ends the reply.

    ``n_indent`` is the least number of blanks or tabs that a line after the first has to begin with, 0 for any. Once
    the time is up, the reply ends with a line (llama-server's ``t_max_predict_ms``).
    """

    def __init__(self, n_indent: int) -> None:
        self.ended = False
        self._n_indent = n_indent
        self._blanks = -1  # of the line so far; -1 when its text has begun

    def feed(self, text: str, time_is_up: bool) -> str:
        """What of ``text`` belongs to the reply."""
        if self._n_indent:
            for at, letter in enumerate(text):
                if letter == "\n":
                    self._blanks = 0
                elif self._blanks >= 0 and letter in " \t":
                    self._blanks += 1
                elif 0 <= self._blanks < self._n_indent:
                    self.ended = True
                    return text[:at]
                else:
                    self._blanks = -1
        self.ended = time_is_up and "\n" in text
        return text


@dataclass(frozen=True)
class ReasoningLimit:
    """At most ``n_tokens`` from a ``start`` on until one of ``ends``; then ``forced`` follows, whatever the model says.

    All are token ids. ``read`` is what the prompt holds already of the reply, from the reasoning's start on.
    """

    n_tokens: int
    start: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]
    forced: tuple[int, ...]
    read: tuple[int, ...] = ()


class ReasoningBudget:
    """Ask `next` before each token, tell `saw` after it. A reply that opens another block gets the limit anew.

    The end is never forced within a character; ``piece`` gives the bytes of a token.
    """

    def __init__(self, limit: ReasoningLimit, piece: Callable[[int], bytes]) -> None:
        self._limit = limit
        self._piece = piece
        self._left = -1  # tokens until the end is forced, -1 outside of a block
        self._forced: list[int] = []
        self._last: list[int] = []
        for token in limit.read:
            self.saw(token)

    def end(self) -> None:
        """Use up what is left of an open block."""
        if self._left > 0:
            self._left = 0

    def next(self) -> int | None:
        """The token that has to come now, None for any."""
        if self._left == 0 and not self._forced and not ends_within_character(self._bytes()):
            self._forced = list(self._limit.forced)
        return self._forced[0] if self._forced else None

    def saw(self, token: int) -> None:
        """``token`` came."""
        self._last = [*self._last[-self._window() :], token]
        if self._forced:
            del self._forced[0]
            if not self._forced:
                self._left = -1
        elif self._left < 0:
            if self._ends_in(self._limit.start):
                self._left, self._last = self._limit.n_tokens, []
        elif any(self._ends_in(end) for end in self._limit.ends):
            self._left = -1
        else:
            self._left = max(self._left - 1, 0)

    def _window(self) -> int:
        return max(len(self._limit.start), *map(len, self._limit.ends), 4)

    def _ends_in(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and tuple(self._last[-len(tokens) :]) == tuple(tokens)

    def _bytes(self) -> bytes:
        return b"".join(self._piece(token) for token in self._last)

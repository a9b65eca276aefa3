"""The final text of a reply, and its limits: stop strings, lines, time and reasoning budgets."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable

from pyctl.chat.reasoning import ReasoningLimit

__all__ = ["LineLimits", "ReasoningBudget", "TextStream"]


class TextStream:
    """Converts the bytes of tokens to text that can be sent.

    Text that may start a stop string is withheld until it no longer can. After a stop string,
    ``stopping_word`` holds it and `feed` returns no more text. Invalid UTF-8 becomes U+FFFD.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self.stopping_word = ""
        self._stop = _Stops(word for word in stop if word)
        self._has_stop = bool(self._stop)
        self._rest = b""
        self._held = ""

    def feed(self, data: bytes) -> str:
        """Append ``data`` and return the text that became final; empty after a stop string."""
        # codecs' incremental decoder does the same in slower Python code.
        data = self._rest + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        if not self._has_stop:  # nothing to withhold
            return text
        return self._release(text)

    @property
    def n_withheld(self) -> int:
        """Characters that are withheld."""
        return len(self._held)

    def flush(self) -> str:
        """Return the withheld text at the end of the reply, without an incomplete character."""
        text = self._held
        self._held = ""
        self._rest = b""
        return text

    def _release(self, text: str) -> str:
        if self.stopping_word:
            return ""
        text = self._held + text
        at, word, keep = self._stop.search(text)
        if word:
            self.stopping_word = word
            self._held = ""
            return text[:at]
        end = len(text) - keep
        self._held = text[end:]
        return text[:end]


class _Stops:
    """All stop strings as one pattern."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = sorted(set(words))
        self._pattern = re.compile("|".join(map(re.escape, self._words)))
        self._longest = max(map(len, self._words), default=0)

    def __bool__(self) -> bool:
        return bool(self._words)

    def search(self, text: str) -> tuple[int, str, int]:
        """Find the first word in ``text``: (its start, the word, 0). If there is none: (-1, "", the
        length of the longest end of ``text`` that starts a word).
        """
        match = self._pattern.search(text)
        if match is not None:
            return match.start(), match[0], 0
        longest = min(self._longest - 1, len(text))
        for n in range(longest, 0, -1):
            if self._starts_with(text[-n:]):
                return -1, "", n
        return -1, "", 0

    def _starts_with(self, end: str) -> bool:
        """Return whether a word starts with ``end``: it is the one at its place in their order."""
        index = bisect_left(self._words, end)
        if index == len(self._words):  # after all words
            return False
        return self._words[index].startswith(end)


class LineLimits:
    """Limits on the lines of a reply; ``ended`` is true once a limit has ended it.

    ``n_indent`` is the required number of leading blanks or tabs of each line after the first, 0
    for any. After the time limit the reply ends at the next line end (llama-server's
    ``t_max_predict_ms``).
    """

    def __init__(self, n_indent: int) -> None:
        self.ended = False
        self._n_indent = n_indent
        self._blanks = -1  # of the line so far; -1 when its text has started

    def feed(self, text: str, time_is_up: bool) -> str:
        """Return the part of ``text`` that belongs to the reply."""
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


class ReasoningBudget:
    """Enforces a `ReasoningLimit`: call `next` before each token and `observe_token` after it.

    ``piece`` returns a token's bytes. Tags are looked for in the text, as a tokenizer may join
    their last characters with the next ones. A token that reaches beyond the start counts. The end
    is never forced within a character.
    """

    def __init__(self, limit: ReasoningLimit, piece: Callable[[int], bytes]) -> None:
        self._limit = limit
        self._piece = piece
        self._left = -1  # tokens until the end is forced, -1 outside of a block
        self._is_over = False
        self._forced: list[int] = []
        self._text = ""  # the last letters, of which a tag may consist
        self._rest = b""  # of a character
        self._n_chars = max(map(len, limit.end_texts)) - 1
        for token in limit.read:
            self.observe_token(token)

    def end(self) -> None:
        """End an open block at the next token."""
        if self._left > 0:
            self._left = 0

    def next(self) -> int | None:
        """Return the token to force now, None for any."""
        if self._left == 0 and not self._forced and not self._rest:
            self._forced = list(self._limit.forced)
        if not self._forced:
            return None
        return self._forced[0]

    def observe_token(self, token: int) -> None:
        """Record the generated ``token``."""
        if self._is_over:
            return
        if self._forced:
            del self._forced[0]
            if not self._forced:
                self._end_block("")
            return
        piece = self._limit.texts.get(token) or self._piece(token)
        data = self._rest + piece
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._text += text
        self._rest = data[used:]
        if self._left < 0 and not self._enters():
            return
        endings: list[tuple[int, str]] = []
        for end in self._limit.end_texts:
            index = self._text.find(end)
            if index >= 0:
                endings.append((index, end))
        index, end = min(endings, default=(-1, ""))
        if end:
            behind = index + len(end)
            self._end_block(self._text[behind:])
        else:
            self._left = max(self._left - 1, 0)
            n_dropped = max(len(self._text) - self._n_chars, 0)
            self._text = self._text[n_dropped:]

    def _enters(self) -> bool:
        """Find the start of a block; return whether the last token also has text of the block."""
        start = self._limit.start
        if self._limit.recurs:
            _, tag, behind = self._text.partition(start)
            has_started = bool(tag)
            if has_started:
                self._text = behind
            else:
                n_dropped = max(len(self._text) - len(start) + 1, 0)
                self._text = self._text[n_dropped:]
        else:
            self._text = self._text.lstrip()
            has_started = self._text.startswith(start)
            self._is_over = not has_started and not start.startswith(self._text)
            self._text = self._text.removeprefix(start)
        if has_started:
            self._left = self._limit.n_tokens
        return has_started and bool(self._text or self._rest)

    def _end_block(self, text: str) -> None:
        """The block has ended, and ``text`` follows."""
        self._left = -1
        self._text = text
        self._is_over = not self._limit.recurs

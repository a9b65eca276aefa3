"""From bytes of tokens to text that is final: whole characters only, stop strings withheld."""

from __future__ import annotations

import codecs

__all__ = ["TextStream", "ends_within_character"]


class TextStream:
    """Feed it the bytes of each token; it returns the text that can be sent.

    Text that might become a stop string is held back until it cannot. Once a stop string has appeared,
    ``stopping_word`` names it and nothing after it comes out. Bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self.stopping_word = ""
        self._stop = tuple(word for word in stop if word)
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
        at, word = min(((at, word) for word in self._stop if (at := text.find(word)) >= 0), default=(-1, ""))
        if word:
            self.stopping_word, self._held = word, ""
            return text[:at]
        keep = max(_overlap(text, word) for word in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def ends_within_character(data: bytes) -> bool:
    """Whether more bytes have to follow for ``data`` to be whole characters."""
    return codecs.utf_8_decode(data[-3:], "ignore", False)[1] < len(data[-3:])


def _overlap(text: str, word: str) -> int:
    """Length of the longest proper beginning of ``word`` that ends ``text``."""
    for size in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:size]):
            return size
    return 0

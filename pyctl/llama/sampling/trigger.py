"""Triggers that activate a lazy grammar within a reply."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pyctl.errors import RequestError

__all__ = ["TriggerWatch"]

_WINDOW = 512
"""Longest match of a trigger in bytes, so that a search does not rescan the whole reply."""


class TriggerWatch:
    """The search for triggers in the bytes of a reply, token by token.

    ``patterns`` are regular expressions; ``^`` is the start of the searched text. If the reply
    starts with the opening of ``hidden`` (always, if that is empty), the search starts after its
    closing. RequestError for an invalid pattern.
    """

    def __init__(self, patterns: Sequence[str], hidden: tuple[str, str] | None = None) -> None:
        try:
            self._patterns = [re.compile(pattern.encode()) for pattern in patterns]
        except re.error as error:
            raise RequestError(f"failed to parse grammar trigger: {error}") from error
        self._open, self._close = (text.encode() for text in hidden or ("", ""))
        self._state = "begin" if hidden is not None else "search"
        self._held = bytearray()
        self._searched = 0

    def feed(self, piece: bytes) -> bytes | None:
        """Append ``piece``. On a match return the text for the grammar, from the first matched
        group on; else None.
        """
        self._held += piece
        if self._state == "begin":
            begun = bytes(self._held.lstrip())
            if begun.startswith(self._open):
                self._state = "hidden"
            elif not self._open.startswith(begun):
                self._state = "search"
        if self._state == "hidden":
            close_index = self._held.find(self._close, max(self._searched - len(self._close), 0))
            self._searched = len(self._held)
            if close_index < 0:
                return None
            del self._held[: close_index + len(self._close)]
            self._state = "search"
            self._searched = 0
        return self._search() if self._state == "search" else None

    def _search(self) -> bytes | None:
        first = max(self._searched - _WINDOW, 0)
        self._searched = len(self._held)
        for pattern in self._patterns:
            if match := pattern.search(self._held, first):
                group = next(
                    (number for number in range(1, pattern.groups + 1) if match.group(number)), 0
                )
                text = bytes(self._held[match.start(group) :])
                # If the grammar rejects the text, the next search must not find it again.
                del self._held[:]
                self._held += b"\0"
                self._searched = 0
                return text
        return None

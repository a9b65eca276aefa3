"""Limits of a reply that are about its lines, made for completing code."""

from __future__ import annotations

__all__ = ["Lines"]


class Lines:
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

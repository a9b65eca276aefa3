"""What a request becomes beyond its body, counted before it is taken."""

from __future__ import annotations

import zlib

from pyctl.errors import RequestError
from pyctl.limit import limit

__all__ = ["LETTERS_PER_TOKEN", "ByteAccount", "check_letters"]

MOST_UNPACKED = limit(
    32 * 2**20,
    "sealed reasoning, earlier responses and conversations that a request unpacks, together",
    "400",
    "request",
    "bytes",
)

LETTERS_PER_TOKEN = 8
"""Texts of more letters than this times the context hardly ever fit."""

MOST_LETTERS = limit(
    2**20,
    "a text that is tokenised without a reply, or eight letters for each token of the context",
    "400",
    "request",
    "letters",
)


class ByteAccount:
    """The bytes that one request may still unpack."""

    def __init__(self, n_bytes: int = MOST_UNPACKED) -> None:
        self._limit = self._left = n_bytes

    def charge(self, n_bytes: int) -> None:
        """Count ``n_bytes`` that are about to be taken; RequestError if the request has not so many left."""
        if n_bytes > self._left:
            raise RequestError(f"the request unpacks to more than {self._limit} bytes")
        self._left -= n_bytes

    def inflate(self, packed: bytes) -> bytes:
        """What zlib made ``packed`` of, which is charged; zlib.error if it did not."""
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, self._left + 1)
        self.charge(len(data))
        return data


def check_letters(text: str, n_ctx: int) -> None:
    """RequestError for a text that would take much memory to tokenise, though no reply to it is possible or asked."""
    most = max(MOST_LETTERS, LETTERS_PER_TOKEN * n_ctx)
    if len(text) > most:
        raise RequestError(f"a text of {len(text)} letters is too long: at most {most} are tokenised")

"""Names of prompt prefixes: a digest and a length. A digest is an index, no proof: every hit compares tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from pyctl.prompt import Tokens

__all__ = ["Prefix", "prefixes"]

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Prefix:
    """The first ``n`` tokens of a prompt; ``digest`` is BLAKE2b-128 over the ids as little-endian int32."""

    digest: bytes
    n: int

    @property
    def name(self) -> str:
        """How people refer to it: ``<n>-<first 16 hex digits>``."""
        return f"{self.n}-{self.digest.hex()[:16]}"

    def __repr__(self) -> str:
        return f"Prefix({self.digest.hex()[:8]}, {self.n})"


def prefixes(tokens: Tokens, lengths: Iterable[int]) -> list[Prefix]:
    """The prefixes of ``tokens`` at ``lengths``, ascending, in one pass; lengths past the end raise ValueError."""
    running = hashlib.blake2b(digest_size=DIGEST_BYTES)
    data = tokens.astype("<i4", copy=False).tobytes()
    result = []
    at = 0
    for n in sorted(set(lengths)):
        if not 0 < n <= tokens.size:
            raise ValueError(f"{n} is not a length within {tokens.size} tokens")
        running.update(data[4 * at : 4 * n])
        at = n
        result.append(Prefix(running.copy().digest(), n))
    return result

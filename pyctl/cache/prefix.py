"""Names of prompt prefixes: a digest and a length. A digest is an index, no proof: every hit compares tokens."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DIGEST_BYTES", "Prefix"]

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

"""A bounded store in memory for entries of many clients, of which none can push out those of the others."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.requests import Request

__all__ = ["SHARE", "SharedStore", "owner_of"]

V = TypeVar("V")

SHARE = 8
"""One entry takes at most this part of a store."""


def owner_of(request: Request) -> str:
    """Whose entries a request makes: those of its API key, or else of its address."""
    key = request.headers.get("authorization") or request.headers.get("x-api-key")
    return f"key {key}" if key else f"address {request.client.host if request.client is not None else ''}"


@dataclass
class _Entry(Generic[V]):
    value: V
    n_bytes: int
    owner: str


class SharedStore(Generic[V]):
    """Values by name, of at most ``limit`` bytes together after `shrink`. Callers hold ``lock``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.n_bytes = 0
        self.lock = threading.RLock()
        self._entries: OrderedDict[str, _Entry[V]] = OrderedDict()  # least recently used first
        self._shares: Counter[str] = Counter()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def fits(self, n_bytes: int) -> bool:
        """Whether an entry of so many bytes is within its share."""
        return n_bytes <= self.limit // SHARE

    def put(self, name: str, value: V, n_bytes: int, owner: str) -> None:
        """Keep ``value`` in the place of an entry of that name, as the last used one; `shrink` comes next."""
        self.remove(name)
        self._entries[name] = _Entry(value, n_bytes, owner)
        self._count(owner, n_bytes)

    def shrink(self) -> None:
        """Hold the limit: of the owner that has most, the least recently used entries go."""
        while self.n_bytes > self.limit:
            most = max(self._shares.values())
            self.remove(next(old for old, entry in self._entries.items() if self._shares[entry.owner] == most))

    def use(self, name: str) -> V:
        """The value of an entry, which is the last used one from now on. KeyError."""
        self._entries.move_to_end(name)
        return self._entries[name].value

    def owner(self, name: str) -> str:
        """Whose entry it is. KeyError."""
        return self._entries[name].owner

    def values(self) -> list[V]:
        """All values, the least recently used first."""
        return [entry.value for entry in self._entries.values()]

    def remove(self, name: str) -> None:
        """Forget an entry, if there is one of that name."""
        if (entry := self._entries.pop(name, None)) is not None:
            self._count(entry.owner, -entry.n_bytes)

    def _count(self, owner: str, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        self._shares[owner] += n_bytes
        if not self._shares[owner]:
            del self._shares[owner]

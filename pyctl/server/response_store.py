"""Finished responses, kept so that a later request can continue or read them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from pyctl.errors import NotFoundError
from pyctl.limit import limit
from pyctl.server.http import encode

__all__ = ["ResponseStore"]

DEFAULT_STORE_BYTES = limit(
    64 << 20,
    "finished responses of /v1/responses that are kept",
    "the oldest are not found any more",
    "memory",
    "bytes",
)

_ENTRY_BYTES = 600
"""What the containers around one response take, roughly."""


@dataclass
class _Stored:
    """A response as JSON, which takes a tenth of the memory that its many small objects would."""

    body: bytes
    messages: bytes
    parent: str | None
    deleted: bool = False

    @property
    def n_bytes(self) -> int:
        return len(self.body) + len(self.messages) + _ENTRY_BYTES


class ResponseStore:
    """The bodies of responses by their ids, and the messages that each added to the one before it.

    Together they take at most ``n_bytes``; what was used least recently goes first. Using a response uses all those
    before it, and these count as used after it: so a response never goes before one that continues it, and everything
    here can be continued. Thread-safe.
    """

    def __init__(self, n_bytes: int = DEFAULT_STORE_BYTES) -> None:
        self._limit = n_bytes
        self._n_bytes = 0
        self._stored: OrderedDict[str, _Stored] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """What is kept takes this many bytes."""
        return self._n_bytes

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, body: dict[str, Any], messages: list[Any], parent: str | None) -> None:
        """Keep the response ``body``; ``messages``, in the form of chat completions, are what was asked after the
        response ``parent``, and the answer. A parent that has gone meanwhile makes it one that nothing can continue,
        so it is not kept.
        """
        stored = _Stored(_json(body), _json(messages), parent)
        with self._lock:
            if parent is not None and parent not in self._stored:
                return
            before = self._stored.get(body["id"])
            self._n_bytes += stored.n_bytes - (before.n_bytes if before is not None else 0)
            self._stored[body["id"]] = stored
            self._use(body["id"])
            while self._n_bytes > self._limit:
                self._n_bytes -= self._stored.popitem(last=False)[1].n_bytes

    def get(self, name: str) -> dict[str, Any]:
        """The body of the response ``name``. Raises NotFoundError."""
        with self._lock:
            body = self._known(name).body
            self._use(name)
        found: dict[str, Any] = msgspec.json.decode(body)
        return found

    def conversation(self, name: str) -> list[Any]:
        """The messages of the response ``name`` and of all before it, the first one first. Raises NotFoundError."""
        with self._lock:
            self._known(name)
            chain = self._use(name)
        return [message for stored in reversed(chain) for message in msgspec.json.decode(stored.messages)]

    def delete(self, name: str) -> None:
        """Forget the response ``name``; what others that continue it need stays for them. Raises NotFoundError."""
        with self._lock:
            self._known(name).deleted = True
            parents = {stored.parent for stored in self._stored.values()}
            at: str | None = name
            while at is not None and at not in parents and self._stored[at].deleted:
                gone = self._stored.pop(at)
                self._n_bytes -= gone.n_bytes
                at = gone.parent
                parents = {stored.parent for stored in self._stored.values()}

    def _known(self, name: str) -> _Stored:
        stored = self._stored.get(name)
        if stored is None or stored.deleted:
            raise NotFoundError(f"Response with id '{name}' not found.")
        return stored

    def _use(self, name: str) -> list[_Stored]:
        """Move ``name`` and all before it to the end of the order; returns them, the last one first."""
        chain: list[_Stored] = []
        at: str | None = name
        while at is not None:
            self._stored.move_to_end(at)
            chain.append(self._stored[at])
            at = self._stored[at].parent
        return chain


def _json(value: Any) -> bytes:
    # A copy: what the encoder returns has room for more behind its end.
    return bytes(memoryview(encode(value)))

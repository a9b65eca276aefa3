"""Finished responses, kept so that a later request can continue or read them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from pyctl.errors import NotFoundError
from pyctl.limit import limit
from pyctl.server.byte_account import ByteAccount
from pyctl.server.http import encode
from pyctl.server.shared_store import SharedStore

__all__ = ["ResponseStore"]

log = logging.getLogger(__name__)

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

    Together they take at most ``n_bytes``, each an eighth of that; see `SharedStore` for which go. Using a response
    uses all those before it, which have the same owner and count as used after it: so a response never goes before one
    that continues it, and everything here can be continued. Thread-safe.
    """

    def __init__(self, n_bytes: int = DEFAULT_STORE_BYTES) -> None:
        self._stored: SharedStore[_Stored] = SharedStore(n_bytes)

    @property
    def n_bytes(self) -> int:
        """What is kept takes this many bytes."""
        return self._stored.n_bytes

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, body: dict[str, Any], messages: list[Any], parent: str | None, owner: str = "") -> None:
        """Keep the response ``body``; ``messages``, in the form of chat completions, are what was asked after the
        response ``parent``, and the answer. One whose parent has gone meanwhile, so that nothing could continue it, is
        not kept, nor is one that is larger than its share.
        """
        stored, name = _Stored(_json(body), _json(messages), parent), body["id"]
        if not self._stored.fits(stored.n_bytes):
            log.warning("response %s is not kept: it has %d bytes", name, stored.n_bytes)
            return
        with self._stored.lock:
            if parent is not None and parent not in self._stored:
                return
            self._stored.put(name, stored, stored.n_bytes, owner if parent is None else self._stored.owner(parent))
            self._use(name)
            self._stored.shrink()

    def get(self, name: str) -> dict[str, Any]:
        """The body of the response ``name``. Raises NotFoundError."""
        with self._stored.lock:
            body = self._known(name).body
            self._use(name)
        found: dict[str, Any] = msgspec.json.decode(body)
        return found

    def conversation(self, name: str, account: ByteAccount) -> list[Any]:
        """The messages of the response ``name`` and of all before it, the first one first, charged to ``account``.
        Raises NotFoundError."""
        with self._stored.lock:
            self._known(name)
            chain = self._use(name)
        account.charge(sum(len(stored.messages) for stored in chain))
        return [message for stored in reversed(chain) for message in msgspec.json.decode(stored.messages)]

    def delete(self, name: str) -> None:
        """Forget the response ``name``; what others that continue it need stays for them. Raises NotFoundError."""
        with self._stored.lock:
            self._known(name).deleted = True
            parents = {stored.parent for stored in self._stored.values()}
            at: str | None = name
            while at is not None and at not in parents and (stored := self._stored.use(at)).deleted:
                self._stored.remove(at)
                at = stored.parent
                parents = {stored.parent for stored in self._stored.values()}

    def _known(self, name: str) -> _Stored:
        stored = self._stored.use(name) if name in self._stored else None
        if stored is None or stored.deleted:
            raise NotFoundError(f"Response with id '{name}' not found.")
        return stored

    def _use(self, name: str) -> list[_Stored]:
        """Make ``name`` and then all before it the last used; returns them, the last one first."""
        chain: list[_Stored] = []
        at: str | None = name
        while at is not None:
            chain.append(self._stored.use(at))
            at = chain[-1].parent
        return chain


def _json(value: Any) -> bytes:
    # A copy: what the encoder returns has room for more behind its end.
    return bytes(memoryview(encode(value)))

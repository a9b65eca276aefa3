"""Responses and conversations of the Responses API, kept between requests and bounded for each client."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request

from pyctl.errors import NotFoundError, RequestError
from pyctl.limit import limit
from pyctl.server.body import ByteAccount
from pyctl.server.http import encode
from pyctl.text import random_id

__all__ = ["SHARE", "ConversationStore", "ResponseStore", "owner_of"]

log = logging.getLogger(__name__)

V = TypeVar("V")

SHARE = 8
"""One entry takes at most this part of a store."""


def owner_of(request: Request) -> str:
    """The owner of the entries that a request makes: its API key, or else its address."""
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
        """The owner of an entry. KeyError."""
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


_MOST_BYTES = limit(64 << 20, "kept conversations of /v1/conversations", "the oldest are deleted", "memory", "bytes")

_MOST_EACH = limit(_MOST_BYTES // SHARE, "one conversation of /v1/responses", "400", "memory", "bytes")

_MOST_METADATA = limit(16 << 10, "`metadata` of a conversation, as JSON", "400", "request", "bytes")

_ENTRY_BYTES = 600
"""Size of the containers around one response or conversation, roughly."""


@dataclass(frozen=True)
class _Kept:
    created_at: int
    metadata: bytes
    messages: tuple[bytes, ...] = ()
    is_full: bool = False

    @property
    def n_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.metadata) + sum(len(part) + 50 for part in self.messages)


class ConversationStore:
    """Conversations by their ids, with their messages in the form of chat completions, as JSON.

    Together they take at most ``n_bytes``, each an eighth of that; see `SharedStore` for which go. Thread-safe.
    """

    def __init__(self, n_bytes: int = _MOST_BYTES) -> None:
        self._kept: SharedStore[_Kept] = SharedStore(n_bytes)

    @property
    def n_bytes(self) -> int:
        """Bytes of all entries."""
        return self._kept.n_bytes

    def create(self, messages: list[Any], metadata: dict[str, Any], owner: str = "") -> dict[str, Any]:
        """A new conversation that begins with ``messages``; its body. RequestError if it is too large."""
        name = "conv_" + random_id()
        kept = _Kept(int(time.time()), _metadata(metadata), (encode(messages),))
        if not self._kept.fits(kept.n_bytes):
            raise RequestError(f"a conversation may have {self._kept.limit // SHARE} bytes, not {kept.n_bytes}")
        with self._kept.lock:
            self._kept.put(name, kept, kept.n_bytes, owner)
            self._kept.shrink()
        return _body(name, metadata, kept.created_at)

    def get(self, name: str) -> dict[str, Any]:
        """The body of the conversation ``name``. Raises NotFoundError."""
        with self._kept.lock:
            kept = self._used(name)
        return _body(name, msgspec.json.decode(kept.metadata), kept.created_at)

    def change(self, name: str, metadata: dict[str, Any]) -> dict[str, Any]:
        """Give it other metadata; its body. Raises NotFoundError, and RequestError if they are too large."""
        data = _metadata(metadata)
        with self._kept.lock:
            kept = self._put(name, replace(self._used(name), metadata=data))
        return _body(name, metadata, kept.created_at)

    def messages(self, name: str, account: ByteAccount) -> list[Any]:
        """The messages of the conversation ``name``, charged to ``account``. Raises NotFoundError, and RequestError if
        not all of it was kept."""
        with self._kept.lock:
            kept = self._used(name)
        if kept.is_full:
            most = self._kept.limit // SHARE
            raise RequestError(f"the conversation {name} has more than {most} bytes and cannot be continued")
        account.charge(kept.n_bytes)
        return [message for part in kept.messages for message in msgspec.json.decode(part)]

    def add(self, name: str, messages: list[Any]) -> None:
        """``messages`` are said next; nothing happens if the conversation has gone meanwhile. One that grows beyond its
        share keeps what it has, and cannot go on."""
        data = encode(messages)
        with self._kept.lock:
            if name in self._kept:
                kept = self._used(name)
                grown = replace(kept, messages=(*kept.messages, data))
                self._put(name, grown if self._kept.fits(grown.n_bytes) else replace(kept, is_full=True))

    def delete(self, name: str) -> None:
        """Forget the conversation ``name``. Raises NotFoundError."""
        with self._kept.lock:
            self._used(name)
            self._kept.remove(name)

    def _used(self, name: str) -> _Kept:
        if name not in self._kept:
            raise NotFoundError(f"Conversation with id '{name}' not found.")
        return self._kept.use(name)

    def _put(self, name: str, kept: _Kept) -> _Kept:
        self._kept.put(name, kept, kept.n_bytes, self._kept.owner(name))
        self._kept.shrink()
        return kept


def _metadata(metadata: dict[str, Any]) -> bytes:
    data = encode(metadata)
    if len(data) > _MOST_METADATA:
        raise RequestError(f"'metadata' may have {_MOST_METADATA} bytes as JSON, not {len(data)}")
    return data


def _body(name: str, metadata: dict[str, Any], created_at: int) -> dict[str, Any]:
    return {"id": name, "object": "conversation", "created_at": created_at, "metadata": metadata}


DEFAULT_STORE_BYTES = limit(
    64 << 20,
    "kept responses of /v1/responses",
    "the oldest are deleted",
    "memory",
    "bytes",
)


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
        """Bytes of all entries."""
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
            log.warning("response %s not stored: %d bytes exceed the limit", name, stored.n_bytes)
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
    # A copy: what the encoder returns has spare room at its end.
    return bytes(memoryview(encode(value)))

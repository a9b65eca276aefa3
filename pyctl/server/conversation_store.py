"""Conversations of the Responses API: what was said in each, kept at the server under a name."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pyctl.errors import NotFoundError, RequestError
from pyctl.limit import limit
from pyctl.server.byte_account import ByteAccount
from pyctl.server.http import encode
from pyctl.server.shared_store import SHARE, SharedStore
from pyctl.text import random_id

__all__ = ["ConversationStore"]

_MOST_BYTES = limit(
    64 << 20, "conversations of /v1/responses that are kept", "the oldest are not found any more", "memory", "bytes"
)

_MOST_EACH = limit(_MOST_BYTES // SHARE, "one conversation of /v1/responses", "400", "memory", "bytes")

_MOST_METADATA = limit(16 << 10, "`metadata` of a conversation, as JSON", "400", "request", "bytes")

_ENTRY_BYTES = 600
"""What the containers around one conversation take, roughly."""


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
        """What is kept takes this many bytes."""
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
        """What was said in the conversation ``name``, charged to ``account``. Raises NotFoundError, and RequestError if
        not all of it was kept."""
        with self._kept.lock:
            kept = self._used(name)
        if kept.is_full:
            most = self._kept.limit // SHARE
            raise RequestError(f"the conversation {name} has more than {most} bytes and cannot go on")
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

"""Conversations of the Responses API: what was said in each, kept at the server under a name."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pyctl.errors import NotFoundError
from pyctl.limit import limit
from pyctl.server.http import encode
from pyctl.text import random_id

__all__ = ["ConversationStore"]

_MOST_BYTES = limit(
    64 << 20, "conversations of /v1/responses that are kept", "the oldest are not found any more", "memory", "bytes"
)

_ENTRY_BYTES = 600
"""What the containers around one conversation take, roughly."""


@dataclass
class _Kept:
    created_at: int
    metadata: bytes
    messages: list[bytes] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.metadata) + sum(len(part) + 50 for part in self.messages)


class ConversationStore:
    """Conversations by their ids, with their messages in the form of chat completions, as JSON.

    Together they take at most ``n_bytes``; beyond that whole ones go, the one that was used least recently first.
    Thread-safe.
    """

    def __init__(self, n_bytes: int = _MOST_BYTES) -> None:
        self._limit = n_bytes
        self._n_bytes = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """What is kept takes this many bytes."""
        return self._n_bytes

    def create(self, messages: list[Any], metadata: dict[str, Any]) -> dict[str, Any]:
        """A new conversation that begins with ``messages``; its body."""
        name = "conv_" + random_id()
        kept = _Kept(int(time.time()), encode(metadata), [encode(messages)])
        with self._lock:
            self._kept[name] = kept
            self._n_bytes += kept.n_bytes
            self._shrink()
        return _body(name, metadata, kept.created_at)

    def get(self, name: str) -> dict[str, Any]:
        """The body of the conversation ``name``. Raises NotFoundError."""
        with self._lock:
            kept = self._used(name)
            return _body(name, msgspec.json.decode(kept.metadata), kept.created_at)

    def change(self, name: str, metadata: dict[str, Any]) -> dict[str, Any]:
        """Give it other metadata; its body. Raises NotFoundError."""
        with self._lock:
            kept = self._used(name)
            self._n_bytes -= kept.n_bytes
            kept.metadata = encode(metadata)
            self._n_bytes += kept.n_bytes
            return _body(name, metadata, kept.created_at)

    def messages(self, name: str) -> list[Any]:
        """What was said in the conversation ``name``. Raises NotFoundError."""
        with self._lock:
            parts = list(self._used(name).messages)
        return [message for part in parts for message in msgspec.json.decode(part)]

    def add(self, name: str, messages: list[Any]) -> None:
        """``messages`` are said next; nothing happens if the conversation has gone meanwhile."""
        with self._lock:
            if name in self._kept:
                kept = self._used(name)
                self._n_bytes -= kept.n_bytes
                kept.messages.append(encode(messages))
                self._n_bytes += kept.n_bytes
                self._shrink()

    def delete(self, name: str) -> None:
        """Forget the conversation ``name``. Raises NotFoundError."""
        with self._lock:
            self._n_bytes -= self._used(name).n_bytes
            del self._kept[name]

    def _used(self, name: str) -> _Kept:
        if name not in self._kept:
            raise NotFoundError(f"Conversation with id '{name}' not found.")
        self._kept.move_to_end(name)
        return self._kept[name]

    def _shrink(self) -> None:
        while self._n_bytes > self._limit:
            self._n_bytes -= self._kept.popitem(last=False)[1].n_bytes


def _body(name: str, metadata: dict[str, Any], created_at: int) -> dict[str, Any]:
    return {"id": name, "object": "conversation", "created_at": created_at, "metadata": metadata}

"""Conversations that clients continue by the id of the last reply: Anthropic's ``thread``.

A thread is a name for a prefix. The server keeps the text of the conversation, so that a request
brings only its new messages; the prefix cache has its tokens as it has any prompt.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import msgspec

from pyctl.errors import LostThreadError, ThreadError
from pyctl.requests.reply_history import ReplyHistory
from pyctl.settings.limit import limit

__all__ = ["MAX_THREADS", "MAX_THREAD_BYTES", "KeptThread", "ThreadCounts", "Threads"]

MAX_THREADS = limit(
    1_024, "conversations that clients continue by id", "the oldest are forgotten", "memory"
)
MAX_THREAD_BYTES = limit(
    2**26, "the texts of these conversations", "the oldest are forgotten", "memory", "bytes"
)
MAX_ONE_THREAD = limit(
    2**24, "the text of one of these conversations", "400, to be sent whole", "memory", "bytes"
)
"""A quarter of all: long conversations with images must not forget everybody else's at once."""

_ENTRY_BYTES = 512
"""Approximate bytes of the objects of a thread and of its id."""

_MESSAGE_BYTES = 48
"""Approximate bytes of the objects of a message."""


@dataclass(frozen=True)
class KeptThread:
    """A conversation up to a reply.

    Attributes:
        owner: The client that may continue it.
        head: The fields that all turns share, as JSON.
        messages: The messages, each as JSON.
    """

    owner: bytes
    head: bytes
    messages: tuple[bytes, ...]

    @property
    def n_bytes(self) -> int:
        """The approximate bytes that it takes in memory."""
        texts = len(self.head) + sum(map(len, self.messages))
        return _ENTRY_BYTES + texts + _MESSAGE_BYTES * len(self.messages)

    def check_size(self) -> None:
        """Raise ThreadError if it is too large to be kept."""
        if self.n_bytes > MAX_ONE_THREAD:
            raise ThreadError(
                f"the conversation has more than {MAX_ONE_THREAD} bytes and cannot be kept as a "
                "'thread'; send all of it without 'thread'"
            )


class ThreadCounts(msgspec.Struct, frozen=True):
    """The number of threads that are kept and their bytes; the sums since the start of those
    created, continued, forgotten when there was no more room, and looked up in vain.
    """

    n_kept: int = 0
    n_bytes: int = 0
    n_created: int = 0
    n_continued: int = 0
    n_forgotten: int = 0
    n_lost: int = 0


class Threads:
    """The threads of all models of a process, by the id of their last reply. Thread-safe.

    A reply replaces the one that it continues, so a conversation is kept once, however long it
    gets. Two replies to one turn are two threads. At most ``max_threads`` and ``max_bytes`` are
    kept; the least recently continued are forgotten first.
    """

    def __init__(self, max_threads: int = MAX_THREADS, max_bytes: int = MAX_THREAD_BYTES) -> None:
        self._history: ReplyHistory[KeptThread] = ReplyHistory(max_threads, max_bytes)
        self._lock = threading.Lock()  # guards the members below
        self._n_created = 0
        self._n_continued = 0
        self._n_lost = 0

    def find(self, message_id: str, owner: bytes) -> KeptThread:
        """Return the thread whose last reply is ``message_id``. Raises LostThreadError if there is
        none, or if it belongs to another client.
        """
        thread = self._history.find(message_id, owner)
        if thread is not None:
            return thread
        with self._lock:
            self._n_lost += 1
        raise LostThreadError

    def keep(self, message_id: str, thread: KeptThread, continued: str = "") -> None:
        """Keep ``thread`` under the id of its last reply; it takes the place of the one under
        ``continued``, empty for a new one.
        """
        self._history.add(message_id, thread, replaced=continued)
        with self._lock:
            if continued:
                self._n_continued += 1
            else:
                self._n_created += 1

    def counts(self) -> ThreadCounts:
        """Return the counts for clients."""
        with self._lock:
            return ThreadCounts(
                n_kept=len(self._history),
                n_bytes=self._history.n_bytes,
                n_created=self._n_created,
                n_continued=self._n_continued,
                n_forgotten=self._history.n_forgotten,
                n_lost=self._n_lost,
            )

"""Diagnosis of a cache miss: the first part in which a request differs from an earlier one, which
its client names by the id of the reply.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from pyctl.prompt import Prompt
from pyctl.requests.body import ConversationBody
from pyctl.settings.limit import limit

__all__ = ["CacheMiss", "MissReason", "RequestRecord", "RequestRecords", "diagnose"]

MissReason: TypeAlias = Literal[
    "not_found", "model", "tools", "system", "messages", "options", "not_cached"
]
"""The first part that differs, in this order. ``not_found``: the earlier request is unknown.
``options`` are variables of the template, and whatever else becomes part of the prompt.
``not_cached``: the request continues the earlier one, whose snapshots were evicted, or whose
messages the template now renders differently.
"""

_BATCH_TOKENS = 512
"""A prompt that continues another one may evaluate the last batch of that again."""

MAX_RECORDS = limit(
    4_096, "requests that clients compare later ones with", "the oldest are forgotten", "memory"
)
MAX_RECORD_BYTES = limit(
    2**24, "the digests of these requests", "the oldest are forgotten", "memory", "bytes"
)

_DIGEST_BYTES = 8
_ENTRY_BYTES = 512
"""Approximate bytes of a record without its messages."""


@dataclass(frozen=True)
class CacheMiss:
    """The reason of a miss, and the tokens of the earlier prompt that were not restored; 0 if they
    are not known.
    """

    reason: MissReason
    n_missed: int = 0


@dataclass(frozen=True)
class RequestRecord:
    """A request as digests of its parts.

    Attributes:
        owner: The client, who alone may compare with it.
        model: The name of the model.
        tools: The digest of the tools.
        system: The digest of the system messages at the start.
        messages: The digests of all other messages, `_DIGEST_BYTES` each.
        options: The digest of the other parts of the prompt.
        n_tokens: The tokens that the prompt of the next turn is expected to share.
    """

    owner: bytes
    model: str
    tools: bytes
    system: bytes
    messages: bytes
    options: bytes
    n_tokens: int

    @classmethod
    def from_body(
        cls, owner: bytes, model: str, body: ConversationBody, prompt: Prompt
    ) -> RequestRecord:
        """Return the record of a request that was rendered to ``prompt``."""
        messages = body.messages if isinstance(body.messages, list) else []
        n_system = _n_system(messages)
        options = [
            body.chat_template_kwargs,
            body.reasoning_effort,
            body.enable_thinking,
            body.add_generation_prompt,
            body.continue_final_message,
        ]
        return cls(
            owner=owner,
            model=model,
            tools=_digest(body.tools or []),
            system=_digest(messages[:n_system]),
            messages=b"".join(_digest(message) for message in messages[n_system:]),
            options=_digest(options),
            n_tokens=prompt.end,
        )

    @property
    def n_bytes(self) -> int:
        """The approximate bytes that it takes in memory."""
        return _ENTRY_BYTES + len(self.messages)

    def first_difference(self, later: RequestRecord) -> MissReason | None:
        """Return the first part in which a ``later`` request differs; None if it continues this
        one.
        """
        if self.model != later.model:
            return "model"
        if self.tools != later.tools:
            return "tools"
        if self.system != later.system:
            return "system"
        if not later.messages.startswith(self.messages):
            return "messages"
        if self.options != later.options:
            return "options"
        return None


class RequestRecords:
    """The records of the latest requests, by the id of their reply; at most ``max_records`` and
    ``max_bytes``. Thread-safe.
    """

    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards the members below
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def n_bytes(self) -> int:
        """The approximate bytes of all records."""
        return self._n_bytes

    def add(self, reply_id: str, record: RequestRecord) -> None:
        """Remember the request that ``reply_id`` answers."""
        with self._lock:
            self._records[reply_id] = record
            self._n_bytes += record.n_bytes
            while self._records and self._is_full:
                _, oldest = self._records.popitem(last=False)
                self._n_bytes -= oldest.n_bytes

    def find(self, reply_id: str, owner: bytes) -> RequestRecord | None:
        """Return the request of ``owner`` that ``reply_id`` answers; None if it is not known."""
        with self._lock:
            record = self._records.get(reply_id)
        return record if record is not None and record.owner == owner else None

    @property
    def _is_full(self) -> bool:
        return len(self._records) > self._max_records or self._n_bytes > self._max_bytes


def diagnose(
    earlier: RequestRecord | None, later: RequestRecord, n_cached: int
) -> CacheMiss | None:
    """Return why the prompt of ``later`` did not resume after ``earlier``, which is None if it is
    not known; None if it did. Its first ``n_cached`` tokens were restored.

    A client that prunes its history may still resume after all that was expected: then nothing
    missed.
    """
    if earlier is None:
        return CacheMiss("not_found")
    n_missed = earlier.n_tokens - n_cached
    if n_missed <= 0:
        return None
    difference = earlier.first_difference(later)
    if difference is None and n_missed < _BATCH_TOKENS:
        return None
    return CacheMiss(difference or "not_cached", n_missed)


def _n_system(messages: Sequence[Any]) -> int:
    """Return how many messages at the start are the system's."""
    roles = ("system", "developer")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in roles:
            return number
    return len(messages)


def _digest(value: Any) -> bytes:
    text = msgspec.json.encode(value)
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()

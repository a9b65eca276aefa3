"""Diagnosis of a cache miss: the first part in which a request differs from an earlier one, which
its client names by the id of the reply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from pyctl.prompt import Prompt, PromptSections
from pyctl.requests.reply_history import ReplyHistory
from pyctl.settings.limit import limit

__all__ = ["CacheMiss", "MissReason", "RequestRecord", "RequestRecords", "diagnose"]

MissReason: TypeAlias = Literal[
    "not_found", "model", "tools", "system", "messages", "options", "not_cached"
]
"""The first part that differs, in this order. ``not_found``: the earlier request is unknown.
``options`` are variables of the template. ``not_cached``: the request continues the earlier one,
whose snapshots were evicted, or whose messages the template now renders differently.
"""

_BATCH_TOKENS = 512
"""A prompt that continues another one may evaluate the last batch of that again."""

MAX_RECORDS = limit(
    4_096, "requests that clients compare later ones with", "the oldest are forgotten", "memory"
)
MAX_RECORD_BYTES = limit(
    2**24, "the digests of these requests", "the oldest are forgotten", "memory", "bytes"
)

_ENTRY_BYTES = 512
"""Approximate bytes of a record without its messages."""


class CacheMiss(msgspec.Struct, frozen=True):
    """The reason of a miss, and the tokens of the earlier prompt that were not restored; 0 if they
    are not known.
    """

    reason: MissReason
    n_missed: int = 0


@dataclass(frozen=True)
class RequestRecord:
    """A request as digests of its sections.

    Attributes:
        owner: The client, who alone may compare with it.
        model: The name of the model.
        sections: The digests of its tools, messages and variables of the template.
        n_tokens: The tokens that the prompt of the next turn is expected to share.
    """

    owner: bytes
    model: str
    sections: PromptSections
    n_tokens: int

    @classmethod
    def from_prompt(cls, owner: bytes, model: str, prompt: Prompt) -> RequestRecord:
        """Return the record of a chat request that was rendered to ``prompt``."""
        assert prompt.sections is not None  # every rendered chat has them
        return cls(owner, model, prompt.sections, prompt.end)

    @property
    def n_bytes(self) -> int:
        """The approximate bytes that it takes in memory."""
        return _ENTRY_BYTES + len(self.sections.messages)

    def first_difference(self, later: RequestRecord) -> MissReason | None:
        """Return the first part in which a ``later`` request differs; None if it continues this
        one.
        """
        if self.model != later.model:
            return "model"
        earlier = self.sections
        given = later.sections
        if earlier.tools != given.tools:
            return "tools"
        if earlier.system != given.system:
            return "system"
        if not given.messages.startswith(earlier.messages):
            return "messages"
        if earlier.variables != given.variables:
            return "options"
        return None


class RequestRecords(ReplyHistory[RequestRecord]):
    """The records of the latest requests, by the id of their reply."""

    def __init__(self, max_entries: int = MAX_RECORDS, max_bytes: int = MAX_RECORD_BYTES) -> None:
        super().__init__(max_entries, max_bytes)


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

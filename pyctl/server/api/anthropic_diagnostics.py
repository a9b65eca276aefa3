"""Anthropic's ``diagnostics``: why a prompt did not resume where an earlier one ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pyctl.errors import RequestError
from pyctl.prompt import Prompt
from pyctl.requests.body_reader import Body
from pyctl.requests.cache_diagnosis import (
    CacheMiss,
    MissReason,
    RequestRecord,
    RequestRecords,
    diagnose,
)

__all__ = ["Diagnostics", "diagnostics_of"]

_TYPES: dict[MissReason, str] = {
    "not_found": "previous_message_not_found",
    "model": "model_changed",
    "tools": "tools_changed",
    "system": "system_changed",
    "messages": "messages_changed",
    "options": "unavailable",
    "not_cached": "unavailable",
}
"""Anthropic's reasons. It has no name for the last two, and "can't give a diagnosis" for both."""

_WITHOUT_TOKENS = ("previous_message_not_found", "unavailable")


class _DiagnosticsBody(Body, frozen=True):
    previous_message_id: str = ""


class Diagnostics(msgspec.Struct, frozen=True):
    """The requested diagnosis of a cache miss.

    Attributes:
        records: The records of earlier requests.
        record: The record of this one.
        previous_message_id: The id of the message to compare with, empty for a first turn.
    """

    records: RequestRecords
    record: RequestRecord
    previous_message_id: str = ""

    def answer(self, n_cached: int) -> dict[str, Any] | None:
        """Return the member ``diagnostics`` of a message, of whose prompt ``n_cached`` tokens were
        restored; None if nothing diverged.
        """
        if not self.previous_message_id:
            return None
        earlier = self.records.find(self.previous_message_id, self.record.owner)
        miss = diagnose(earlier, self.record, n_cached)
        return None if miss is None else {"cache_miss_reason": _reason(miss)}

    def remember(self, message_id: str) -> None:
        """Let later requests compare with this one by the id of its message."""
        self.records.add(message_id, self.record)


def diagnostics_of(
    values: Mapping[str, Any],
    records: RequestRecords,
    owner: bytes,
    model: str,
    prompt: Prompt,
) -> Diagnostics | None:
    """Return the diagnosis that the body ``values`` of ``owner`` requests, None for none. Its
    conversation was rendered to ``prompt`` for ``model``. Raises RequestError.
    """
    requested = values.get("diagnostics")
    if requested is None:
        return None
    if not isinstance(requested, dict):
        raise RequestError("'diagnostics' must be an object")
    previous = _DiagnosticsBody.from_json(requested).previous_message_id
    record = RequestRecord.from_prompt(owner, model, prompt)
    return Diagnostics(records, record, previous)


def _reason(miss: CacheMiss) -> dict[str, Any]:
    kind = _TYPES[miss.reason]
    if kind in _WITHOUT_TOKENS:
        return {"type": kind}
    return {"type": kind, "cache_missed_input_tokens": miss.n_missed}

"""Digests of the sections of a chat request, by which two requests are compared without their
text.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from pyctl.chat.json_object import JsonObject, JsonObjects
from pyctl.prompt import SECTION_BYTES, PromptSections

__all__ = ["digest_sections"]

_SYSTEM_ROLES = frozenset({"system", "developer"})


def digest_sections(
    messages: JsonObjects, tools: JsonObjects | None, variables: JsonObject
) -> PromptSections:
    """Return the digests of a request; its leading system messages count as one section."""
    n_system = 0
    while n_system < len(messages) and messages[n_system].get("role") in _SYSTEM_ROLES:
        n_system += 1
    others = messages[n_system:]
    return PromptSections(
        tools=_digest(tools) if tools else b"",
        system=_digest(messages[:n_system]) if n_system else b"",
        variables=_digest(variables),
        messages=b"".join(_digest(message) for message in others),
        n_replies=sum(message.get("role") == "assistant" for message in others),
    )


def _digest(value: Any) -> bytes:
    """Return the digest of a JSON value; the order of members counts, as it does in a prompt."""
    encoded = msgspec.json.encode(value)
    return hashlib.blake2b(encoded, digest_size=SECTION_BYTES).digest()

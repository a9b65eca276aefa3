"""Names for parsed JSON: objects of clients, and those that templates and schemas are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["JsonDict", "JsonObject", "JsonObjects"]

JsonObject: TypeAlias = Mapping[str, Any]
"""A JSON object that is only read."""

JsonObjects: TypeAlias = Sequence[JsonObject]
"""A list of such objects: messages of a chat, or its tools."""

JsonDict: TypeAlias = dict[str, Any]
"""A JSON object that is being made."""

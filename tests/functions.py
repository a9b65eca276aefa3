"""Tools as clients send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["function", "turned"]


def function(
    name: str, *, required: Sequence[str] = (), description: str | None = None, **properties: Any
) -> Any:
    """Return a tool of one function, whose arguments have the schemas ``properties``."""
    schema = {
        "type": "object",
        "properties": properties,
        **({"required": list(required)} if required else {}),
    }
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def turned(value: Any) -> Any:
    """The same JSON, the keys of all objects in the reverse order."""
    if isinstance(value, dict):
        return {key: turned(each) for key, each in reversed(value.items())}
    return [turned(each) for each in value] if isinstance(value, list) else value

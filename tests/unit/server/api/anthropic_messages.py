"""Messages of Anthropic's API, and the messages of a chat that they become."""

from __future__ import annotations

from typing import Any

from pyctl.server.api.anthropic_request import chat_fields

__all__ = ["FOUND", "HI", "SOURCE", "converted", "messages_of", "text", "user"]


def converted(messages: Any, **fields: Any) -> dict[str, Any]:
    return chat_fields({"messages": messages, **fields})


def messages_of(*messages: Any, **fields: Any) -> Any:
    return converted(list(messages), **fields)["messages"]


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


HI = {"role": "user", "content": "hi"}


SOURCE = {"type": "content", "content": [text("first"), text(" second")]}


FOUND = {
    "type": "search_result",
    "title": "Doors",
    "source": "https://a.b",
    "content": [text("red")],
}

"""System messages within a conversation of Anthropic's API: texts, changes of tools, effort."""

from __future__ import annotations

from typing import Any

from pyctl.errors import RequestError
from pyctl.requests.body_reader import json_object
from pyctl.server.api.anthropic_blocks import content_parts, has_image, joined, parse_blocks
from pyctl.server.api.anthropic_tools import OfferedTools

__all__ = ["changed_tools", "last_effort", "read_system_message"]

_CHANGES = ("tool_addition", "tool_removal")
_LIFETIMES = (None, "never", "next_user_message")
_OWN = ("clear_at", "output_config")
"""Members that a template would not know."""


def read_system_message(
    message: dict[str, Any], where: str, offered: OfferedTools, *, is_followed: bool
) -> list[dict[str, Any]]:
    """Return a system message as messages of a chat, none if it has no text now; apply its changes
    of the ``offered`` tools.

    Its text may end with the user's turn: then it has none once a later message of the user
    follows (``is_followed``). Raises RequestError.
    """
    lifetime = message.get("clear_at")
    if lifetime not in _LIFETIMES:
        raise RequestError(f"{where}.clear_at must be never or next_user_message")
    content = message.get("content")
    if content is None and not message.get("output_config"):
        raise RequestError(f"{where} must have 'content' or 'output_config'")
    is_cleared = lifetime == "next_user_message" and is_followed
    if not isinstance(content, list):
        if is_cleared or (not content and message.get("output_config")):
            return []
        return [{name: value for name, value in message.items() if name not in _OWN}]
    texts: list[str] = []
    for place, block in parse_blocks(content, f"{where}.content"):
        if block.type in _CHANGES:
            texts.append(offered.change(block.type, block.tool, place))
            continue
        parts = content_parts(block, place)
        if has_image(parts):
            raise RequestError(f"{place}: a system message must be text")
        if not is_cleared:
            texts.append(joined(parts))
    text = "\n".join(text for text in texts if text)
    return [{"role": "system", "content": text}] if text else []


def changed_tools(changes: list[Any], where: str, offered: OfferedTools) -> list[dict[str, Any]]:
    """Return the message that a summary's list of changes becomes, after the summary; apply them to
    the ``offered`` tools. Raises RequestError.
    """
    texts = []
    for place, block in parse_blocks(changes, where):
        if block.type not in _CHANGES:
            raise RequestError(f"{place} must be of type {' or '.join(_CHANGES)}")
        texts.append(offered.change(block.type, block.tool, place))
    return [{"role": "system", "content": "\n".join(texts)}]


def last_effort(messages: Any) -> str:
    """Return the effort that the last of the system messages sets; empty if none does. Raises
    RequestError.
    """
    if not isinstance(messages, list):
        return ""
    for index in reversed(range(len(messages))):
        message = messages[index]
        if not isinstance(message, dict) or message.get("role") != "system":
            continue
        config = message.get("output_config")
        if config is None:
            continue
        effort = json_object(config, f"messages[{index}].output_config").get("effort")
        if effort is not None and not isinstance(effort, str):
            raise RequestError(f"'messages[{index}].output_config.effort' must be a string")
        if effort:
            return effort
    return ""

"""A request of Anthropic's Messages API as the body of a chat completion.

Fields that Anthropic's API lacks (seed, min_p, cache_prompt, prefix_cache, ...) are passed on. The
conversion is llama-server's, so that both render the same prompt, but for these:

* Text that follows a tool result in one message stays after it; llama-server moves it before the
  result.
* The text blocks of an assistant turn are one text again, as the model wrote it, whatever the
  template makes of parts.
* ``tool_choice`` none and a named tool, ``disable_parallel_tool_use`` and ``thinking`` disabled are
  obeyed; llama-server ignores the wish or widens it.
* ``output_config.format``, ``output_format`` in betas, binds the reply to a schema; llama-server
  ignores it.
* ``n`` above 1, ``mcp_servers``, ``container`` and ``compaction`` are refused; llama-server ignores
  them. A ``thread`` is resolved before (`anthropic_thread`).
* ``cache_control`` is an announcement to the prefix cache (`anthropic_cache`).
* A tool that only Anthropic's models or servers have (``web_search_20250305``, ``bash_20250124``)
  is refused, unless it brings its ``input_schema``; llama-server makes it a function without
  parameters.
* A tool with ``defer_loading`` is left out of the head until a result refers to it
  (`anthropic_tools`); llama-server shows all.
* Every block is read that holds text, and refused otherwise; llama-server drops most of them in
  silence.
* A tool that ran at Anthropic's servers is a call and its result, as if the client had run it.
* System messages may add and remove tools, end with the turn, and set the effort
  (`anthropic_system`); llama-server drops them in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pyctl.errors import RequestError
from pyctl.requests.body import ONE_REPLY
from pyctl.requests.body_reader import Body, Names, Unsupported, items, others
from pyctl.server.api.anthropic_blocks import (
    MessageBlock,
    Part,
    content_parts,
    has_image,
    joined,
    parse_blocks,
    parse_result,
    parse_server_result,
)
from pyctl.server.api.anthropic_cache import retention_fields
from pyctl.server.api.anthropic_system import changed_tools, last_effort, read_system_message
from pyctl.server.api.anthropic_tools import OfferedTools
from pyctl.server.http import encode

__all__ = ["chat_fields"]

_N_PREDICT = 4096
_THINKING_BUDGET = 10000


class _ToolChoice(Body, frozen=True):
    type: Any = None
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Thinking(Body, frozen=True):
    type: Any = None
    budget_tokens: int = _THINKING_BUDGET


class _MessagesBody(Body, frozen=True):
    """The body of POST /v1/messages."""

    unsupported: ClassVar[Unsupported] = {
        **ONE_REPLY,
        "compaction": ("request the summary in a message",),
        "container": ("this server runs no code",),
        "mcp_servers": ("connect to them in the client",),
    }

    system: Any = None
    messages: Any = None
    tools: list[Any] | None = None
    tool_choice: _ToolChoice = _ToolChoice()
    stop_sequences: Any = None
    max_tokens: Any = _N_PREDICT
    thinking: _Thinking = _Thinking()
    effort: Annotated[str, Names("output_config.effort")] = ""
    format: Annotated[dict[str, Any] | None, Names("output_config.format", "output_format")] = None
    chat_template_kwargs: dict[str, Any] | None = None


_IGNORED = frozenset(
    {
        "model",
        "metadata",
        "output_config",
        "output_format",
        "cache_control",
        "context_management",
        "diagnostics",
        "thread",
        "service_tier",
    }
    | {"inference_geo", "n", "n_cmpl", "fallbacks"}
)
"""Fields that mean nothing to us, and fields of chat completions that this API lacks.

``fallbacks`` are models for requests that the first one declines: without them, the model reads the
same conversation. ``context_management``, ``diagnostics`` and ``thread`` are read before.
"""


def chat_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the chat completion that ``values`` describe. Raises RequestError."""
    body = _MessagesBody.from_json(values)
    chat = others(values, _MessagesBody, _IGNORED)
    offered = OfferedTools(body.tools or ())
    chat["messages"] = [*_system(body.system), *_messages(body.messages, offered)]
    if body.messages and not chat["messages"]:  # llama-server also answers if all blocks are empty
        chat["messages"] = [{"role": "user", "content": ""}]
    chat["max_tokens"] = body.max_tokens
    if body.stop_sequences is not None:
        chat["stop"] = body.stop_sequences
    if body.tools is not None or offered.head:
        chat["tools"] = offered.head
    if offered.is_changed:
        chat["callable_tools"] = offered.callable
    if body.tool_choice.type is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    if body.tool_choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False
    if body.chat_template_kwargs is not None:
        chat["chat_template_kwargs"] = body.chat_template_kwargs
    if body.thinking.type == "enabled":
        chat["thinking_budget_tokens"] = body.thinking.budget_tokens
    elif body.thinking.type == "disabled":
        chat["chat_template_kwargs"] = {
            "enable_thinking": False,
            **(body.chat_template_kwargs or {}),
        }
    effort = last_effort(body.messages) or body.effort
    if effort:
        chat["reasoning_effort"] = effort
    if body.format is not None:
        chat["response_format"] = body.format
    retention = retention_fields(values)
    if retention:
        chat["cache_retention"] = {**retention, **(chat.get("cache_retention") or {})}
    return chat


def _system(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "system", "content": value}]
    parts: list[Part] = []
    for where, block in parse_blocks(items(value, "system"), "system"):
        parts += content_parts(block, where)
    if has_image(parts):
        raise RequestError("'system' must be text")
    return [{"role": "system", "content": joined(parts)}]


def _messages(value: Any, offered: OfferedTools) -> list[Any]:
    """Return the messages of a chat, and apply their changes of the ``offered`` tools."""
    if value is None:
        raise RequestError("'messages' is required")
    given = items(value, "messages")
    last_user = _last_user(given)
    messages: list[Any] = []
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise RequestError(f"{where} must be an object")
        content = message.get("content")
        if message.get("role") == "system":
            messages += read_system_message(message, where, offered, is_followed=index < last_user)
        elif isinstance(content, list):
            messages += _split_messages(
                str(message.get("role")), parse_blocks(content, f"{where}.content"), offered
            )
        elif content is not None or message.get("role") != "assistant":
            messages.append(message)
    return messages


def _last_user(messages: list[Any]) -> int:
    """Return the index of the last message of the user, -1 without one."""
    users = (
        index
        for index in reversed(range(len(messages)))
        if isinstance(messages[index], dict) and messages[index].get("role") == "user"
    )
    return next(users, -1)


def _split_messages(
    role: str, blocks: list[tuple[str, MessageBlock]], offered: OfferedTools
) -> list[dict[str, Any]]:
    """Return one message for each run of blocks between tool results, and one for each of these."""
    messages: list[dict[str, Any]] = []
    parts: list[Part] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []

    def flush() -> None:
        if not (parts or calls or thoughts):
            return
        is_kept = bool(parts) and (role != "assistant" or has_image(parts))
        message: dict[str, Any] = {
            "role": role,
            "content": parts.copy() if is_kept else joined(parts),
        }
        if calls:
            message["tool_calls"] = calls.copy()
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        messages.append(message)
        for told in (parts, calls, thoughts):
            told.clear()

    for where, block in blocks:
        kind = str(block.type)
        if kind == "thinking":
            if block.thinking:  # some clients send only its signature
                thoughts.append(block.thinking)
        elif kind in ("tool_use", "server_tool_use", "mcp_tool_use"):
            function = {"name": block.name, "arguments": encode(block.input or {}).decode()}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif kind in ("tool_result", "mcp_tool_result"):
            flush()
            content = offered.load(block.content)
            messages.append(_result(block, parse_result(content, f"{where}.content")))
        elif kind.endswith("_tool_result"):
            flush()
            messages.append(_result(block, parse_server_result(block.content, f"{where}.content")))
        elif kind == "mid_conv_system":
            flush()
            messages.append(
                {"role": "system", "content": parse_result(block.content, f"{where}.content")}
            )
        else:
            parts += content_parts(block, where)
        if kind == "compaction" and block.tool_changes:
            flush()
            messages += changed_tools(block.tool_changes, f"{where}.tool_changes", offered)
    flush()
    return messages


def _result(block: MessageBlock, content: str | list[Part]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _tool_choice(choice: _ToolChoice) -> Any:
    kind = choice.type
    if kind == "tool" and choice.name:
        return {"type": "function", "function": {"name": choice.name}}
    modes = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in modes:
        raise RequestError("'tool_choice.type' must be auto, any, tool or none")
    return modes[kind]

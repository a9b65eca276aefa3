"""A request of Anthropic's Messages API as the body of a chat completion.

Fields that Anthropic's API lacks (seed, min_p, cache_prompt, prefix_cache, ...) are passed on. The conversion is
llama-server's, so that both render the same prompt, but for these:

* Text that follows a tool result in one message stays after it; llama-server moves it before the result.
* The text blocks of an assistant turn are one text again, as the model wrote it, whatever the template makes of parts.
* ``tool_choice`` none and a named tool, ``disable_parallel_tool_use`` and ``thinking`` disabled are obeyed;
  llama-server ignores the wish or widens it.
* ``output_config.format``, ``output_format`` in betas, binds the reply to a schema; llama-server ignores it.
* ``n`` above 1, ``mcp_servers`` and ``container`` are refused; llama-server ignores them.
* A document is read if it is plain text, and refused otherwise; llama-server drops it in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pyctl.errors import RequestError
from pyctl.server.body import ONE_REPLY, Body, Names, items, json_object, others, refuse
from pyctl.server.http import encode
from pyctl.server.image_sources import ImagePart

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
    """POST /v1/messages"""

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


class _Block(Body, frozen=True):
    """One block of a message or of the system text; what it may have depends on its type."""

    type: Any = None
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: Any = None
    source: Any = None


class _Source(Body, frozen=True):
    type: Any = None
    data: str = ""
    url: str = ""


class _Tool(Body, frozen=True):
    name: str = ""
    description: str = ""
    input_schema: Any = None


_IGNORED = frozenset(
    {"model", "metadata", "output_config", "output_format", "cache_control", "context_management", "service_tier"}
    | {"inference_geo", "n", "n_cmpl"}
)
"""Fields that mean nothing to us, and of chat completions what this API does not have."""


_NOT_DONE = {
    **ONE_REPLY,
    "container": ("this server runs no code",),
    "mcp_servers": ("connect to them in the client",),
}


def chat_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion that ``values`` describe. Raises RequestError."""
    refuse(values, _NOT_DONE)
    body = _MessagesBody.of(values)
    chat = others(values, _MessagesBody, _IGNORED)
    chat["messages"] = [*_system(body.system), *_messages(body.messages)]
    if body.messages and not chat["messages"]:  # llama-server also answers if all blocks are empty
        chat["messages"] = [{"role": "user", "content": ""}]
    chat["max_tokens"] = body.max_tokens
    if body.stop_sequences is not None:
        chat["stop"] = body.stop_sequences
    if body.tools is not None:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    if body.tool_choice.type is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    if body.tool_choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False
    if body.chat_template_kwargs is not None:
        chat["chat_template_kwargs"] = body.chat_template_kwargs
    if body.thinking.type == "enabled":
        chat["thinking_budget_tokens"] = body.thinking.budget_tokens
    elif body.thinking.type == "disabled":
        chat["chat_template_kwargs"] = {"enable_thinking": False, **(body.chat_template_kwargs or {})}
    if body.effort:
        chat["reasoning_effort"] = "high" if body.effort == "max" else body.effort
    if body.format is not None:
        chat["response_format"] = body.format
    return chat


def _system(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "system", "content": value}]
    blocks = [_block(block, f"system[{i}]") for i, block in enumerate(items(value, "system"))]
    texts = [block.text for block in blocks if block.type == "text"]
    return [{"role": "system", "content": "".join(texts)}]


def _messages(value: Any) -> list[Any]:
    if value is None:
        raise RequestError("'messages' is required")
    messages: list[Any] = []
    for index, message in enumerate(items(value, "messages")):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise RequestError(f"{where} must be an object")
        content = message.get("content")
        if isinstance(content, list):
            messages += _split(str(message.get("role")), _blocks(content, f"{where}.content"))
        elif content is not None or message.get("role") != "assistant":
            messages.append(message)
    return messages


def _split(role: str, blocks: list[tuple[str, _Block]]) -> list[dict[str, Any]]:
    """One message for each run of blocks between tool results, and one for each of these."""
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []

    def flush() -> None:
        if not (parts or calls or thoughts):
            return
        is_kept = bool(parts) and (role != "assistant" or _has_image(parts))
        message: dict[str, Any] = {"role": role, "content": parts.copy() if is_kept else _joined(parts)}
        if calls:
            message["tool_calls"] = calls.copy()
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        messages.append(message)
        for told in (parts, calls, thoughts):
            told.clear()

    for where, block in blocks:
        kind = block.type
        if kind in _READABLE:
            parts.append(_part(block, where))
        elif kind == "thinking" and block.thinking:
            thoughts.append(block.thinking)
        elif kind == "tool_use":
            function = {"name": block.name, "arguments": encode(block.input or {}).decode()}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif kind == "tool_result":
            flush()
            content = _result(block.content, f"{where}.content")
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    flush()
    return messages


_READABLE = ("text", "document", "image")


def _result(content: Any, where: str) -> Any:
    """A text, or parts if there are images among them."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = [_part(block, where) for where, block in _blocks(content, where) if block.type in _READABLE]
    return parts if _has_image(parts) else _joined(parts)


def _has_image(parts: list[dict[str, Any]]) -> bool:
    return any(isinstance(part, ImagePart) for part in parts)


def _joined(parts: list[dict[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)


def _part(block: _Block, where: str) -> dict[str, Any]:
    """A readable block as OpenAI writes it."""
    if block.type == "text":
        return {"type": "text", "text": block.text}
    source = _Source.of({} if block.source is None else json_object(block.source, "source"))
    if block.type == "image":
        if source.type not in ("base64", "url"):
            raise RequestError(f"{where}: the source of an image must be of type base64 or url")
        return ImagePart(source.url if source.type == "url" else source.data, where)
    if source.type != "text":
        raise RequestError("a document must be plain text: its source must have type text")
    return {"type": "text", "text": source.data}


def _blocks(content: list[Any], where: str) -> list[tuple[str, _Block]]:
    places = (f"{where}[{index}]" for index in range(len(content)))
    return [(place, _block(block, place)) for place, block in zip(places, content, strict=True)]


def _tool(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object")
    tool = _Tool.of(value)
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema or {}}
    return {"type": "function", "function": function}


def _tool_choice(choice: _ToolChoice) -> Any:
    kind = choice.type
    if kind == "tool" and choice.name:
        return {"type": "function", "function": {"name": choice.name}}
    known = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in known:
        raise RequestError("'tool_choice.type' must be auto, any, tool or none")
    return known[kind]


def _block(value: Any, where: str) -> _Block:
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object")
    return _Block.of(value)

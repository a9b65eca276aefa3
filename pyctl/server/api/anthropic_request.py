"""A request of Anthropic's Messages API as the body of a chat completion.

What Anthropic's API does not know (seed, min_p, cache_prompt, prefix_cache, ...) is passed on. The conversion is
llama-server's, so that both render the same prompt, but for these:

* Text that follows a tool result in one message stays behind it; llama-server moves it before the result.
* The text blocks of an assistant turn are one text again, as the model wrote it, whatever the template makes of parts.
* ``tool_choice`` none and a named tool, ``disable_parallel_tool_use`` and ``thinking`` disabled are obeyed;
  llama-server overhears the wish or widens it.
* ``output_config.format`` binds the reply to a schema; llama-server ignores it.
* A document is read if it is plain text, and refused otherwise; llama-server drops it in silence.
"""

from __future__ import annotations

import re
from typing import Any

from pyctl.errors import RequestError
from pyctl.server.body import Fields
from pyctl.server.http import encode

__all__ = ["chat_fields"]

_N_PREDICT = 4096
_THINKING_BUDGET = 10000

_OWN = frozenset(
    {
        "model",
        "system",
        "messages",
        "tools",
        "tool_choice",
        "stop_sequences",
        "max_tokens",
        "thinking",
        "metadata",
        "output_config",
        "output_format",
        "cache_control",
        "container",
        "context_management",
        "mcp_servers",
        "service_tier",
        "inference_geo",
    }
)
"""Fields that are read here or mean nothing to us."""

_STAMP = re.compile(r"(x-anthropic-billing-header:(?:(?!cch=).)*cch=).{5};", re.DOTALL)


def chat_fields(fields: Fields) -> Fields:
    """The chat completion that ``fields`` ask for. Raises RequestError."""
    chat = {name: value for name, value in fields.as_dict().items() if name not in _OWN}
    chat["messages"] = [*_system(fields.get("system")), *_messages(fields.get("messages"))]
    chat["max_tokens"] = fields.get("max_tokens") if "max_tokens" in fields else _N_PREDICT
    if "stop_sequences" in fields:
        chat["stop"] = fields.get("stop_sequences")
    if "tools" in fields:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(_list(fields.get("tools"), "tools"))]
    choice = fields.object("tool_choice")
    if "type" in choice:
        chat["tool_choice"] = _tool_choice(choice)
    if choice.boolean("disable_parallel_tool_use", False):
        chat["parallel_tool_calls"] = False
    thinking = fields.object("thinking")
    if thinking.get("type") == "enabled":
        chat["thinking_budget_tokens"] = thinking.integer("budget_tokens", default=_THINKING_BUDGET)
    elif thinking.get("type") == "disabled":
        kwargs = fields.object("chat_template_kwargs").as_dict()
        chat["chat_template_kwargs"] = {"enable_thinking": False, **kwargs}
    output = fields.object("output_config").object("format") if "output_config" in fields else Fields({})
    if output.get("type") == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": output.get("schema")}}
    return Fields(chat)


def _system(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "system", "content": _stable(value)}]
    blocks = [_block(block, f"system[{i}]") for i, block in enumerate(_list(value, "system"))]
    texts = [_stable(block.string("text", "")) for block in blocks if block.get("type") == "text"]
    return [{"role": "system", "content": "".join(texts)}]


def _stable(text: str) -> str:
    """``text`` without the stamp in Claude Code's billing header, which is another one in every request."""
    return _STAMP.sub(r"\1fffff;", text, count=1) if text.startswith("x-anthropic-billing-header:") else text


def _messages(value: Any) -> list[Any]:
    if value is None:
        raise RequestError("'messages' is required")
    messages: list[Any] = []
    for index, message in enumerate(_list(value, "messages")):
        at = f"messages[{index}]"
        if not isinstance(message, dict):
            raise RequestError(f"{at} must be an object")
        content = message.get("content")
        if isinstance(content, list):
            messages += _split(
                str(message.get("role")), [_block(b, f"{at}.content[{i}]") for i, b in enumerate(content)]
            )
        elif content is not None or message.get("role") != "assistant":
            messages.append(message)
    return messages


def _split(role: str, blocks: list[Fields]) -> list[dict[str, Any]]:
    """One message for each run of blocks between tool results, and one for each of these."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []

    def flush() -> None:
        if not (texts or calls or thoughts):
            return
        parts: Any = [{"type": "text", "text": text} for text in texts]
        message: dict[str, Any] = {"role": role, "content": parts if parts and role != "assistant" else "".join(texts)}
        if calls:
            message["tool_calls"] = calls.copy()
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        messages.append(message)
        for told in (texts, calls, thoughts):
            told.clear()

    for block in blocks:
        kind = block.get("type")
        if kind == "text" or kind == "document":
            texts.append(_text(block))
        elif kind == "image":
            raise _no_images()
        elif kind == "thinking" and block.string("thinking", ""):
            thoughts.append(block.string("thinking", ""))
        elif kind == "tool_use":
            function = {"name": block.string("name", ""), "arguments": encode(block.get("input") or {}).decode()}
            calls.append({"id": block.string("id", ""), "type": "function", "function": function})
        elif kind == "tool_result":
            flush()
            result = _result(block.get("content"))
            messages.append({"role": "tool", "tool_call_id": block.string("tool_use_id", ""), "content": result})
    flush()
    return messages


def _result(content: Any) -> str:
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    blocks = [_block(block, f"tool_result.content[{i}]") for i, block in enumerate(content)]
    if any(block.get("type") == "image" for block in blocks):
        raise _no_images()
    return "".join(_text(block) for block in blocks if block.get("type") in ("text", "document"))


def _text(block: Fields) -> str:
    if block.get("type") == "text":
        return block.string("text", "")
    source = block.object("source")
    if source.get("type") != "text":
        raise RequestError("a document must be plain text: its source must be of type text")
    return source.string("data", "")


def _tool(value: Any, at: str) -> dict[str, Any]:
    tool = _block(value, at)
    function = {"name": tool.string("name", ""), "description": tool.string("description", "")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}


def _tool_choice(choice: Fields) -> Any:
    kind = choice.get("type")
    if kind == "tool" and choice.string("name", ""):
        return {"type": "function", "function": {"name": choice.get("name")}}
    known = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in known:
        raise RequestError("'tool_choice.type' must be auto, any, tool or none")
    return known[kind]


def _list(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"'{at}' must be a list")
    return value


def _block(value: Any, at: str) -> Fields:
    if not isinstance(value, dict):
        raise RequestError(f"{at} must be an object")
    return Fields(value)


def _no_images() -> RequestError:
    return RequestError("this model reads text only: image blocks cannot be taken")

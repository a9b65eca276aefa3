"""Anthropic's Messages API: endpoints, a request as the body of a chat completion, and replies.

Names and members of replies are llama-server's. What differs, after Anthropic's own API and its clients:

* A block is closed before the next one is opened; llama-server closes all of them at the end.
* ``stop_reason`` says stop_sequence where one ended the reply; llama-server says end_turn.
* A tool_use block starts with an empty ``input``, and usage has ``cache_creation_input_tokens``, always 0: typed
  clients read both.
* The last usage repeats what was cached.
* A silent stream gets ping events, not comments, which the watchdogs of some clients do not see.
* Errors carry ``"type": "error"`` in addition to ``error``, in bodies and in events, and Anthropic's types; a prompt
  that does not fit is also refused in Anthropic's words, by which agents know that they have to shorten it.

What Anthropic's API does not know (seed, min_p, cache_prompt, prefix_cache, ...) is passed on. The conversion is
llama-server's, so that both render the same prompt, but for these:

* Text that follows a tool result in one message stays after it; llama-server moves it before the result.
* The text blocks of an assistant turn are one text again, as the model wrote it, whatever the template makes of parts.
* ``tool_choice`` none and a named tool, ``disable_parallel_tool_use`` and ``thinking`` disabled are obeyed;
  llama-server ignores the wish or widens it.
* ``output_config.format`` binds the reply to a schema; llama-server ignores it.
* A document is read if it is plain text, and refused otherwise; llama-server drops it in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from pyctl.chat.reply import ReplyDelta
from pyctl.engine.request import Done, Progress
from pyctl.errors import RequestError
from pyctl.server.api.token_counts import count
from pyctl.server.body import Body, ChatBody, ConversationBody, Nested, items, json_object, others, parse_object
from pyctl.server.http import JsonResponse, anthropic_error, encode, named_frames
from pyctl.server.images import ImagePart, with_images
from pyctl.server.prepare import prepare
from pyctl.server.reply import EventReply, Identity, PreparedReply, respond
from pyctl.server.service import Service

__all__ = ["chat_fields", "count_tokens", "messages"]

_N_PREDICT = 4096
_THINKING_BUDGET = 10000


class _ToolChoice(Body, frozen=True):
    type: Any = None
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Thinking(Body, frozen=True):
    type: Any = None
    budget_tokens: int = _THINKING_BUDGET


class _Format(Body, frozen=True):
    type: Any = None
    schema: Any = None


class _OutputConfig(Body, frozen=True):
    effort: str = ""
    format: Annotated[_Format, Nested(_Format)] = _Format()


class _MessagesBody(Body, frozen=True):
    """POST /v1/messages"""

    system: Any = None
    messages: Any = None
    tools: list[Any] | None = None
    tool_choice: Annotated[_ToolChoice, Nested(_ToolChoice)] = _ToolChoice()
    stop_sequences: Any = None
    max_tokens: Any = _N_PREDICT
    thinking: Annotated[_Thinking, Nested(_Thinking)] = _Thinking()
    output_config: Annotated[_OutputConfig, Nested(_OutputConfig)] = _OutputConfig()
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
    {
        "model",
        "metadata",
        "output_format",
        "cache_control",
        "container",
        "context_management",
        "mcp_servers",
        "service_tier",
        "inference_geo",
        "n",
        "n_cmpl",
    }
)
"""Fields that mean nothing to us, and of chat completions what this API does not have."""


def chat_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion that ``values`` ask for. Raises RequestError."""
    body = _MessagesBody.of(values)
    chat = others(values, _MessagesBody, _IGNORED)
    chat["messages"] = [*_system(body.system), *_messages(body.messages)]
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
    if effort := body.output_config.effort:
        chat["reasoning_effort"] = "high" if effort == "max" else effort
    output = body.output_config.format
    if output.type == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": output.schema}}
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
        at = f"messages[{index}]"
        if not isinstance(message, dict):
            raise RequestError(f"{at} must be an object")
        content = message.get("content")
        if isinstance(content, list):
            messages += _split(str(message.get("role")), _blocks(content, f"{at}.content"))
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

    for at, block in blocks:
        kind = block.type
        if kind in _READABLE:
            parts.append(_part(block, at))
        elif kind == "thinking" and block.thinking:
            thoughts.append(block.thinking)
        elif kind == "tool_use":
            function = {"name": block.name, "arguments": encode(block.input or {}).decode()}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif kind == "tool_result":
            flush()
            content = _result(block.content, f"{at}.content")
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    flush()
    return messages


_READABLE = ("text", "document", "image")


def _result(content: Any, at: str) -> Any:
    """A text, or parts if there are images among them."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = [_part(block, at) for at, block in _blocks(content, at) if block.type in _READABLE]
    return parts if _has_image(parts) else _joined(parts)


def _has_image(parts: list[dict[str, Any]]) -> bool:
    return any(isinstance(part, ImagePart) for part in parts)


def _joined(parts: list[dict[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)


def _part(block: _Block, at: str) -> dict[str, Any]:
    """A readable block as OpenAI writes it."""
    if block.type == "text":
        return {"type": "text", "text": block.text}
    source = _Source.of({} if block.source is None else json_object(block.source, "source"))
    if block.type == "image":
        if source.type not in ("base64", "url"):
            raise RequestError(f"{at}: the source of an image must be of type base64 or url")
        return ImagePart(source.url if source.type == "url" else source.data, at)
    if source.type != "text":
        raise RequestError("a document must be plain text: its source must have type text")
    return {"type": "text", "text": source.data}


def _blocks(content: list[Any], at: str) -> list[tuple[str, _Block]]:
    places = (f"{at}[{index}]" for index in range(len(content)))
    return [(place, _block(block, place)) for place, block in zip(places, content, strict=True)]


def _tool(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{at} must be an object")
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


def _block(value: Any, at: str) -> _Block:
    if not isinstance(value, dict):
        raise RequestError(f"{at} must be an object")
    return _Block.of(value)


_PING = named_frames([{"type": "ping"}])


class MessageReply(EventReply):
    """A message: blocks of thinking, text and tool use, in the order in which the model writes them."""

    error_form = staticmethod(anthropic_error)

    def __init__(self, service: Service, prepared: PreparedReply, identity: Identity) -> None:
        super().__init__(service, prepared)
        self._blocks: list[dict[str, Any]] = []
        self._parts: list[str] = []  # what the last block has been told
        self._identity = identity

    def ping(self) -> bytes:
        return _PING

    def error_event(self, error: Exception) -> bytes:
        return named_frames([anthropic_error(error)])

    def reported(self, events: list[dict[str, Any]], progress: Progress) -> list[dict[str, Any]]:
        return events  # the API has no place for it

    def begin(self) -> list[dict[str, Any]]:
        cached = self.progress.n_cached if self.progress is not None else 0
        usage = _usage(len(self.request.prompt), cached, 0)
        return [{"type": "message_start", "message": self._message([], None, None, usage)}]

    def more(self, delta: ReplyDelta) -> list[dict[str, Any]]:
        events = []
        if delta.reasoning:
            events += self._fill("thinking", "thinking", delta.reasoning)
        if delta.content:
            events += self._fill("text", "text", delta.content)
        for call in delta.calls:
            if call.name:
                events += self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                self._parts.append(call.arguments)
                events.append(self._delta("input_json", "partial_json", call.arguments))
        return events

    def close(self, done: Done) -> list[dict[str, Any]]:
        reason, word = self._stopped(done)
        delta = {"stop_reason": reason, "stop_sequence": word}
        return [
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": _usage_of(done)},
            {"type": "message_stop"},
        ]

    def body(self, done: Done) -> dict[str, Any]:
        self._close()
        return self._message(self._blocks, *self._stopped(done), _usage_of(done))

    def _message(
        self, blocks: list[dict[str, Any]], reason: str | None, word: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._identity.fields["id"],
            "type": "message",
            "role": "assistant",
            "content": blocks,
            "model": self._identity.fields["model"],
            "stop_reason": reason,
            "stop_sequence": word,
            "usage": usage,
        }

    def _stopped(self, done: Done) -> tuple[str, str | None]:
        """``stop_reason`` and ``stop_sequence``."""
        word = done.stopping_word if done.stop_type == "word" else None
        if done.stop_type == "limit":
            return "max_tokens", None
        if any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use", word
        return ("end_turn" if word is None else "stop_sequence"), word

    def _fill(self, kind: str, member: str, text: str) -> list[dict[str, Any]]:
        events = []
        if not self._parts or self._blocks[-1]["type"] != kind:
            events = self._open({"type": kind, member: ""})
        self._parts.append(text)
        return [*events, self._delta(kind, member, text)]

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close()
        self._blocks.append(block)
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _delta(self, kind: str, member: str, text: str) -> dict[str, Any]:
        delta = {"type": f"{kind}_delta", member: text}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        """Complete the last block, if it is still open."""
        if not self._blocks:
            return []
        block, text = self._blocks[-1], "".join(self._parts)
        self._parts.clear()
        events = []
        if block["type"] == "thinking":
            block |= {"thinking": text, "signature": ""}
            events.append(self._delta("signature", "signature", ""))
        elif block["type"] == "text":
            block["text"] = text
        else:
            block["input"] = _object(text)
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; an empty object if they are none."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage_of(done: Done) -> dict[str, int]:
    return _usage(done.stats.n_prompt, done.timings.n_cached, done.timings.n_predicted)


def _usage(n_prompt: int, n_cached: int, n_predicted: int) -> dict[str, int]:
    return {
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "input_tokens": n_prompt - n_cached,
        "output_tokens": n_predicted,
    }


async def messages(service: Service, request: Request) -> ASGIApp:
    """POST /v1/messages"""
    body = await request.body()
    (prepared,) = await with_images(
        service, request, lambda fetched: prepare(service, ChatBody.of(chat_fields(parse_object(body))), fetched)
    )
    return respond(service, [MessageReply(service, prepared, Identity(service))])


async def count_tokens(service: Service, request: Request) -> ASGIApp:
    """POST /v1/messages/count_tokens"""
    body = await request.body()
    n_tokens = await with_images(
        service, request, lambda fetched: count(service, ConversationBody.of(chat_fields(parse_object(body))), fetched)
    )
    return JsonResponse({"input_tokens": n_tokens})

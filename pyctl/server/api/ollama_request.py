"""Requests of Ollama's API, as chats and completions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from msgspec import field

from pyctl.engine.sampling import Sampling
from pyctl.errors import NotSupportedError, RequestError
from pyctl.requests.body import AnyBody, ChatBody, CompletionBody, InfillBody
from pyctl.requests.body_reader import Body, Integer, others
from pyctl.requests.body_reader import reject_unsupported as refuse_fields
from pyctl.requests.image_sources import ImagePart
from pyctl.server.http import encode

__all__ = ["chat_body", "generate_body"]

log = logging.getLogger(__name__)


class OllamaBody(Body, frozen=True):
    """The fields that /api/chat and /api/generate have in common."""

    stream: bool = True
    format: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    think: Any = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class OllamaChatBody(OllamaBody, frozen=True):
    """The body of POST /api/chat."""

    messages: list[Any] = field(default_factory=list)
    tools: list[Any] | None = None


class OllamaGenerateBody(OllamaBody, frozen=True):
    """The body of POST /api/generate."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    images: list[Any] = field(default_factory=list)
    raw: bool = False
    template: str = ""
    context: Any = None


class _Message(Body, frozen=True):
    role: Any = None
    content: Any = ""
    thinking: str | None = None
    images: list[Any] = field(default_factory=list)
    tool_calls: list[Any] = field(default_factory=list)
    tool_name: str | None = None
    tool_call_id: str | None = None


_IGNORED = frozenset(
    {"model", "keep_alive", "truncate", "shift", "tools", "n", "n_cmpl"}
    | {"n_probs", "post_sampling_probs", "logprobs", "top_logprobs"}
)
"""Fields that mean nothing to us, and fields of other APIs that this one lacks or expresses in
another way.
"""

_SAMPLING = (
    frozenset(item.name for item in fields(Sampling) if not item.name.startswith("grammar"))
    - _IGNORED
)

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}
"""Levels of ``think``. No template has a fourth one under this name."""


def chat_body(values: Mapping[str, Any]) -> ChatBody | None:
    """Return the chat completion that /api/chat describes, None if it only loads the model. Raises
    RequestError.
    """
    body = OllamaChatBody.from_json(values)
    chat = _generation(values, body)
    chat["messages"] = _messages(body.messages)
    if body.tools is not None:
        chat["tools"] = [
            {"type": "function", **tool} if isinstance(tool, dict) else tool for tool in body.tools
        ]
    return ChatBody.from_json(chat) if body.messages else None


def generate_body(values: Mapping[str, Any]) -> AnyBody | None:
    """Return the completion for /api/generate, None if it only loads the model. Raises RequestError
    or NotSupportedError.
    """
    body = OllamaGenerateBody.from_json(values)
    if body.raw and (body.template or body.system or body.context):
        raise RequestError("raw mode does not support template, system, or context")
    if body.template:
        raise NotSupportedError(
            "'template' is not supported: 'raw' takes a prompt that is rendered already"
        )
    if body.context:
        raise NotSupportedError(
            "'context' is not supported: /api/chat takes the whole conversation"
        )
    if body.images and (body.raw or body.suffix):
        raise RequestError("'images' cannot be combined with 'raw' or 'suffix'")
    if not (body.prompt or body.suffix or body.images):
        return None
    options = _generation(values, body)
    if body.suffix:
        return InfillBody.from_json(
            {**options, "input_prefix": body.prompt, "input_suffix": body.suffix}
        )
    if body.raw:
        return CompletionBody.from_json({**options, "prompt": body.prompt})
    system = [{"role": "system", "content": body.system}] if body.system else []
    content = _content(body.prompt, body.images, "images")
    return ChatBody.from_json(
        {**options, "messages": [*system, {"role": "user", "content": content}]}
    )


def _generation(values: Mapping[str, Any], body: OllamaBody) -> dict[str, Any]:
    """Return the fields of a completion that control the answer."""
    refuse_fields(values, {"logprobs": ("/v1/chat/completions has them",)})
    options = {
        **others(values, type(body), _IGNORED),
        **_options(body.options),
        "stream": body.stream,
    }
    if body.format == "json":
        options["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        options["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    elif body.format not in (None, ""):
        raise RequestError("'format' must be \"json\" or a JSON schema")
    think = body.think
    switch: dict[str, Any] = {}
    if isinstance(think, bool):
        switch["enable_thinking"] = think
    elif isinstance(think, str) and think in _EFFORTS:
        options["reasoning_effort"] = _EFFORTS[think]
    elif think is not None:
        raise RequestError(f"'think' must be true, false or one of {', '.join(_EFFORTS)}")
    options["chat_template_kwargs"] = {**switch, **body.chat_template_kwargs}
    return options


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a completion for Ollama's ``options``; options of the
    loader are left out.
    """
    fields = {name: value for name, value in options.items() if name in _SAMPLING or name == "stop"}
    n_predict = options.get("num_predict")
    if n_predict is not None:
        n = Integer(is_limit=True)(n_predict, "options.num_predict")
        fields["max_tokens"] = n if n > 0 else -1
    ignored = sorted(options.keys() - fields.keys() - {"num_predict"})
    if ignored:
        log.debug("options without effect, since the model is loaded: %.200s", ", ".join(ignored))
    return fields


def _messages(values: list[Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat completion. Calls without ids get some, and so do their
    results: templates may need them.
    """
    messages: list[dict[str, Any]] = []
    open_calls: list[tuple[Any, str]] = []  # name and id of calls without a result
    n_calls = 0
    for index, value in enumerate(values):
        where = f"messages[{index}]"
        if not isinstance(value, dict):
            raise RequestError(f"{where} must be an object")
        message = _Message.from_json(value)
        role = message.role.lower() if isinstance(message.role, str) else message.role
        converted = {
            "role": role,
            "content": _content(message.content, message.images, f"{where}.images"),
        }
        if message.thinking:
            converted["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [
                _call(call, n_calls + n, f"{where}.tool_calls[{n}]")
                for n, call in enumerate(message.tool_calls)
            ]
            converted["tool_calls"] = calls
            n_calls += len(calls)
            open_calls = [(call["function"]["name"], str(call["id"])) for call in calls]
        if role == "tool":
            if message.tool_name is not None:
                converted["name"] = message.tool_name
            own_id = message.tool_call_id
            converted["tool_call_id"] = own_id or _close_call(open_calls, message.tool_name)
        messages.append(converted)
    return messages


def _content(text: Any, images: list[Any], where: str) -> Any:
    """Return a text, or parts with the images before it, as Ollama has them."""
    if not images:
        return text
    if not isinstance(text, str):
        raise RequestError(f"the content next to {where} must be a string")
    parts: list[dict[str, Any]] = [
        ImagePart(image, f"{where}[{number}]") for number, image in enumerate(images)
    ]
    return [*parts, {"type": "text", "text": text}]


def _call(call: Any, number: int, where: str) -> dict[str, Any]:
    """Return a call as OpenAI writes it, with its arguments as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError(f"{where} must be an object with a function")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    text = arguments if isinstance(arguments, str) else encode(arguments).decode()
    call_id = call.get("id") or f"call{number:05}"
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": text},
    }


def _close_call(open_calls: list[tuple[Any, str]], name: str | None) -> str | None:
    """Return the id of the first open call of the tool ``name``, else of the first open one, and
    close it; None without any.
    """
    index = next((i for i, (called, _) in enumerate(open_calls) if called == name), 0)
    return open_calls.pop(index)[1] if open_calls else None

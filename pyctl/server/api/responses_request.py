"""A request of OpenAI's Responses API as the body of a chat completion.

Fields that the API does not have (seed, min_p, cache_prompt, ...) are passed on. The conversion is
llama-server's, so that both render the same prompt, but for these:

* ``conversation``, ``prompt`` and ``background`` are refused, as ``previous_response_id`` is;
  llama-server ignores them.
* ``text.format`` binds the reply to a schema, and ``tool_choice`` is kept to; llama-server ignores
  both.
* A custom tool is a function with one string; tools in a namespace are called ``NAMESPACE__NAME``.
  llama-server leaves both out. Tools in items of type additional_tools are tools; llama-server
  refuses these items.
* An assistant message needs no ``type``, and null counts as absent, as OpenAI has it.
* The texts of an assistant turn are one text again, as the model wrote it, whatever the template
  makes of parts.
* A reasoning item is read from its text, or else from our own ``encrypted_content``,
  or else from its summary, and left out without any of them; llama-server refuses all but the
  first. Clients that store nothing at the server send back only the second.
"""

from __future__ import annotations

import base64
import binascii
import logging
import zlib
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, ClassVar

import msgspec
from msgspec import field

from pyctl.chat.messages import unreadable
from pyctl.errors import RequestError
from pyctl.requests.body import ONE_REPLY
from pyctl.requests.body_reader import Body, Unsupported, others
from pyctl.requests.image_sources import ImagePart
from pyctl.server.api.custom_tool import to_function, wrap_input
from pyctl.server.api.openai_cache import CACHE_FIELDS, PromptCaching
from pyctl.settings.limit import limit

__all__ = ["ResponseRequest", "ResponsesBody", "seal", "spaced_name"]

log = logging.getLogger("pyctl.server")


class _Text(Body, frozen=True):
    format: dict[str, Any] = field(default_factory=dict)


class ResponsesBody(Body, frozen=True):
    """The body of POST /v1/responses."""

    unsupported: ClassVar[Unsupported] = {
        **ONE_REPLY,
        "background": ("no response is kept; request it as a stream",),
        "prompt": ("no prompt is stored; send its text in 'instructions'",),
    }

    input: Any = None
    instructions: str | None = None
    tools: Any = None
    tool_choice: Any = None
    max_output_tokens: Any = None
    reasoning: dict[str, Any] = field(default_factory=dict)
    text: _Text = _Text()
    include: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None


class _Item(Body, frozen=True):
    """An item of the input; its type determines its fields."""

    type: Any = None
    role: Any = None
    content: Any = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    input: str | None = None
    output: Any = None
    summary: Any = None
    encrypted_content: Any = None


_EARLIER = ("previous_response_id", "conversation")
"""Fields that name items of earlier requests."""

_IGNORED = frozenset(
    {"model", "truncation", "service_tier", "store", "n", "n_cmpl", *_EARLIER, *CACHE_FIELDS}
)
"""Fields that mean nothing to us, and fields of chat completions that this API lacks.

``truncation`` may drop messages that do not fit into the context; here such a request is refused.
"""

_MAX_ITEMS = limit(20_000, "`input`, items of a response", "400", "request")

_MAX_UNPACKED = limit(
    32 * 2**20, "sealed reasoning of a request, together", "400", "request", "characters"
)

_LOGPROBS = "message.output_text.logprobs"
"""The name in ``include`` that requests log-probabilities."""

_SEAL = "pyctl-reasoning-"

_SEND_ALL = (
    "no response is stored; send all earlier items in 'input', whose prefix the cache restores"
)


class ResponseRequest(msgspec.Struct, frozen=True):
    """A request as ``chat``, the fields of the chat completion to make; ``tools`` has the namespace
    of each tool, None for none, and the tool as sent, by its name in the chat. ``caching`` are its
    cache options.
    """

    body: ResponsesBody
    chat: dict[str, Any]
    tools: dict[str, tuple[str | None, dict[str, Any]]]
    caching: PromptCaching

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ResponseRequest:
        """Return the request that ``values`` describe. Raises RequestError, and NotSupportedError
        for a feature that is missing.
        """
        for name in _EARLIER:
            if values.get(name):
                raise RequestError(f"pyctl does not support '{name}': {_SEND_ALL}")
        body = ResponsesBody.from_json(values)
        messages = _messages(body.input)
        if body.instructions is not None:
            messages = [{"role": "system", "content": body.instructions}, *messages]
        if not messages:
            raise RequestError("'input' is empty")
        tools = _tools(body)
        chat = {
            **others(values, ResponsesBody, _IGNORED),
            **_options(body, tools),
            "messages": _joined(messages),
        }
        caching = PromptCaching.from_json(values, body.input)
        return cls(body, caching.with_chat_fields(chat), tools, caching)


def spaced_name(space: str | None, name: str) -> str:
    """Return the name in a chat, which has no namespaces, of a tool of ``space``; "functions" is
    one for tools without.
    """
    return f"{space}__{name}" if space and space != "functions" else name


def seal(reasoning: str) -> str:
    """Return ``reasoning`` as ``encrypted_content``: not secret, only opaque to clients, which send
    it back.
    """
    return _SEAL + base64.b64encode(zlib.compress(reasoning.encode())).decode()


def _unseal(text: str) -> str:
    """Return the text that `seal` was given; empty if ``text`` is from another server."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(
            base64.b64decode(text.removeprefix(_SEAL), validate=True), _MAX_UNPACKED + 1
        )
        return data.decode(errors="ignore")  # one that is too long may end within a character
    except (binascii.Error, zlib.error, ValueError):
        return ""


def _options(
    body: ResponsesBody, tools: dict[str, tuple[str | None, dict[str, Any]]]
) -> dict[str, Any]:
    """Return the fields of a chat completion for the options of ``body``: tools, limits and format.

    Raises RequestError if a call is required and none of the tools can be called.
    """
    parallel = body.parallel_tool_calls
    chat: dict[str, Any] = {} if parallel is None else {"parallel_tool_calls": parallel}
    if body.top_logprobs or _LOGPROBS in body.include:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.max_output_tokens is not None:
        chat["max_tokens"] = body.max_output_tokens
    if body.reasoning.get("effort") is not None:
        chat["reasoning_effort"] = body.reasoning["effort"]
    if tools:
        chat["tools"] = [_tool(name, tool) for name, (_, tool) in tools.items()]
    if body.tool_choice is not None:
        chat["tool_choice"] = choice = _tool_choice(body.tool_choice)
        is_forced = (
            choice.get("mode") == "required" or "name" in choice
            if isinstance(choice, dict)
            else choice == "required"
        )
        if is_forced and not tools and (body.tools or _tools_within(body.input)):
            raise RequestError(
                "'tool_choice' requires a call, and none of the tools is a function or a custom "
                "tool"
            )
    style = {name: value for name, value in body.text.format.items() if value is not None}
    if style.get("type") == "json_schema":
        schema = {name: style[name] for name in ("name", "schema", "strict") if name in style}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif "type" in style:
        chat["response_format"] = {"type": style["type"]}
    return chat


def _tools(body: ResponsesBody) -> dict[str, tuple[str | None, dict[str, Any]]]:
    """Return the tools that can be called, those in the input included, each with its namespace;
    the last of a name counts.
    """
    callables = list(_callable(body.tools, "tools"))
    for index, more in _tools_within(body.input).items():
        callables += _callable(more, f"input[{index}].tools")
    return {spaced_name(space, tool["name"]): (space, tool) for space, tool in callables}


def _tools_within(items: Any) -> dict[int, Any]:
    """Return the tools that items of type additional_tools bring, by their place."""
    numbered = enumerate(items) if isinstance(items, list) else ()
    return {
        n: item.get("tools")
        for n, item in numbered
        if isinstance(item, dict) and item.get("type") == "additional_tools"
    }


def _callable(
    value: Any, where: str, space: str | None = None
) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield the functions and custom tools among ``value`` and in its namespaces."""
    if value is None:
        return
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RequestError(f"'{where}' must be a list of objects")
    for index, tool in enumerate(value):
        kind = tool.get("type")
        name = tool.get("name")
        if kind in ("function", "custom"):
            if not isinstance(name, str):
                raise RequestError(f"{where}[{index}].name must be a string")
            yield space, tool
        elif kind == "namespace" and space is None and isinstance(name, str) and name:
            yield from _callable(tool.get("tools"), f"{where}[{index}].tools", name)
        else:
            log.warning(
                "tool of type %.40r ignored: only functions and custom tools are supported", kind
            )


def _tool(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] == "custom":
        return to_function(name, tool, f"the tool {name[:80]!r}")
    function = {
        "name": name,
        "description": tool.get("description") or "",
        "parameters": tool.get("parameters") or {},
    }
    return {"type": "function", "function": function}


def _tool_choice(value: Any) -> Any:
    """Return the tool choice in the form of chat completions; of the allowed tools, only those that
    can be called.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("auto", "none", "required"):
        return kind
    if kind in ("function", "custom"):
        return _reference(value)
    if kind == "allowed_tools" and isinstance(value.get("tools"), list):
        return {
            **value,
            "tools": [_reference(tool) for tool in value["tools"] if _is_callable(tool)],
        }
    return value


def _is_callable(tool: Any) -> bool:
    return not isinstance(tool, dict) or tool.get("type") in ("function", "custom")


def _reference(tool: Any) -> Any:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        return tool
    return {"type": "function", "name": spaced_name(tool.get("namespace"), tool["name"])}


def _messages(value: Any) -> list[Any]:
    """Return the messages of a chat completion for the items of the input, in order. Raises
    RequestError.
    """
    if value is None:
        raise RequestError("'input' is required")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RequestError("'input' must be a string or a list of items")
    if len(value) > _MAX_ITEMS:
        raise RequestError(f"'input' has {len(value)} items; at most {_MAX_ITEMS} are allowed")
    messages = []
    n_chars = 0
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise RequestError(f"input[{index}] must be an object")
        if item.get("type") != "additional_tools":
            messages.append(_message(item, f"input[{index}]"))
            n_chars += len(messages[-1].get("reasoning_content", ""))
            if n_chars > _MAX_UNPACKED:
                raise RequestError(
                    f"the reasoning in 'input' has more than {_MAX_UNPACKED} characters"
                )
    return messages


def _message(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    item = _Item.from_json(values)
    kind = item.type
    role = item.role
    if role is not None and kind in (None, "message"):
        return {"role": role, "content": _said(item, f"{where}.content")}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": _reasoning(item, where)}
    if kind in ("function_call_output", "custom_tool_call_output"):
        return _result(item.call_id, _content(item.output, f"{where}.output"), where)
    if kind not in ("function_call", "custom_tool_call"):
        raise RequestError(f"{where}: items of type {str(kind)[:40]!r} are not supported")
    name = spaced_name(item.namespace, _required(item.name, f"{where}.name"))
    if kind == "function_call":
        return _call(item.call_id, name, _required(item.arguments, f"{where}.arguments"), where)
    return _call(item.call_id, name, wrap_input(_required(item.input, f"{where}.input")), where)


def _said(item: _Item, where: str) -> Any:
    if item.role != "assistant":
        return _content(item.content, where)
    content = "" if item.content is None else _content(item.content, where)
    if isinstance(content, str):
        return content
    if any(isinstance(part, ImagePart) for part in content):
        raise RequestError(f"{where}: an assistant message cannot have images")
    return "".join(part["text"] for part in content)


def _call(call_id: str | None, name: str, arguments: str, where: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    call = {"id": _required(call_id, f"{where}.call_id"), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _result(call_id: str | None, content: Any, where: str) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": _required(call_id, f"{where}.call_id"),
        "content": content,
    }


def _required(value: str | None, where: str) -> str:
    if value is None:
        raise RequestError(f"{where} is required")
    return value


def _content(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a string or a list of parts")
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(value)]


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text", "refusal"):
        member = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(member), str):
            raise RequestError(f"{where}.{member} must be a string")
        return {"type": "text", "text": part[member]}
    if kind == "input_image":
        url = part.get("image_url")
        return ImagePart(url.get("url") if isinstance(url, dict) else url, where)
    if kind == "input_file":
        raise unreadable(where, kind)
    raise RequestError(f"{where}.type must be input_text, input_image or output_text")


def _reasoning(item: _Item, where: str) -> str:
    text = _texts(item.content, f"{where}.content")
    sealed = item.encrypted_content
    if not text and isinstance(sealed, str) and sealed.startswith(_SEAL):
        text = _unseal(sealed)
    return text or _texts(item.summary, f"{where}.summary")


def _texts(parts: Any, where: str) -> str:
    if parts is None:
        return ""
    if not isinstance(parts, list) or not all(
        isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts
    ):
        raise RequestError(f"{where} must be a list of parts with a text")
    return "".join(part["text"] for part in parts)


def _joined(messages: list[Any]) -> list[Any]:
    """Return ``messages`` with consecutive ones of the assistant joined: a turn comes as several
    items.
    """
    joined: list[Any] = []
    for is_assistant, turn in groupby(messages, key=lambda message: message["role"] == "assistant"):
        parts = list(turn)
        if not is_assistant or len(parts) == 1:
            joined += parts
            continue
        one = dict(parts[0])
        for name in ("reasoning_content", "content"):
            if texts := [part[name] for part in parts if name in part]:
                one[name] = "".join(texts)
        if calls := [call for part in parts for call in part.get("tool_calls", ())]:
            one["tool_calls"] = calls
        joined.append(one)
    spoken = ("tool_calls", "reasoning_content")
    return [
        message
        for message in joined
        if "content" in message or any(message.get(name) for name in spoken)
    ]

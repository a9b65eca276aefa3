"""A request of OpenAI's Responses API as the body of a chat completion.

Fields that the API does not have (seed, min_p, cache_prompt, ...) are passed on. The conversion is llama-server's, so
that both render the same prompt, but for these:

* ``previous_response_id`` and ``conversation`` work; llama-server refuses the one and ignores the other.
* ``text.format`` binds the reply to a schema, and a function that ``tool_choice`` names is passed on; llama-server
  ignores both.
* The functions of a tool of type namespace can be called, as ``NAMESPACE__NAME``; llama-server leaves them out.
* An assistant message needs no ``type``, and null counts as absent, as OpenAI has it.
* The texts of an assistant turn are one text again, as the model wrote it, whatever the template makes of parts.
* A reasoning item is read from its text, or else from what our own ``encrypted_content`` carries, or else from its
  summary, and left out without any of them; llama-server refuses all but the first. Clients that store nothing at the
  server send back only the second.
"""

from __future__ import annotations

import base64
import binascii
import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

from msgspec import field

from pyctl.chat.rendering import unreadable
from pyctl.errors import RequestError
from pyctl.limit import limit
from pyctl.server.body import Body, ByteAccount, Nested, others
from pyctl.server.images import ImagePart
from pyctl.server.stores import ConversationStore, ResponseStore

__all__ = ["ResponseRequest", "ResponsesBody", "messages_of", "seal", "spaced_name"]

log = logging.getLogger("pyctl.server")


class _Text(Body, frozen=True):
    format: dict[str, Any] = field(default_factory=dict)


class ResponsesBody(Body, frozen=True):
    """POST /v1/responses"""

    input: Any = None
    instructions: str | None = None
    tools: Any = None
    tool_choice: Any = None
    max_output_tokens: Any = None
    reasoning: dict[str, Any] = field(default_factory=dict)
    text: Annotated[_Text, Nested(_Text)] = _Text()
    previous_response_id: str | None = None
    conversation: Any = None
    store: bool = True
    include: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    parallel_tool_calls: bool | None = None


class _Item(Body, frozen=True):
    """One item of the input; what it may have depends on its type."""

    type: Any = None
    role: Any = None
    content: Any = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: Any = None
    summary: Any = None
    encrypted_content: Any = None


_IGNORED = frozenset({"model", "background", "prompt", "truncation", "service_tier", "n", "n_cmpl"})
"""Fields that mean nothing to us, and of chat completions what this API does not have."""

_MAX_ITEMS = limit(20_000, "`input`, items of a response", "400", "request")

_SEAL = "pyctl-reasoning-"


@dataclass(frozen=True)
class ResponseRequest:
    """``chat`` are the fields of the chat completion to make; ``added`` are its messages since the response
    ``previous``, or since ``before``, what was said in the ``conversation``; ``spaced`` has the namespace and the name
    there of each function that is in one, by its name in the chat.
    """

    body: ResponsesBody
    chat: dict[str, Any]
    added: list[Any]
    previous: str | None
    conversation: str | None
    before: list[Any]
    spaced: dict[Any, tuple[str, Any]]

    @classmethod
    def of(
        cls, values: Mapping[str, Any], store: ResponseStore, conversations: ConversationStore | None = None
    ) -> ResponseRequest:
        """Read from ``values``; without ``conversations`` none is known.

        Raises RequestError, and NotFoundError for a previous response or a conversation that is unknown.
        """
        body = ResponsesBody.of(values)
        previous, conversation = body.previous_response_id or None, _conversation(body.conversation)
        account = ByteAccount()
        added = messages_of(body.input, "input", account)
        before: list[Any] = []
        messages = added
        if conversation is not None:
            if previous is not None:
                raise RequestError("'previous_response_id' and 'conversation' cannot be used together")
            before = (conversations or ConversationStore()).messages(conversation, account)
            messages = [*before, *added]
        elif previous is not None:
            messages = [*store.conversation(previous, account), *added]
        if body.instructions is not None:
            messages = [{"role": "system", "content": body.instructions}, *messages]
        functions = _functions(body.tools)
        chat = {**others(values, ResponsesBody, _IGNORED), **_options(body, functions), "messages": _joined(messages)}
        spaced = {spaced_name(space, tool.get("name")): (space, tool.get("name")) for space, tool in functions if space}
        return cls(body, chat, added, previous, conversation, before, spaced)


def _conversation(value: Any) -> str | None:
    """OpenAI writes it as an id, or as an object with one."""
    name = value.get("id") if isinstance(value, dict) else value
    if value is not None and (not isinstance(name, str) or not name):
        raise RequestError("'conversation' must be the id of a conversation, or an object with one")
    return name


def spaced_name(space: str | None, name: Any) -> Any:
    """The name in a chat, which knows no namespaces, of a function of ``space``."""
    return f"{space}__{name}" if space else name


def seal(reasoning: str) -> str:
    """``reasoning`` as ``encrypted_content``: nothing secret, only opaque to clients, which send it back."""
    return _SEAL + base64.b64encode(zlib.compress(reasoning.encode())).decode()


def _unseal(text: str, account: ByteAccount) -> str:
    """The text that `seal` was given; empty if ``text`` is from somewhere else."""
    try:
        return account.inflate(base64.b64decode(text.removeprefix(_SEAL), validate=True)).decode()
    except (binascii.Error, zlib.error, ValueError):
        return ""


def _options(body: ResponsesBody, functions: list[tuple[str | None, dict[str, Any]]]) -> dict[str, Any]:
    parallel = body.parallel_tool_calls
    chat: dict[str, Any] = {} if parallel is None else {"parallel_tool_calls": parallel}
    if body.max_output_tokens is not None:
        chat["max_tokens"] = body.max_output_tokens
    if body.reasoning.get("effort") is not None:
        chat["reasoning_effort"] = body.reasoning["effort"]
    if functions:
        chat["tools"] = [_tool(spaced_name(space, tool.get("name")), tool) for space, tool in functions]
    if body.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    style = {name: value for name, value in body.text.format.items() if value is not None}
    if style.get("type") == "json_schema":
        schema = {name: style[name] for name in ("name", "schema", "strict") if name in style}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif "type" in style:
        chat["response_format"] = {"type": style["type"]}
    return chat


def _functions(value: Any, space: str | None = None) -> list[tuple[str | None, dict[str, Any]]]:
    """The functions among ``value`` and in its namespaces, each with the name of its own."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RequestError("'tools' must be a list of objects")
    found: list[tuple[str | None, dict[str, Any]]] = []
    for tool in value:
        kind, name = tool.get("type"), tool.get("name")
        if kind == "function":
            found.append((space, tool))
        elif kind == "namespace" and space is None and isinstance(name, str) and name:
            found += _functions(tool.get("tools"), name)
        else:
            log.warning("tool of type %.40r ignored: only functions are supported", kind)
    return found


def _tool(name: Any, tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": name,
        "description": tool.get("description") or "",
        "parameters": tool.get("parameters") or {},
    }
    return {"type": "function", "function": function}


def _tool_choice(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("type") == "function":
        space, name = value.get("namespace"), value.get("name")
        return {"type": "function", "function": {"name": spaced_name(space, name) if space else name}}
    if value.get("type") == "allowed_tools":
        return value.get("mode", "auto")
    return "auto"


def messages_of(value: Any, name: str, account: ByteAccount) -> list[Any]:
    """Messages of a chat completion for the items in the field ``name``, in order; ``account`` is charged for what they
    unpack. Raises RequestError."""
    if value is None:
        raise RequestError(f"'{name}' is required")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RequestError(f"'{name}' must be a string or a list of items")
    if len(value) > _MAX_ITEMS:
        raise RequestError(f"'{name}' has {len(value)} items; at most {_MAX_ITEMS} are allowed")
    messages = []
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise RequestError(f"{name}[{index}] must be an object")
        messages.append(_message(_Item.of(item), f"{name}[{index}]", account))
    return messages


def _message(item: _Item, at: str, account: ByteAccount) -> dict[str, Any]:
    kind, role = item.type, item.role
    if role is not None and kind in (None, "message"):
        content = _content(item.content, f"{at}.content")
        if role == "assistant" and not isinstance(content, str):
            if any(isinstance(part, ImagePart) for part in content):
                raise RequestError(f"{at}: an assistant message cannot have images")
            content = "".join(part["text"] for part in content)
        return {"role": role, "content": content}
    if kind == "function_call":
        function = {
            "name": spaced_name(item.namespace, _required(item.name, f"{at}.name")),
            "arguments": _required(item.arguments, f"{at}.arguments"),
        }
        call = {"id": _required(item.call_id, f"{at}.call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        output = _content(item.output, f"{at}.output")
        return {"role": "tool", "tool_call_id": _required(item.call_id, f"{at}.call_id"), "content": output}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": _reasoning(item, at, account)}
    raise RequestError(f"{at}: items of type {str(kind)[:40]!r} are not supported")


def _required(value: str | None, at: str) -> str:
    if value is None:
        raise RequestError(f"{at} is required")
    return value


def _content(value: Any, at: str) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{at} must be a string or a list of parts")
    return [_part(part, f"{at}[{index}]") for index, part in enumerate(value)]


def _part(part: Any, at: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text", "refusal"):
        member = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(member), str):
            raise RequestError(f"{at}.{member} must be a string")
        return {"type": "text", "text": part[member]}
    if kind == "input_image":
        url = part.get("image_url")
        return ImagePart(url.get("url") if isinstance(url, dict) else url, at)
    if kind == "input_file":
        raise unreadable(at, kind)
    raise RequestError(f"{at}.type must be input_text, input_image or output_text")


def _reasoning(item: _Item, at: str, account: ByteAccount) -> str:
    text = _texts(item.content, f"{at}.content")
    sealed = item.encrypted_content
    if not text and isinstance(sealed, str) and sealed.startswith(_SEAL):
        text = _unseal(sealed, account)
    return text or _texts(item.summary, f"{at}.summary")


def _texts(parts: Any, at: str) -> str:
    if parts is None:
        return ""
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise RequestError(f"{at} must be a list of parts with a text")
    return "".join(part["text"] for part in parts)


def _joined(messages: list[Any]) -> list[Any]:
    """``messages`` with those of the assistant in a row made one: a turn comes as several items."""
    joined: list[Any] = []
    for is_assistant, turn in groupby(messages, key=lambda message: message["role"] == "assistant"):
        parts = list(turn)
        if not is_assistant or len(parts) == 1:
            joined += parts
            continue
        one = dict(parts[0])
        for name in ("reasoning_content", "content"):
            if found := [part[name] for part in parts if name in part]:
                one[name] = "".join(found)
        if calls := [call for part in parts for call in part.get("tool_calls", ())]:
            one["tool_calls"] = calls
        joined.append(one)
    spoken = ("tool_calls", "reasoning_content")
    return [message for message in joined if "content" in message or any(message.get(name) for name in spoken)]

"""The fields of recorded requests, and whether pyctl takes them into account.

A field has an effect if pyctl makes another request of its body once the value is another one, or
absent, or refuses it. All others need a reason here: a field without one was dropped in silence.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from pyctl.errors import RequestError
from pyctl.requests.body import ChatBody
from pyctl.server.api.anthropic_context import edit_context
from pyctl.server.api.anthropic_request import chat_fields
from pyctl.server.api.responses_request import ResponseRequest

__all__ = ["MESSAGES", "RESPONSES", "Place", "field_places", "has_effect", "reason_of"]

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"

Place = tuple[str | int, ...]
"""The keys and indexes that lead to a value in a body."""

_OPAQUE = frozenset({"input_schema", "parameters", "client_metadata", "metadata"})
"""Members that are passed on, or ignored, as a whole."""

_REASONS: Mapping[str, Mapping[str, str]] = {
    MESSAGES: {
        "model": "chooses the model, before the body is read",
        "metadata": "names the user to Anthropic",
        "thinking.type": "`adaptive` is the default of every template",
        "thinking.display": "the reasoning is always sent",
        "cache_control.type": "without a `ttl`: every prompt is cached",
        "is_error": "the text of the result has the error",
    },
    RESPONSES: {
        "model": "chooses the model, before the body is read",
        "store": "no response is stored",
        "client_metadata": "names the session to OpenAI",
        "id": "items are found by their place",
        "status": "every item is read as complete",
        "annotations": "they belong to the tools of OpenAI's servers",
        "logprobs": "they belong to the reply that is sent back",
        "strict": "every call is bound to its schema",
        "tools:namespace.description": "its functions have descriptions of their own",
        "tools:web_search.type": "left out, with a warning: only OpenAI's servers have it",
        "tools:web_search.external_web_access": "belongs to a tool that is left out",
    },
}
"""The reason for which a field has no effect, by its whole path or by the end of it."""


def field_places(body: Mapping[str, Any]) -> dict[str, Place]:
    """Return the path of each field of ``body`` that holds no other fields, with one place where it
    occurs.

    An item of a list is shown by its type or role: ``messages:user.content:text.text``.
    """
    places: dict[str, Place] = {}
    for path, place in _walk(body, "", ()):
        places.setdefault(path, place)
    return places


def _walk(value: Any, path: str, place: Place) -> Iterator[tuple[str, Place]]:
    """Yield the fields within ``value`` level by level, so that a deep body needs no recursion."""
    waiting: list[tuple[Any, str, Place]] = [(value, path, place)]
    while waiting:
        value, path, place = waiting.pop()
        if isinstance(value, list):
            for index, item in enumerate(value):
                kind = (item.get("type") or item.get("role")) if isinstance(item, dict) else ""
                waiting.append((item, f"{path}:{kind}" if kind else path, (*place, index)))
            continue
        if not isinstance(value, dict):
            continue
        for name, member in value.items():
            inner = f"{path}.{name}" if path else name
            is_call = name == "input" and value.get("type") == "tool_use"
            if name in _OPAQUE or is_call or not _has_fields(member):
                yield inner, (*place, name)
            else:
                waiting.append((member, inner, (*place, name)))


def _has_fields(value: Any) -> bool:
    """Return whether ``value`` is an object, or a list of objects, that is not empty."""
    if isinstance(value, list):
        return any(isinstance(item, dict) for item in value)
    return isinstance(value, dict) and bool(value)


def has_effect(path: str, body: Mapping[str, Any], place: Place) -> bool:
    """Return whether pyctl reads the field at ``place`` of a ``body`` for the endpoint ``path``."""
    expected = _outcome(path, body)
    return any(_outcome(path, changed) != expected for changed in _changes(body, place))


def reason_of(path: str, field: str) -> str:
    """Return why the ``field`` of a body for ``path`` has no effect; empty if no reason is known.

    The longest end of the field's path that has a reason counts.
    """
    reasons = _REASONS[path]
    parts = field.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((reasons[end] for end in ends if end in reasons), "")


def _outcome(path: str, body: Mapping[str, Any]) -> str:
    """Return what pyctl makes of ``body``, or the error, as a text to compare."""
    try:
        return _read_message(body) if path == MESSAGES else _read_response(body)
    except RequestError as error:
        return f"error: {error}"


def _read_message(body: Mapping[str, Any]) -> str:
    edited = edit_context(body, lambda values: 0)
    values = body if edited is None else edited.values
    return repr(ChatBody.from_json(chat_fields(values)))


def _read_response(body: Mapping[str, Any]) -> str:
    request = ResponseRequest.from_json(body)
    repeated = (request.body.reasoning, request.body.include, request.body.text)
    return repr((ChatBody.from_json(request.chat), request.caching, repeated))


def _changes(body: Mapping[str, Any], place: Place) -> Iterator[dict[str, Any]]:
    """Yield copies of ``body`` with another value at ``place``, and without the member."""
    *way, last = place
    for is_removed in (False, True):
        changed: Any = copy.deepcopy(dict(body))
        holder = changed
        for step in way:
            holder = holder[step]
        if is_removed:
            del holder[last]
        else:
            holder[last] = _other(holder[last])
        yield changed


def _other(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, list):
        return value[:-1] if value else ["x"]
    if isinstance(value, dict):
        return {} if value else {"x": 1}
    return "x"

"""Messages of a conversation: checked, and fitted to the abilities of a template."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pyctl.chat.images import image_mark, joined_parts
from pyctl.chat.json_object import JsonDict, JsonObject
from pyctl.chat.template import TemplateCapabilities
from pyctl.errors import RequestError
from pyctl.files.image_file import ImageFile
from pyctl.settings.limit import limit
from pyctl.text import with_whole_characters

__all__ = ["check_messages", "fit_messages", "unreadable"]

Message = JsonDict

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""The roles of OpenAI's API, as templates name them."""

_MAX_MESSAGES = limit(10_000, "`messages`", "400", "request")

_ROLE = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_MAX_ROLE = limit(64, "characters of a role that only the chat template reads", "400", "request")

_BILLING = "x-anthropic-billing-header:"
_STAMP = re.compile(r"\bcch=[^;\s]{1,16};")
_VERSION = re.compile(_BILLING + r" ?cc_version=[0-9.]{1,24}\.(?=[0-9a-f]{3};)")


def check_messages(messages: object, images: dict[str, ImageFile] | None = None) -> list[Message]:
    """Return checked messages: a role, and content as a string or a list of strings. RequestError
    names a wrong one.

    An ImageFile becomes a mark in the text and is added to ``images`` under it. Fields that no
    template reads are dropped, and so are Claude Code's stamps, which would differ in each request
    (docs/clients.md).
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("'messages' must be a list with at least one message")
    if len(messages) > _MAX_MESSAGES:
        raise RequestError(
            f"'messages' must have at most {_MAX_MESSAGES} entries, not {len(messages)}"
        )
    collected: dict[str, ImageFile] = {} if images is None else images
    return [
        _check(message, f"messages[{index}]", collected) for index, message in enumerate(messages)
    ]


def fit_messages(messages: Sequence[Message], capabilities: TemplateCapabilities) -> list[Message]:
    """Return checked messages as a template with ``capabilities`` takes them, in order, each in its
    place.

    A system message where the template takes none becomes user text, and joins the user message
    next to it where the template takes only one at a time. So text that was rendered for the first
    n messages mostly stays the same. Where a message of the user is missing, an empty one is added.
    """
    fitted: list[Message] = []
    joined: dict[int, list[str]] = {}  # texts that join the message with this index
    for message in messages:
        message = dict(message)
        previous = fitted[-1] if fitted else None
        if message["role"] == "system" and not capabilities.system_inside:
            if previous is not None and previous["role"] == "system":
                joined.setdefault(len(fitted) - 1, []).append(text_of(message))
                continue
            if previous is not None or not capabilities.system_first:
                message["role"] = "user"
        follows_user = previous is not None and previous["role"] == "user"
        if message["role"] == "user" and follows_user and not capabilities.repeated_user:
            joined.setdefault(len(fitted) - 1, []).append(text_of(message))
            continue
        fitted.append(message)
    for index, texts in joined.items():
        fitted[index]["content"] = "\n\n".join([text_of(fitted[index]), *texts])
    roles = [message["role"] for message in fitted]
    if not capabilities.without_user and "user" not in roles:
        after_system = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
        fitted.insert(after_system, {"role": "user", "content": ""})
    return [_fit(message, capabilities) for message in fitted]


def text_of(message: Message) -> str:
    """Return the content of a checked message as one string."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(content)


def _check(message: object, where: str, images: dict[str, ImageFile]) -> Message:
    """Return a message with checked members of the right types; ``images`` collects its images by
    mark.

    Raises RequestError, which names the member at ``where``.
    """
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object")
    role = message.get("role")
    if not isinstance(role, str) or not _is_role(role):
        raise RequestError(
            f"{where}.role must be a word such as {', '.join(_ROLES)}, not {json.dumps(role)[:80]}"
        )
    calls = message.get("tool_calls")
    if calls is None and message.get("function_call") is not None:
        # OpenAI's form of a call, from before there were tools.
        calls = [{"type": "function", "function": message["function_call"]}]
    content = message.get("content")
    if content is None and role == "assistant":
        # OpenAI writes a refusal in place of the content.
        content = message.get("refusal")
    if "content" not in message and content is None:
        if role != "assistant":
            raise RequestError(f"{where}.content is missing")
        if not calls and not message.get("reasoning_content"):
            raise RequestError(f"{where} has neither content nor tool_calls")
    checked_role = _ROLES.get(role, role)
    checked_content = _checked_content(content, f"{where}.content", images)
    if checked_role == "system":
        checked_content = _without_stamps(checked_content)
    checked: Message = {"role": checked_role, "content": checked_content}
    for name in ("reasoning_content", "name", "tool_call_id"):
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise RequestError(f"{where}.{name} must be a string")
        checked[name] = value
    if calls is not None:
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be a list")
        if calls:
            checked["tool_calls"] = [
                _checked_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
            ]
    return checked


def _is_role(role: str) -> bool:
    """Return whether ``role`` is one of OpenAI's, or a short word that a template may read."""
    return role in _ROLES or (len(role) <= _MAX_ROLE and _ROLE.fullmatch(role) is not None)


def _without_stamps(content: str | list[str]) -> str | list[str]:
    if isinstance(content, str):
        return _unstamped(content)
    return [_unstamped(text) for text in content]


def _unstamped(text: str) -> str:
    """Return ``text`` without its stamps, if it is a billing header: ``x-anthropic-billing-header:
    cc_version=2.1.197.a5a; ...; cch=a5145;``

    The stamp after the version depends on the conversation's start, so that no two of them would
    share their system text.
    """
    if not text.startswith(_BILLING):
        return text
    version = _VERSION.match(text)
    if version is not None:
        text = f"{version[0]}fff{text[version.end() + 3 :]}"
    line, end, rest = text.partition("\n")
    return _STAMP.sub("cch=fffff;", line, count=1) + end + rest


def _checked_content(content: object, where: str, images: dict[str, ImageFile]) -> str | list[str]:
    """Return a content as one text, or as a list of texts; images become marks, and ``images``
    collects them.

    Raises RequestError for parts that are neither text nor image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts")
    parts: list[str | ImageFile] = []
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, ImageFile):
            images[image_mark(part)] = part
            parts.append(part)
            continue
        if not isinstance(part, dict):
            raise RequestError(f"{where}[{index}] must be an object with a type, such as text")
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise unreadable(f"{where}[{index}]", kind)
        text = part.get(kind)
        if not isinstance(text, str):
            raise RequestError(f"{where}[{index}].{kind} must be a string")
        parts.append(text)
        texts.append(text)
    return texts if len(texts) == len(parts) else joined_parts(parts)


def unreadable(where: str, kind: object) -> RequestError:
    """Return the error for a part of a request that has no text, such as a sound."""
    if kind in ("image_url", "image", "input_image", "multimodal_data"):
        # The words of llama-server, which clients look for.
        return RequestError(
            f"{where}: image input is not supported - hint: if this is unexpected, you may need "
            "to provide the mmproj"
        )
    return RequestError(
        f"{where}: only parts of type text are supported, not {json.dumps(kind)[:80]}"
    )


def _checked_call(call: object, where: str) -> Message:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise RequestError(f"{where} must be an object of type function")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function must be an object with a name")
    arguments = "" if function.get("arguments") is None else function["arguments"]
    if not isinstance(arguments, str | dict):
        raise RequestError(f"{where}.function.arguments must be a string or an object")
    checked: Message = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if isinstance(call.get("id"), str):
        checked["id"] = call["id"]
    return checked


def _fit(message: Message, capabilities: TemplateCapabilities) -> Message:
    message["content"] = _content(message["content"], capabilities)
    if "tool_calls" in message:
        calls = message["tool_calls"]
        message["tool_calls"] = [
            {**call, "function": _function(call["function"], capabilities)} for call in calls
        ]
    if capabilities.reasoning_key != "reasoning_content" and message.get("reasoning_content"):
        message[capabilities.reasoning_key] = message.pop("reasoning_content")
        if "tool_calls" in message and not capabilities.content_beside_reasoning:
            message["content"] = _content("", capabilities)
    return message


def _content(
    content: str | list[str], capabilities: TemplateCapabilities
) -> str | list[dict[str, str]]:
    """Return ``content`` in the form that the template reads: one text, or parts."""
    if isinstance(content, list):
        if not capabilities.parts:
            return "\n".join(content)
        return [{"type": "text", "text": text} for text in content]
    return content if capabilities.text else [{"type": "text", "text": content}]


def _function(function: JsonObject, capabilities: TemplateCapabilities) -> Message:
    arguments = function["arguments"]
    if capabilities.object_arguments and isinstance(arguments, str):
        try:
            parsed = json.loads(with_whole_characters((arguments or "{}").encode()))
        except ValueError:
            parsed = None
        # Arguments that a model left unfinished stay text: a template may still take them, and else
        # raises an error.
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif not capabilities.object_arguments and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": function["name"], "arguments": arguments}

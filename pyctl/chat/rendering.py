"""Conversations as text: messages checked, fitted to the template and rendered, and where the reply
starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from pyctl.chat.images import joined_parts, mark_of
from pyctl.chat.json_object import JsonDict, JsonObject, JsonObjects
from pyctl.chat.replay import Part, Replay, ReplayMarks
from pyctl.chat.reply import ReasoningTags, ReplyPart
from pyctl.chat.template import Template, TemplateCapabilities
from pyctl.errors import RequestError
from pyctl.files.image_file import ImageFile
from pyctl.settings.limit import limit
from pyctl.text import n_common, with_whole_characters

__all__ = ["Continue", "RenderedChat", "Renderer", "check_messages", "fit_messages", "unreadable"]

Message = JsonDict

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

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
        if (
            previous is not None
            and message["role"] == previous["role"] == "user"
            and not capabilities.repeated_user
        ):
            joined.setdefault(len(fitted) - 1, []).append(text_of(message))
            continue
        fitted.append(message)
    for index, texts in joined.items():
        fitted[index]["content"] = "\n\n".join([text_of(fitted[index]), *texts])
    if not capabilities.without_user and all(message["role"] != "user" for message in fitted):
        first = next(
            (i for i, message in enumerate(fitted) if message["role"] != "system"), len(fitted)
        )
        fitted.insert(first, {"role": "user", "content": ""})
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
    if not isinstance(role, str) or not (
        role in _ROLES or (len(role) <= _MAX_ROLE and _ROLE.fullmatch(role))
    ):
        raise RequestError(
            f"{where}.role must be a word such as {', '.join(_ROLES)}, not {json.dumps(role)[:80]}"
        )
    calls = message.get("tool_calls")
    if calls is None and message.get("function_call") is not None:  # as OpenAI had it before tools
        calls = [{"type": "function", "function": message["function_call"]}]
    content = message.get("content")
    if content is None and role == "assistant":  # OpenAI writes a refusal in place of it
        content = message.get("refusal")
    if "content" not in message and content is None:
        if role != "assistant":
            raise RequestError(f"{where}.content is missing")
        if not calls and not message.get("reasoning_content"):
            raise RequestError(f"{where} has neither content nor tool_calls")
    checked: Message = {
        "role": _ROLES.get(role, role),
        "content": _checked_content(content, f"{where}.content", images),
    }
    if checked["role"] == "system":
        content = checked["content"]
        checked["content"] = (
            _unstamped(content)
            if isinstance(content, str)
            else [_unstamped(text) for text in content]
        )
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


def _unstamped(text: str) -> str:
    """Return ``text`` without its stamps, if it is a billing header: ``x-anthropic-billing-header:
    cc_version=2.1.197.a5a; ...; cch=a5145;``

    The stamp after the version depends on the conversation's start, so that no two of them would
    share their system text.
    """
    if not text.startswith(_BILLING):
        return text
    if version := _VERSION.match(text):
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
            images[mark_of(part)] = part
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
    if isinstance(content, list):
        return (
            [{"type": "text", "text": text} for text in content]
            if capabilities.parts
            else "\n".join(content)
        )
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


Continue: TypeAlias = Literal["auto", "content", "reasoning_content"]
"""The part of a last assistant message that is continued; ``auto``: the content, or the reasoning
if that is all.
"""

_GAP = "pyctl-goes-on-here-7e1b"
_RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation.

    ``prefill`` is the part of the reply that the conversation already holds; ``reply_part`` is
    where the rest starts, and ``open_reasoning`` is what the prompt has written of a reasoning
    block that the reply is to fill. ``begun`` is all that the prompt has of the reply, from the tag
    of its reasoning on if there is one. ``parts`` are the text in pieces, with the tokens of
    replies that are replayed, and empty if there are none. The reply stands at ``place`` of the
    conversation, empty if no replies are remembered. ``images`` are those in the text, by their
    marks.
    """

    text: str
    prefill: str = ""
    reply_part: ReplyPart = "start"
    open_reasoning: str = ""
    begun: str = ""
    parts: tuple[Part, ...] = ()
    place: bytes = b""
    images: Mapping[str, ImageFile] = field(default_factory=dict)


class Renderer:
    """A renderer of conversations with ``template``; ``variables`` are the template's that a
    request may override.

    ``start_texts`` are the tokens that start a message, as text. ``strip_bos``: BOS is left out,
    because the tokenizer adds it to every prompt. Replies that ``marks`` remembers are put in as
    they were sampled.
    """

    def __init__(
        self,
        template: Template,
        tags: ReasoningTags,
        start_texts: Sequence[str],
        variables: JsonObject,
        marks: ReplayMarks,
        *,
        strip_bos: bool,
    ) -> None:
        """Render probes to see whether the template marks the start of each message.

        Without such marks no reply can be replaced by its tokens, so nothing is replayed.
        """
        self._template = template
        self._tags = tags
        self._start_texts = start_texts
        self._variables = {"enable_thinking": True, **variables}
        self._bos = template.bos_token if strip_bos else ""
        self.marks = ReplayMarks(Replay("off"), ())
        if self._has_start(_said("user"), _said("assistant")):
            self.marks = marks
        self._marks_replies = self._has_start(_said("user"))

    def render(
        self,
        messages: object,
        *,
        tools: JsonObjects | None = None,
        variables: JsonObject | None = None,
        add_generation_prompt: bool = True,
        continues: Continue | None = None,
        prefill: bool = True,
    ) -> RenderedChat:
        """Check ``messages`` and render them with the ``tools``. Raises RequestError.

        With ``continues``, the reply continues the last message, which must be the assistant's;
        with ``prefill``, it does so if the last message is. Otherwise it follows a generation
        header.
        """
        images: dict[str, ImageFile] = {}
        checked = check_messages(messages, images)
        template_variables = {**self._variables, **(variables or {})}
        template_variables = {
            name: value for name, value in template_variables.items() if name not in _RESERVED
        }
        effort = template_variables.get("reasoning_effort")
        if "reasoning_effort" in template_variables:
            template_variables["reasoning_effort"] = self._template.capabilities.effort(effort)
        if prefill and checked[-1]["role"] == "assistant":
            if len(checked) > 1 and checked[-2]["role"] == "assistant":
                raise RequestError("'messages' must not end in two assistant messages")
            continues = continues or "auto"
        place, marked, replayed = self.marks.mark(
            checked, tools, is_continued=continues is not None
        )
        attempts: list[list[JsonDict] | None] = []
        if replayed:  # some templates refuse a result without a call before it
            attempts = [marked, self.marks.with_calls(checked, marked)]
        for attempt in attempts:
            if not attempt:
                continue
            try:
                rendered = self._render(
                    attempt, continues, tools, template_variables, add_generation_prompt
                )
            except RequestError:  # the template needs all messages
                continue
            parts = self.marks.parts(rendered.text, replayed)
            if parts is None:
                continue
            texts = [part if isinstance(part, str) else part.text for part in parts]
            return replace(
                rendered,
                text="".join(texts),
                parts=parts,
                place=place,
                images=images,
            )
        rendered = self._render(
            checked, continues, tools, template_variables, add_generation_prompt
        )
        n_missing = sum(mark not in rendered.text for mark in images)
        if n_missing:
            raise RequestError(f"the chat template leaves out {n_missing} of {len(images)} images")
        return replace(rendered, place=place, images=images)

    def _render(
        self,
        messages: list[JsonDict],
        continues: Continue | None,
        tools: JsonObjects | None,
        variables: JsonObject,
        add_header: bool,
    ) -> RenderedChat:
        """Return the prompt of ``messages``, with the reasoning block that it may leave open."""
        if continues is not None:
            return self._continue(messages, continues, tools, variables)
        text = self._text(messages, tools, variables, add_header)
        opening = self._tags.open
        if not add_header or not text.rstrip().endswith(opening):
            return RenderedChat(text)
        header = self._header(text, messages, tools, variables)
        _, tag, blanks = header.rpartition(opening)
        if not tag:
            return RenderedChat(text)
        return RenderedChat(
            text=text,
            reply_part="reasoning",
            open_reasoning=tag + blanks,
            begun=tag + blanks,
        )

    def _text(
        self,
        messages: Sequence[JsonDict],
        tools: JsonObjects | None,
        variables: JsonObject,
        header: bool,
    ) -> str:
        fitted = fit_messages(messages, self._template.capabilities)
        text = self._template.render(
            fitted, tools=tools or None, add_generation_prompt=header, **variables
        )
        return text.removeprefix(self._bos)

    def _continue(
        self,
        messages: list[JsonDict],
        continues: Continue,
        tools: JsonObjects | None,
        variables: JsonObject,
    ) -> RenderedChat:
        """Return the prompt of a reply that continues the last message.

        A mark in place of the continued member shows where the template would close it: the prompt
        ends before that. Raises RequestError if the message is not the assistant's, has calls, or
        the template does not render the mark.
        """
        last = messages[-1]
        if last["role"] != "assistant":
            raise RequestError("only an assistant message can be continued")
        if last.get("tool_calls"):
            raise RequestError("an assistant message with tool calls cannot be continued")
        content = last["content"]
        reasoning = last.get("reasoning_content", "")
        if not isinstance(content, str):
            content = "\n\n".join(content)  # as llama-server joins a continued message
        before = messages[:-1]
        has_only_reasoning = reasoning and not content
        if continues == "reasoning_content" or (continues == "auto" and has_only_reasoning):
            gap = {**last, "content": "", "reasoning_content": _GAP}
            text = self._text([*before, gap], tools, variables, False)
            if _GAP in text:
                open_reasoning = self._tags.open + "\n"
                text = text[: text.rindex(_GAP)]
                return RenderedChat(
                    text=text + reasoning,
                    prefill=reasoning,
                    reply_part="reasoning",
                    open_reasoning=open_reasoning,
                    begun=open_reasoning + reasoning,
                )
        gap = {**last, "content": _GAP}
        text = self._text([*before, gap], tools, variables, False)
        if _GAP not in text:
            raise RequestError("this chat template cannot continue an assistant message")
        text = text[: text.rindex(_GAP)]
        header = self._header(text, before, tools, variables)
        start = header.find(self._tags.open)
        opened = header[start:] if start >= 0 else ""
        return RenderedChat(
            text=text + content,
            prefill=content,
            reply_part="content",
            begun=opened + content,
        )

    def _has_start(self, *messages: JsonDict) -> bool:
        """Return whether one of the tokens is between two messages, or between a single one and its
        reply.
        """
        try:
            parts = self._text(messages, None, self._variables, len(messages) == 1).split(_GAP)
        except RequestError:
            return False
        return len(parts) > len(messages) and any(start in parts[1] for start in self._start_texts)

    def _header(
        self,
        text: str,
        before: Sequence[JsonDict],
        tools: JsonObjects | None,
        variables: JsonObject,
    ) -> str:
        """Return the part of ``text`` that belongs to the reply after the messages ``before``: all
        from the last token on that starts a message, or the part that a rendering of ``before``
        does not have.
        """
        if self._marks_replies:
            starts = [text.rfind(start) for start in self._start_texts]
            return text[max(starts, default=-1) + 1 :]
        earlier = ""
        if before and self._tags.open in text:
            with suppress(RequestError):
                earlier = self._text(before, tools, variables, False)
        if text.startswith(earlier):
            return text.removeprefix(earlier)
        n_alike = n_common(text, earlier)
        n_tag = len(self._tags.open) - 1  # characters of a tag that this may have cut
        return text[max(n_alike - n_tag, 0) :]


def _said(role: str) -> JsonDict:
    return {"role": role, "content": _GAP}

"""Conversations as text: messages rendered by the template, and where the reply starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from pyctl.chat.json_object import JsonDict, JsonObject, JsonObjects
from pyctl.chat.messages import check_messages, fit_messages
from pyctl.chat.replay import Replay
from pyctl.chat.replay_log import SampledReply
from pyctl.chat.replay_marks import Part, ReplyPlaceholders
from pyctl.chat.reply import ReasoningTags, ReplyPart
from pyctl.chat.sections import digest_sections
from pyctl.chat.template import Template
from pyctl.errors import RequestError
from pyctl.files.image_file import ImageFile
from pyctl.prompt import PromptSections
from pyctl.text import n_common

__all__ = ["Continue", "RenderedChat", "Renderer"]

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
    where the rest starts, and ``reasoning_start`` is what the prompt has written of a reasoning
    block that the reply is to fill. ``reply_prefix`` is all that the prompt has of the reply, from
    the tag of its reasoning on if there is one. ``parts`` are the text in pieces, with the tokens
    of replies that are replayed, and empty if there are none. The reply stands at
    ``conversation_key`` of the conversation, empty if no replies are remembered. ``images`` are
    those in the text, by their marks. ``sections`` are digests of the client's sections.
    """

    text: str
    prefill: str = ""
    reply_part: ReplyPart = "start"
    reasoning_start: str = ""
    reply_prefix: str = ""
    parts: tuple[Part, ...] = ()
    conversation_key: bytes = b""
    images: Mapping[str, ImageFile] = field(default_factory=dict)
    sections: PromptSections | None = None


class Renderer:
    """A renderer of conversations with ``template``; ``variables`` are the template's that a
    request may override.

    ``start_texts`` are the tokens that start a message, as text. ``strip_bos``: BOS is left out,
    because the tokenizer adds it to every prompt. Replies that ``placeholders`` remembers are put
    in as they were sampled.
    """

    def __init__(
        self,
        template: Template,
        tags: ReasoningTags,
        start_texts: Sequence[str],
        variables: JsonObject,
        placeholders: ReplyPlaceholders,
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
        self.placeholders = ReplyPlaceholders(Replay("off"), ())
        if self._has_start(_said("user"), _said("assistant")):
            self.placeholders = placeholders
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
        template_variables = self._template_variables(variables or {})
        images: dict[str, ImageFile] = {}
        checked = check_messages(messages, images)
        if prefill and checked[-1]["role"] == "assistant":
            if len(checked) > 1 and checked[-2]["role"] == "assistant":
                raise RequestError("'messages' must not end in two assistant messages")
            continues = continues or "auto"
        sections = digest_sections(checked, tools, template_variables)
        place, attempts, replayed = self.placeholders.insert(
            checked, tools, is_continued=continues is not None
        )

        def render(messages: list[JsonDict]) -> RenderedChat:
            return self._render(
                messages, continues, tools, template_variables, add_generation_prompt
            )

        for attempt in attempts:
            try:
                rendered = render(attempt)
            except RequestError:
                continue  # the template refuses messages that others stand for
            with_replies = self._with_replies(rendered, replayed)
            if with_replies is not None:
                return replace(
                    with_replies, conversation_key=place, images=images, sections=sections
                )
        rendered = render(checked)
        n_missing = sum(mark not in rendered.text for mark in images)
        if n_missing:
            raise RequestError(f"the chat template leaves out {n_missing} of {len(images)} images")
        return replace(rendered, conversation_key=place, images=images, sections=sections)

    def _template_variables(self, requested: JsonObject) -> JsonDict:
        """Return the variables of the template, without those that it gets as arguments."""
        merged = {**self._variables, **requested}
        variables = {name: value for name, value in merged.items() if name not in _RESERVED}
        if "reasoning_effort" in variables:
            effort = variables["reasoning_effort"]
            variables["reasoning_effort"] = self._template.capabilities.effort(effort)
        return variables

    def _with_replies(
        self, rendered: RenderedChat, replayed: Mapping[str, SampledReply]
    ) -> RenderedChat | None:
        """Return the conversation with the ``replayed`` replies as they were sampled; None if the
        template does not render their marks in the places of the replies.
        """
        parts = self.placeholders.parts(rendered.text, replayed)
        if parts is None:
            return None
        texts = [part if isinstance(part, str) else part.text for part in parts]
        return replace(rendered, text="".join(texts), parts=parts)

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
            reasoning_start=tag + blanks,
            reply_prefix=tag + blanks,
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
                    reasoning_start=open_reasoning,
                    reply_prefix=open_reasoning + reasoning,
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
            reply_prefix=opened + content,
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

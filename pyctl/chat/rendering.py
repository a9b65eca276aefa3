"""Conversations as text: checked messages through the template, and where the reply goes on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from pyctl.chat.messages import check_messages, fit_messages
from pyctl.chat.reasoning import ReasoningTags, ReplyPart
from pyctl.chat.replay import Part, Replay, ReplayMarks
from pyctl.chat.template import Template, TemplateCapabilities
from pyctl.errors import RequestError
from pyctl.image_file import ImageFile

__all__ = ["Continue", "RenderedChat", "Renderer"]

Continue: TypeAlias = Literal["auto", "content", "reasoning_content"]
"""What of a last assistant message the reply continues; ``auto``: the content, or the reasoning if that is all."""

_GAP = "pyctl-goes-on-here-7e1b"
_RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation.

    ``prefill`` is the part of the reply that the conversation already holds; ``reply_part`` says where the rest
    begins, and ``open_reasoning`` is what the prompt has written of a reasoning block that the reply is to fill.
    ``begun`` is all that the prompt has of the reply, from the tag of its reasoning on if there is one.
    ``parts`` are the text in pieces, with the tokens of replies that are replayed, and empty if there are none. The
    reply stands at ``place`` of the conversation, empty where no replies are remembered. ``images`` are those in the
    text, by their marks.
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
    """Renders conversations with ``template``; ``variables`` are those of the template that a request may override.

    ``start_texts`` are the tokens that begin a message, as text. ``strip_bos``: BOS is left out, because the tokenizer
    adds it to every prompt. Replies that ``replay`` remembers are put in as they were sampled.
    """

    def __init__(
        self,
        template: Template,
        capabilities: TemplateCapabilities,
        tags: ReasoningTags,
        start_texts: Sequence[str],
        variables: Mapping[str, Any],
        replay: Replay,
        *,
        strip_bos: bool,
    ) -> None:
        self._template = template
        self._capabilities = capabilities
        self._tags = tags
        self._start_texts = start_texts
        self._variables = {"enable_thinking": True, **variables}
        self._bos = template.bos_token if strip_bos else ""
        self.marks = ReplayMarks(replay if self._has_header() else Replay("off"), start_texts)

    def render(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continues: Continue | None = None,
        prefill: bool = True,
    ) -> RenderedChat:
        """Check ``messages`` and render them with the ``tools``; raises RequestError.

        With ``continues``, the reply continues the last message, which must be the assistant's; with ``prefill``, it
        does so whenever the last message is. Otherwise it follows a generation header.
        """
        images: dict[str, ImageFile] = {}
        checked = check_messages(messages, images)
        given = {**self._variables, **(variables or {})}
        given = {name: value for name, value in given.items() if name not in _RESERVED}
        if prefill and checked[-1]["role"] == "assistant":
            if len(checked) > 1 and checked[-2]["role"] == "assistant":
                raise RequestError("'messages' must not end in two assistant messages")
            continues = continues or "auto"
        place, marked, replayed = self.marks.mark(checked, tools, is_continued=continues is not None)
        if replayed:
            try:
                rendered = self._render(marked, continues, tools, given, add_generation_prompt)
            except RequestError:  # the template wants the messages whole
                rendered = None
            parts = self.marks.parts(rendered.text, replayed) if rendered is not None else None
            if rendered is not None and parts is not None:
                text = "".join(part if isinstance(part, str) else part.text for part in parts)
                return replace(rendered, text=text, parts=parts, place=place, images=images)
        rendered = self._render(checked, continues, tools, given, add_generation_prompt)
        if missing := sum(mark not in rendered.text for mark in images):
            raise RequestError(f"the chat template leaves out {missing} of {len(images)} images")
        return replace(rendered, place=place, images=images)

    def _render(
        self,
        messages: list[dict[str, Any]],
        continues: Continue | None,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        add_header: bool,
    ) -> RenderedChat:
        if continues is not None:
            return self._continue(messages, continues, tools, variables)
        text = self._text(messages, tools, variables, add_header)
        open_reasoning = self._open_reasoning(text) if add_header else ""
        part: ReplyPart = "reasoning" if open_reasoning else "start"
        return RenderedChat(text, reply_part=part, open_reasoning=open_reasoning, begun=open_reasoning)

    def _text(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        header: bool,
    ) -> str:
        fitted = fit_messages(messages, self._capabilities)
        text = self._template.render(fitted, tools=tools or None, add_generation_prompt=header, **variables)
        return text.removeprefix(self._bos)

    def _continue(
        self,
        messages: list[dict[str, Any]],
        continues: Continue,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> RenderedChat:
        last = messages[-1]
        if last["role"] != "assistant":
            raise RequestError("only an assistant message can be continued")
        if last.get("tool_calls"):
            raise RequestError("an assistant message with tool calls cannot be continued")
        content, reasoning = last["content"], last.get("reasoning_content", "")
        if not isinstance(content, str):
            content = "\n\n".join(content)  # as llama-server joins what is continued
        if continues == "reasoning_content" or (continues == "auto" and reasoning and not content):
            gap = {**last, "content": "", "reasoning_content": _GAP}
            text = self._text([*messages[:-1], gap], tools, variables, False)
            if _GAP in text:
                open_reasoning = self._tags.open + "\n"
                text = text[: text.rindex(_GAP)] + reasoning
                return RenderedChat(text, reasoning, "reasoning", open_reasoning, open_reasoning + reasoning)
        gap = {**last, "content": _GAP}
        text = self._text([*messages[:-1], gap], tools, variables, False)
        if _GAP not in text:
            raise RequestError("this chat template cannot continue an assistant message")
        text = text[: text.rindex(_GAP)]
        header = self._header(text)
        at = header.find(self._tags.open)
        return RenderedChat(text + content, content, "content", begun=(header[at:] if at >= 0 else "") + content)

    def _has_header(self) -> bool:
        """Whether a message of the assistant begins with one of the tokens, and not where the user's ends."""
        try:
            text = self._text([_said("user"), _said("assistant")], None, self._variables, False)
        except RequestError:
            return False
        between = text[text.find(_GAP) + len(_GAP) : max(text.rfind(_GAP), 0)]
        return any(start in between for start in self._start_texts)

    def _open_reasoning(self, text: str) -> str:
        """The reasoning block that a generation header leaves open, with its tag; empty if it leaves none."""
        header = self._header(text)
        at = header.rfind(self._tags.open)
        return header[at:] if at >= 0 and not header[at + len(self._tags.open) :].strip() else ""

    def _header(self, text: str) -> str:
        """The last message of ``text``, as far as it goes; all of it where no token begins a message."""
        return text[max((text.rfind(start) for start in self._start_texts), default=-1) + 1 :]


def _said(role: str) -> dict[str, Any]:
    return {"role": role, "content": _GAP}

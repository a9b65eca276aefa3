"""A model's way of writing conversations: messages to prompts, and the beginning of the reply that follows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, TypeAlias

import numpy as np

from pyctl.chat.boundaries import boundaries, message_starts
from pyctl.chat.cached_tokenizer import CachedTokenizer, Tokenizer
from pyctl.chat.call_formats.call_grammar import CALL_TRIGGER, call_grammar
from pyctl.chat.call_formats.qwen import CallParser
from pyctl.chat.messages import check_messages, fit_messages, text_of
from pyctl.chat.reasoning import THINK, ReasoningSplitter, ReasoningTags, ReplyPart
from pyctl.chat.replay import Part, Replay, SampledReply, Splice
from pyctl.chat.reply_splitter import ParsedReply, ReplySplitter
from pyctl.chat.template import Template, TemplateCapabilities
from pyctl.chat.tools import Tools
from pyctl.errors import RequestError
from pyctl.prompt import Prompt, Tokens, as_tokens

__all__ = ["ChatFormat", "Continue", "ReasoningFormat", "RenderedChat"]

Continue: TypeAlias = Literal["auto", "content", "reasoning_content"]
"""What of a last assistant message the reply continues; ``auto``: the content, or the reasoning if that is all."""

ReasoningFormat: TypeAlias = Literal["auto", "deepseek", "none"]
"""``none`` leaves the reasoning in the content, with its tags; the others take it out."""

_TAGS = (THINK, ReasoningTags("<seed:think>", "</seed:think>"), ReasoningTags("[THINK]", "[/THINK]"))
_GAP = "pyctl-goes-on-here-7e1b"
_RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation, ready for the reply.

    ``prefill`` is the part of the reply that the conversation already holds; ``reply_part`` says where the rest
    begins, and ``open_reasoning`` is what the prompt has written of a reasoning block that the reply is to fill.
    ``parts`` are the text in pieces, with the tokens of replies that are replayed, and empty if there are none. The
    reply is message number ``reply_index``; ``tools`` is what it may call, None for nothing.
    """

    text: str
    prefill: str = ""
    reply_part: ReplyPart = "start"
    open_reasoning: str = ""
    parts: tuple[Part, ...] = ()
    reply_index: int = 0
    tools: Tools | None = None


class ChatFormat:
    """``ChatFormat(template, tokenizer).prompt([{"role": "user", "content": "Hi"}])``

    ``kwargs`` are variables of the template that a request may override; ``replay`` remembers replies and puts them
    into later conversations; ``starts`` are the token ids that begin a message. Thread-safe. Whatever is wrong with a
    request raises RequestError.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        kwargs: Mapping[str, Any] | None = None,
        replay: Replay | None = None,
    ) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.capabilities = TemplateCapabilities.of(template)
        specials = tokenizer.special_tokens()
        self.starts = message_starts(template, tokenizer, specials, self.capabilities)
        self.tags = next((tags for tags in _TAGS if tags.open in template.source), THINK)
        self._kwargs = {"enable_thinking": True, **(kwargs or {})}
        self._memo = CachedTokenizer(tokenizer, specials)
        self._start_texts = [text for text, token in specials.items() if token in self.starts]
        self._splice = Splice(replay if replay is not None and self._has_header() else Replay("off"), self._start_texts)

    def turn(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        callable_tools: Tools | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continues: Continue | None = None,
        prefill: bool = True,
    ) -> RenderedChat:
        """Check ``messages`` and render them with the ``tools``; calls in the reply are looked for only if there are
        ``callable_tools``.

        With ``continues``, the reply continues the last message, which must be the assistant's; with ``prefill``, it
        does so whenever the last message is. Otherwise it follows a generation header.
        """
        checked = check_messages(messages)
        variables = {name: value for name, value in {**self._kwargs, **(kwargs or {})}.items() if name not in _RESERVED}
        if prefill and checked[-1]["role"] == "assistant":
            if len(checked) > 1 and checked[-2]["role"] == "assistant":
                raise RequestError("'messages' must not end in two assistant messages")
            continues = continues or "auto"
        reply_index = len(checked) - (continues is not None)
        marked, replayed = self._splice.mark(checked, keep_last=continues is not None)
        if replayed:
            try:
                turn = self._turn(marked, continues, tools, variables, add_generation_prompt)
            except RequestError:  # the template wants the messages whole
                turn = None
            spliced = self._splice.parts(turn.text, replayed) if turn is not None else None
            if turn is not None and spliced is not None:
                text = "".join(map(_text, spliced))
                return replace(turn, text=text, parts=spliced, reply_index=reply_index, tools=callable_tools)
        turn = self._turn(checked, continues, tools, variables, add_generation_prompt)
        return replace(turn, reply_index=reply_index, tools=callable_tools)

    def render(self, messages: object, **options: Any) -> str:
        """The conversation as text; ``options`` are those of `turn`."""
        return self.turn(messages, **options).text

    def prompt(self, messages: object, **options: Any) -> Prompt:
        """The conversation as token ids with boundaries; ``options`` are those of `turn`."""
        return self.prompt_of(self.turn(messages, **options))

    def prompt_of(self, turn: RenderedChat) -> Prompt:
        """The tokens of ``turn``, those of replayed replies as they were sampled."""
        parts = [
            part.tokens
            if isinstance(part, SampledReply) and part.tokens is not None
            else self._memo.tokenize(_text(part))
            for part in turn.parts or (turn.text,)
        ]
        return self._prompt([self._bos(), *parts])

    def prompt_from_text(self, text: str) -> Prompt:
        """Tokens of ``text``, special tokens included, after BOS where the model wants it."""
        return self._prompt([self._bos(), self._memo.tokenize(text)])

    def prompt_from_mixed(self, parts: Sequence[str | int]) -> Prompt:
        """Tokens of strings and token ids in a row; BOS comes first only if a string does."""
        runs = [self._bos()] if parts and isinstance(parts[0], str) else []
        for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
            items = list(run)
            runs += [self._memo.tokenize(str(text)) for text in items] if is_text else [_ids(items)]
        return self._prompt(runs)

    def splitter(self, turn: RenderedChat, reasoning: ReasoningFormat = "auto") -> ReplySplitter:
        """What takes the reply to ``turn`` apart, and remembers it in the end."""
        tags = None if reasoning == "none" else self.tags
        calls = CallParser(turn.tools) if turn.tools is not None else None
        header = self._splice.header(turn.text, turn.prefill)
        if not header:
            return ReplySplitter(ReasoningSplitter(tags, turn.reply_part), calls)
        prefill, open_reasoning = turn.prefill, turn.open_reasoning if reasoning == "none" else ""

        def remember(text: str, tokens: list[int], reply: ParsedReply) -> None:
            message = reply.message(prefill if turn.reply_part == "content" else "")
            if turn.reply_part == "reasoning" and prefill:
                message["reasoning_content"] = prefill + message.get("reasoning_content", "")
            text = text.removeprefix(open_reasoning)  # it is part of the header
            known = any(self._text_of(tokens, special) == text for special in (False, True))
            self._splice.replay.remember(message, header, text, as_tokens(tokens) if known else None, turn.reply_index)

        return ReplySplitter(ReasoningSplitter(tags, turn.reply_part), calls, on_end=remember)

    def begins(self, turn: RenderedChat) -> ReplyPart:
        """Where the reply to ``turn`` begins: ``start`` only if the template leaves it a reasoning block to open."""
        if turn.reply_part != "start":
            return turn.reply_part
        closed = self.tags.open not in self.template.source or turn.text.rstrip().endswith(self.tags.close)
        return "content" if closed else "start"

    def _prompt(self, parts: Sequence[Tokens]) -> Prompt:
        tokens = as_tokens(np.concatenate(parts)) if parts else as_tokens([])
        return Prompt(tokens, boundaries(tokens, self.starts))

    def call_grammar(self, turn: RenderedChat) -> tuple[str, tuple[str, ...]]:
        """The grammar that binds the calls in the reply to ``turn``, and what triggers it: nothing if a call is forced.

        Without need there is none, which is an empty one: it would slow down every token, and the calls of a model that
        knows its form are read without one. A single call at most needs it, and so does a tool with ``strict``.
        """
        tools = turn.tools
        if tools is None or not (tools.forced or not tools.parallel or any(tool.strict for tool in tools.tools)):
            return "", ()
        form = self.capabilities.call_form
        if not tools.forced:
            return call_grammar(tools, form), (CALL_TRIGGER,)
        begins = self.begins(turn)
        open_reasoning = self.tags.open if begins == "start" else ""
        closed = self.tags.close if begins != "content" else ""
        return call_grammar(tools, form, think_open=open_reasoning, think_close=closed), ()

    def _text_of(self, tokens: Sequence[int], special: bool) -> str:
        return self.tokenizer.detokenize(tokens, special=special).decode("utf-8", "replace")

    def _bos(self) -> Tokens:
        return as_tokens([self.tokenizer.bos] if self.tokenizer.add_bos else [])

    def _turn(
        self,
        messages: list[dict[str, Any]],
        continues: Continue | None,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        add_header: bool,
    ) -> RenderedChat:
        if continues is not None:
            return self._continue(messages, continues, tools, variables)
        text = self._render(fit_messages(messages, self.capabilities), tools, variables, add_header)
        open_reasoning = self._open_reasoning(text) if add_header else ""
        return RenderedChat(text, reply_part="reasoning" if open_reasoning else "start", open_reasoning=open_reasoning)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        header: bool,
    ) -> str:
        text = self.template.render(messages, tools=tools or None, add_generation_prompt=header, **variables)
        # The template writes BOS itself; the tokenizer adds it for all prompts alike.
        bos = self.template.bos_token
        return text[len(bos) :] if bos and self.tokenizer.add_bos and text.startswith(bos) else text

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
        content, reasoning = text_of(last), last.get("reasoning_content", "")
        if continues == "reasoning_content" or (continues == "auto" and reasoning and not content):
            gap = {**last, "content": "", "reasoning_content": _GAP}
            text = self._render(fit_messages([*messages[:-1], gap], self.capabilities), tools, variables, False)
            if _GAP in text:
                return RenderedChat(
                    text[: text.rindex(_GAP)] + reasoning, reasoning, "reasoning", self.tags.open + "\n"
                )
        gap = {**last, "content": _GAP}
        text = self._render(fit_messages([*messages[:-1], gap], self.capabilities), tools, variables, False)
        if _GAP not in text:
            raise RequestError("this chat template cannot continue an assistant message")
        return RenderedChat(text[: text.rindex(_GAP)] + content, content, "content")

    def _has_header(self) -> bool:
        """Whether a message of the assistant begins with one of the tokens, and not where the user's ends."""
        try:
            text = self._render(
                fit_messages([_said("user"), _said("assistant")], self.capabilities), None, self._kwargs, False
            )
        except RequestError:
            return False
        between = text[text.find(_GAP) + len(_GAP) : max(text.rfind(_GAP), 0)]
        return any(start in between for start in self._start_texts)

    def _open_reasoning(self, text: str) -> str:
        """The reasoning block that a generation header leaves open, with its tag; empty if it leaves none."""
        header = text[max((text.rfind(start) for start in self._start_texts), default=-1) + 1 :]
        at = header.rfind(self.tags.open)
        return header[at:] if at >= 0 and not header[at + len(self.tags.open) :].strip() else ""


def _said(role: str) -> dict[str, Any]:
    return {"role": role, "content": _GAP}


def _ids(values: Sequence[str | int]) -> Tokens:
    try:
        return as_tokens(values)
    except OverflowError as error:
        raise RequestError("token ids must be 32-bit numbers") from error


def _text(part: Part) -> str:
    return part.text if isinstance(part, SampledReply) else part

"""A model's way of writing conversations: messages to prompts, and the beginning of the reply that follows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeAlias

import numpy as np

from pyctl.chat.boundaries import boundaries, message_starts
from pyctl.chat.messages import check_messages, fit_messages, text_of
from pyctl.chat.reasoning import THINK, ReasoningSplitter, ReasoningTags, Where
from pyctl.chat.template import Template
from pyctl.chat.tokenise import MemoTokenizer
from pyctl.chat.tokenizer import Tokenizer
from pyctl.chat.traits import Traits
from pyctl.errors import RequestError
from pyctl.prompt import Prompt, Tokens, as_tokens

__all__ = ["ChatFormat", "Continue", "ReasoningFormat", "Turn"]

Continue: TypeAlias = Literal["auto", "content", "reasoning_content"]
"""What of a last assistant message the reply continues; ``auto``: the content, or the reasoning if that is all."""

ReasoningFormat: TypeAlias = Literal["auto", "deepseek", "none"]
"""``none`` leaves the reasoning in the content, with its tags; the others take it out."""

_TAGS = (THINK, ReasoningTags("<seed:think>", "</seed:think>"), ReasoningTags("[THINK]", "[/THINK]"))
_GAP = "pyctl-goes-on-here-7e1b"
_RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True)
class Turn:
    """A rendered conversation, ready for the reply.

    ``prefill`` is the part of the reply that the conversation already holds; ``where`` says where the rest begins, and
    ``opened`` is what the prompt has written of a reasoning block that the reply is to fill.
    """

    text: str
    prefill: str = ""
    where: Where = "start"
    opened: str = ""


class ChatFormat:
    """``ChatFormat(template, tokenizer).prompt([{"role": "user", "content": "Hi"}])``

    ``kwargs`` are variables of the template that a request may override; ``starts`` are the token ids that begin a
    message. Thread-safe. Whatever is wrong with a request raises RequestError.
    """

    def __init__(self, template: Template, tokenizer: Tokenizer, kwargs: Mapping[str, Any] | None = None) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.traits = Traits.of(template)
        specials = tokenizer.special_tokens()
        self.starts = message_starts(template, tokenizer, specials, self.traits)
        self.tags = next((tags for tags in _TAGS if tags.open in template.source), THINK)
        self._kwargs = {"enable_thinking": True, **(kwargs or {})}
        self._memo = MemoTokenizer(tokenizer, specials)
        self._start_texts = [text for text, token in specials.items() if token in self.starts]

    def turn(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continues: Continue | None = None,
        prefill: bool = True,
    ) -> Turn:
        """Check ``messages`` and render them.

        With ``continues``, the reply continues the last message, which must be the assistant's; with ``prefill``, it
        does so whenever the last message is. Otherwise it follows a generation header.
        """
        checked = check_messages(messages)
        variables = {name: value for name, value in {**self._kwargs, **(kwargs or {})}.items() if name not in _RESERVED}
        if prefill and checked[-1]["role"] == "assistant":
            if len(checked) > 1 and checked[-2]["role"] == "assistant":
                raise RequestError("'messages' must not end in two assistant messages")
            continues = continues or "auto"
        if continues is not None:
            return self._continue(checked, continues, tools, variables)
        fitted = fit_messages(checked, self.traits)
        text = self._render(fitted, tools, variables, add_generation_prompt)
        opened = self._opened(text) if add_generation_prompt else ""
        return Turn(text, where="reasoning" if opened else "start", opened=opened)

    def render(self, messages: object, **options: Any) -> str:
        """The conversation as text; ``options`` are those of `turn`."""
        return self.turn(messages, **options).text

    def prompt(self, messages: object, **options: Any) -> Prompt:
        """The conversation as token ids with boundaries; ``options`` are those of `turn`."""
        return self.prompt_from_text(self.turn(messages, **options).text)

    def prompt_from_text(self, text: str) -> Prompt:
        """Tokens of ``text``, special tokens included, after BOS where the model wants it."""
        return self._prompt([self._bos(), self._memo.tokenise(text)])

    def prompt_from_mixed(self, parts: Sequence[str | int]) -> Prompt:
        """Tokens of strings and token ids in a row; BOS comes first only if a string does."""
        runs = [self._bos()] if parts and isinstance(parts[0], str) else []
        for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
            items = list(run)
            runs += [self._memo.tokenise(str(text)) for text in items] if is_text else [_ids(items)]
        return self._prompt(runs)

    def splitter(self, turn: Turn, reasoning: ReasoningFormat = "auto") -> ReasoningSplitter:
        """What takes the reply to ``turn`` apart."""
        if reasoning == "none":
            return ReasoningSplitter()
        return ReasoningSplitter(self.tags, turn.where)

    def _prompt(self, parts: Sequence[Tokens]) -> Prompt:
        tokens = as_tokens(np.concatenate(parts)) if parts else as_tokens([])
        return Prompt(tokens, boundaries(tokens, self.starts))

    def _bos(self) -> Tokens:
        return as_tokens([self.tokenizer.bos] if self.tokenizer.add_bos else [])

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        header: bool,
    ) -> str:
        text = self.template.render(messages, tools=tools or None, add_generation_prompt=header, **variables)
        # The template writes BOS itself; the tokeniser adds it for all prompts alike.
        bos = self.template.bos_token
        return text[len(bos) :] if bos and self.tokenizer.add_bos and text.startswith(bos) else text

    def _continue(
        self,
        messages: list[dict[str, Any]],
        continues: Continue,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> Turn:
        last = messages[-1]
        if last["role"] != "assistant":
            raise RequestError("only an assistant message can be continued")
        if last.get("tool_calls"):
            raise RequestError("an assistant message with tool calls cannot be continued")
        content, reasoning = text_of(last), last.get("reasoning_content", "")
        if continues == "reasoning_content" or (continues == "auto" and reasoning and not content):
            gap = {**last, "content": "", "reasoning_content": _GAP}
            text = self._render(fit_messages([*messages[:-1], gap], self.traits), tools, variables, False)
            if _GAP in text:
                return Turn(text[: text.rindex(_GAP)] + reasoning, reasoning, "reasoning", self.tags.open + "\n")
        gap = {**last, "content": _GAP}
        text = self._render(fit_messages([*messages[:-1], gap], self.traits), tools, variables, False)
        if _GAP not in text:
            raise RequestError("this chat template cannot continue an assistant message")
        return Turn(text[: text.rindex(_GAP)] + content, content, "content")

    def _opened(self, text: str) -> str:
        """The reasoning block that a generation header leaves open, with its tag; empty if it leaves none."""
        header = text[max((text.rfind(start) for start in self._start_texts), default=-1) + 1 :]
        at = header.rfind(self.tags.open)
        return header[at:] if at >= 0 and not header[at + len(self.tags.open) :].strip() else ""


def _ids(values: Sequence[str | int]) -> Tokens:
    try:
        return as_tokens(values)
    except OverflowError as error:
        raise RequestError("token ids must be 32-bit numbers") from error

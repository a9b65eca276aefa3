"""The interface of call formats. Each family of models has a file, and the package lists them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pyctl.chat.call_formats.scan import CallScanner
from pyctl.chat.constraint import Constraint, GrammarBuilder, reasoned, reply_json
from pyctl.chat.reply import (
    BRACKETS,
    SEED,
    THINK,
    ReasoningSplitter,
    ReasoningTags,
    ReplyDelta,
    ReplyParser,
    ReplyPart,
)
from pyctl.chat.tool_definitions import Tool, Tools

__all__ = ["CallFormat", "Chain", "TaggedFormat", "json_arguments"]


class CallFormat(ABC):
    """The form in which a family of models writes reasoning and calls.

    ``name``: for people. ``reasoning``: the tags around reasoning, by preference.
    ``control_tokens``: texts of tokens that the vocabulary hides from readers and that the parser
    has to see. ``around_content``: text that templates write around the content of a message, and
    is no part of it. ``trigger``: a regular expression that matches the beginning of a call, from
    where on a grammar binds a reply that need not call anything. ``may_omit_tags``: models leave
    out the tags around a call, so that a reply of nothing but its JSON is also one.
    ``is_bare_json``: a call may be JSON with nothing around it, which no grammar parts from other
    JSON; a reply that follows a schema is not a call then, unless one is forced.
    """

    name: str
    reasoning: tuple[ReasoningTags, ...] = (THINK, SEED, BRACKETS)
    control_tokens: tuple[str, ...] = ()
    around_content: tuple[str, ...] = ()
    trigger: str
    may_omit_tags: bool = False
    is_bare_json: ClassVar[bool] = False
    _sample: re.Pattern[str]

    def recognizes(self, sample: str) -> bool:
        """Return whether the call in ``sample``, a conversation as the template renders it, has
        this form.
        """
        return self._sample.search(sample) is not None

    def tags(self, source: str) -> ReasoningTags:
        """Return the tags around the reasoning for the template ``source``."""
        unknown = replace(self.reasoning[0], is_known=False)
        return next((tags for tags in self.reasoning if tags.open in source), unknown)

    @abstractmethod
    def parser(
        self, tools: Tools | None, tags: ReasoningTags | None, reply_part: ReplyPart
    ) -> ReplyParser:
        """Return a parser of a reply that starts in ``reply_part``. Without ``tags`` the reasoning
        stays in the content, without ``tools`` the calls do.
        """

    @abstractmethod
    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """Return the grammar expression for one call of ``tool``. Raises RequestError for an
        invalid schema.
        """

    def calls(self, grammar: GrammarBuilder, call: str, parallel: bool) -> str:
        """Return the grammar expression for one ``call``, or for several if ``parallel``."""
        calls = rf"/\n{{1,2}}/? {call}"
        return f"({calls})+" if parallel else calls

    def constraint(
        self,
        tools: Tools,
        tags: ReasoningTags,
        reply_part: ReplyPart,
        controls: Mapping[str, int] | None = None,
        schema: Any = None,
        prefill: str = "",
    ) -> Constraint:
        """Return the constraint on calls in a reply that starts in ``reply_part``.

        Forced calls bind the whole reply: to one call, or to several where ``tools`` allow it. With
        a ``schema`` the reply is calls or JSON by that schema, which may continue ``prefill``.
        Otherwise only the part from the first call on is bound. A call counts where the parser
        accepts it: after the reasoning, or within it if a call interrupts that.

        ``controls`` are the control tokens of the vocabulary. Raises RequestError for an invalid
        schema.
        """
        grammar = GrammarBuilder(controls)
        call = grammar.one_of([self.call(grammar, tool) for tool in tools.tools])
        calls = self.calls(grammar, call, tools.parallel)
        if schema is not None and not tools.forced:
            either = reply_json(
                grammar, schema, tags, reply_part, "" if self.is_bare_json else calls
            )
            return grammar.constraint(either, prefill=prefill)
        if not tools.forced:
            hidden = ("" if reply_part == "reasoning" else tags.open, tags.close)
            seen = reply_part == "content" or tags.interrupts
            return grammar.constraint(calls, (self.trigger,), hidden=None if seen else hidden)
        return grammar.constraint(reasoned(grammar, calls, tags, reply_part))


class TaggedFormat(CallFormat):
    """A format that puts reasoning first, between tags, and calls into the content that follows."""

    @abstractmethod
    def call_parser(self, tools: Tools) -> CallScanner:
        """Return a scanner that finds the calls in the content of one reply."""

    def parser(
        self, tools: Tools | None, tags: ReasoningTags | None, reply_part: ReplyPart
    ) -> ReplyParser:
        """Return a parser that reads the reasoning first, then the calls after it."""
        reasoning = ReasoningSplitter(tags, reply_part)
        return reasoning if tools is None else Chain(reasoning, self.call_parser(tools))


class Chain:
    """The content that ``reasoning`` finds goes through ``calls``."""

    def __init__(self, reasoning: ReplyParser, calls: CallScanner) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def feed(self, text: str) -> ReplyDelta:
        delta = self._reasoning.feed(text)
        if not delta.content:
            return delta
        parsed = self._calls.feed(delta.content)
        return ReplyDelta(
            reasoning=delta.reasoning,
            content=parsed.content,
            calls=parsed.calls,
        )

    def finish(self) -> ReplyDelta:
        delta = self._reasoning.finish()
        parsed = self._calls.feed(delta.content)
        rest = self._calls.finish()
        return ReplyDelta(
            reasoning=delta.reasoning,
            content=parsed.content + rest.content,
            calls=parsed.calls + rest.calls,
        )


def json_arguments(grammar: GrammarBuilder, tool: Tool) -> str:
    """Return the grammar expression for the arguments of ``tool`` as a JSON object."""
    return grammar.json({"type": "object", **tool.parameters})

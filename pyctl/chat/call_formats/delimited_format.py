"""Formats whose calls stand between delimiters."""

from __future__ import annotations

import re
from dataclasses import replace

from pyctl.chat.call_formats.call_format import Chain, TaggedFormat
from pyctl.chat.call_formats.delimited_scanner import DelimitedScanner
from pyctl.chat.call_formats.delimiters import CallDelimiters, token_texts
from pyctl.chat.call_formats.object_delimiters import ObjectDelimiters
from pyctl.chat.call_formats.scan import (
    CallScanner,
    parse_json,
)
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.reply import (
    ParsedReply,
    ReasoningSplitter,
    ReasoningTags,
    ReplyDelta,
    ReplyParser,
    ReplyPart,
)
from pyctl.chat.template import SAMPLE_KEY, SAMPLE_TOOL, SAMPLE_VALUE
from pyctl.chat.tool_definitions import Tool, Tools
from pyctl.text import overlap

__all__ = ["DelimitedFormat"]


class DelimitedFormat(TaggedFormat):
    """A format whose calls have the first of ``delimiters``; it also reads calls with the others.

    ``named_in``: texts of templates that write no calls, though their models do. ``id_size``:
    characters of the ids of calls. ``opening``: the prompt ends with it, and the reply goes on from
    there.
    """

    def __init__(
        self,
        name: str,
        *delimiters: CallDelimiters,
        reasoning: tuple[ReasoningTags, ...],
        named_in: tuple[str, ...] = (),
        id_size: int = 32,
        around_content: tuple[str, ...] = (),
        opening: str = "",
    ) -> None:
        """Derive the control tokens and the trigger of calls from the delimiters and tags."""
        self.name = name
        self.reasoning = reasoning
        texts = [text for delimiter in delimiters for text in delimiter.all_tokens]
        texts += [
            text
            for tags in reasoning
            for tag in (tags.open, tags.close)
            for text in token_texts(tag)
        ]
        self.control_tokens = tuple(dict.fromkeys(texts))
        self.trigger = f"({re.escape(delimiters[0].opener)})"
        if opening:  # any name but a delimiter's around content
            self.trigger = rf"(?:^|{re.escape(opening)})((?!all\n)[\w.-]{{1,64}}\n\{{)"
        self.delimiters = delimiters
        self.may_omit_tags = isinstance(delimiters[0], ObjectDelimiters) and not delimiters[0].begin
        self._named_in = named_in
        self._id_size = id_size
        self.around_content = around_content
        self._opening = opening

    def parser(
        self, tools: Tools | None, tags: ReasoningTags | None, reply_part: ReplyPart
    ) -> ReplyParser:
        """Return a parser of reasoning, content and calls."""
        opening = self._opening if reply_part == "start" else ""
        parser: ReplyParser = ReasoningSplitter(tags, reply_part)
        if opening:
            parser = _OpeningPrepender(parser, opening)
        if tools is not None:
            parser = Chain(parser, self.call_parser(tools))
        if not self.around_content:
            return parser
        return _DelimiterStripper(parser, self.around_content, opening)

    def recognizes(self, sample: str) -> bool:
        """Return whether the reader finds the sample call."""
        begin = sample.rfind(self.delimiters[0].opener, 0, max(sample.rfind(SAMPLE_VALUE), 0))
        if begin < 0:
            return False
        reader = DelimitedScanner(Tools((Tool(SAMPLE_TOOL, {}),)), self.delimiters[:1])
        reply = ParsedReply()
        for delta in (reader.feed(sample[begin:]), reader.finish()):
            reply.add(delta)
        return any(call.name == SAMPLE_TOOL and _is_sample(call.arguments) for call in reply.calls)

    def is_named_in(self, source: str) -> bool:
        """Return whether the template ``source`` requests calls of this form."""
        return any(text in source for text in self._named_in)

    def call_parser(self, tools: Tools) -> CallScanner:
        """Return a scanner of calls in any of these forms."""
        return DelimitedScanner(tools, self.delimiters, self._id_size)

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """Return the grammar expression for a call as the template writes it."""
        delimiters = replace(self.delimiters[0], open="") if self._opening else self.delimiters[0]
        return delimiters.call(grammar, tool)

    def calls(self, grammar: GrammarBuilder, call: str, parallel: bool) -> str:
        """Return the expression for one ``call``, or for several if ``parallel``, with the
        delimiters around them.
        """
        if self._opening:
            return f"{call} ({grammar.text(self._opening)} {call})*" if parallel else call
        return self.delimiters[0].calls(grammar, call, parallel)


class _OpeningPrepender:
    """A parser that puts ``opening`` before the first content that ``parser`` finds."""

    def __init__(self, parser: ReplyParser, opening: str) -> None:
        self._parser = parser
        self._opening = opening

    def feed(self, text: str) -> ReplyDelta:
        return self._with_opening(self._parser.feed(text))

    def finish(self) -> ReplyDelta:
        return self._with_opening(self._parser.finish())

    def _with_opening(self, delta: ReplyDelta) -> ReplyDelta:
        if not delta.content:
            return delta
        opening = self._opening
        self._opening = ""
        return delta._replace(content=opening + delta.content)


class _DelimiterStripper:
    """A parser that removes these ``delimiters`` from the content that ``parser`` finds, and
    ``opening`` from its start.
    """

    def __init__(self, parser: ReplyParser, delimiters: tuple[str, ...], opening: str) -> None:
        self._parser = parser
        self._opening = opening
        self._delimiters = re.compile("|".join(map(re.escape, delimiters)))
        self._texts = delimiters
        self._held = ""

    def feed(self, text: str) -> ReplyDelta:
        return self._stripped(self._parser.feed(text))

    def finish(self) -> ReplyDelta:
        return self._stripped(self._parser.finish(), final=True)

    def _stripped(self, delta: ReplyDelta, *, final: bool = False) -> ReplyDelta:
        text = self._held + delta.content
        may_be_delimiter = any(
            delimiter.startswith(text) and delimiter != text for delimiter in self._texts
        )
        if text and self._opening and (final or not may_be_delimiter):
            if not text.startswith(self._texts):
                text = text.removeprefix(self._opening)
            self._opening = ""
        text = self._delimiters.sub("", text)
        n_held = 0
        if not final:
            n_held = max(overlap(text, delimiter) for delimiter in self._texts)
        size = len(text) - n_held
        self._held = text[size:]
        return delta._replace(content=text[:size])


def _is_sample(arguments: str) -> bool:
    try:
        return bool(parse_json(arguments) == {SAMPLE_KEY: SAMPLE_VALUE})
    except ValueError:
        return False

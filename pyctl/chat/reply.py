"""A reply in its parts: reasoning, content and calls, as a stream and as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from pyctl.chat.json_object import JsonDict
from pyctl.chat.reasoning import ReasoningLimit
from pyctl.chat.tokenizer import Tokenizer
from pyctl.text import overlap

__all__ = [
    "BRACKETS",
    "SEED",
    "THINK",
    "CallDelta",
    "ParsedReply",
    "ReasoningSplitter",
    "ReasoningTags",
    "ReplyDelta",
    "ReplyParser",
    "ReplyPart",
    "ReplySplitter",
    "reasoning_limit",
]


class CallDelta(msgspec.Struct, frozen=True):
    """A part of tool call number ``index`` of a reply; the first of each has its ``id`` and
    ``name``, no other has.

    ``arguments`` is JSON text to append.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class ReplyDelta(NamedTuple):
    """The text to append to each part of a reply, and more of its tool calls."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


ReplyPart: TypeAlias = Literal["start", "reasoning", "content"]
"""The start of a reply: at its first token, inside a reasoning block that the prompt has opened, or
after one.
"""


@dataclass(frozen=True)
class ReasoningTags:
    """The tags ``open`` and ``close`` around the reasoning; ``interrupts`` also ends it, but
    belongs to the content.

    Reasoning that is cut short ends with ``forced_close``, which is ``close`` unless the model
    writes more than that. Where a reply consists of messages, ``next_message`` starts another one
    after the reasoning, and ``content_open`` comes before the content. ``is_known`` unless the
    template does not have these tags.
    """

    open: str
    close: str
    interrupts: tuple[str, ...] = ()
    forced_close: str = ""
    next_message: str = ""
    content_open: str = ""
    is_known: bool = True

    @property
    def end_texts(self) -> tuple[str, ...]:
        """The texts that end reasoning, first the one that ends it when it is cut short."""
        return tuple(dict.fromkeys((self.forced_close or self.close, self.close, *self.interrupts)))


THINK = ReasoningTags("<think>", "</think>")
SEED = ReasoningTags("<seed:think>", "</seed:think>")
BRACKETS = ReasoningTags("[THINK]", "[/THINK]")


def reasoning_limit(
    tokenizer: Tokenizer,
    tags: ReasoningTags,
    n_tokens: int,
    *,
    message: str,
    read: str,
    recurs: bool,
) -> ReasoningLimit:
    """Return the limit of ``n_tokens`` of reasoning between ``tags``; at the limit ``message`` and
    the first of the ends are forced.

    ``read`` is text of the prompt that opens a block.
    """

    def ids(text: str) -> tuple[int, ...]:
        return (
            tuple(tokenizer.tokenize(text, add_special=False, parse_special=True)) if text else ()
        )

    marks = {token for tag in (tags.open, *tags.end_texts) for token in ids(tag)}
    texts = {
        token: tokenizer.piece(token)
        for token in marks
        if not tokenizer.piece(token, special=False)
    }
    forced = (*ids(message), *ids(tags.end_texts[0]))
    return ReasoningLimit(
        n_tokens=n_tokens,
        start=tags.open,
        end_texts=tags.end_texts,
        forced=forced,
        read=ids(read),
        texts=texts,
        recurs=recurs,
    )


class ReasoningSplitter:
    """A splitter of the pieces of one reply; a tag may be spread over any number of them.

    Blanks around the tags belong to neither part, except those that end the reasoning; nor do those
    at the beginning of a reply whose template has the tags. A reasoning block is recognised only
    where the reply starts: later tags are content. Without ``tags``, everything is content.
    """

    def __init__(self, tags: ReasoningTags | None = None, reply_part: ReplyPart = "start") -> None:
        self._tags = tags if reply_part != "content" else None
        self._inside = reply_part == "reasoning"
        self._trim = self._inside  # blanks that come next are dropped
        self._held = ""
        self._ends = (tags.close, *tags.interrupts) if tags is not None else ()
        self._end_chars = {end[0] for end in self._ends}

    def feed(self, text: str) -> ReplyDelta:
        """Return the parts that became certain with ``text``."""
        if self._tags is None:
            if self._trim:
                text = text.lstrip()
                self._trim = not text
            return ReplyDelta(content=text)
        self._held += text
        return self._reason(self._tags) if self._inside else self._begin(self._tags)

    def finish(self) -> ReplyDelta:
        """Return the parts that were held back until the end of the reply."""
        held = self._held
        self._held = ""
        if self._inside:
            return ReplyDelta(reasoning=held)
        return ReplyDelta(
            content=held.lstrip() if self._tags is not None and self._tags.is_known else held
        )

    def _begin(self, tags: ReasoningTags) -> ReplyDelta:
        stripped = self._held.lstrip()
        if stripped.startswith(tags.open):
            self._held = stripped[len(tags.open) :]
            self._inside = True
            self._trim = True
            return self._reason(tags)
        if tags.open.startswith(stripped):
            return ReplyDelta()
        content = stripped if tags.is_known else self._held
        self._held = ""
        self._tags = None
        return ReplyDelta(content=content)

    def _reason(self, tags: ReasoningTags) -> ReplyDelta:
        """Return the certain part of the reasoning in the held text, and the content after its end.

        Text that may be the start of an end tag is held back.
        """
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
        held = self._held
        if self._end_chars.isdisjoint(held):
            self._held = ""
            return ReplyDelta(reasoning=held)
        index, end = min(
            ((index, end) for end in self._ends if (index := held.find(end)) >= 0), default=(-1, "")
        )
        if index < 0:
            keep = max(overlap(held, end) for end in self._ends)
            self._held = held[len(held) - keep :]
            return ReplyDelta(reasoning=held[: len(held) - keep])
        rest = held[index + len(tags.close) :].lstrip() if end == tags.close else held[index:]
        self._held = ""
        self._inside = False
        self._tags = None
        self._trim = not rest
        return ReplyDelta(reasoning=held[:index], content=rest)


class ReplyParser(Protocol):
    """A parser of the pieces of one reply. However it is cut, the same comes out, and nothing
    raises.
    """

    def feed(self, text: str) -> ReplyDelta:
        """Return the parts that became certain with ``text``."""
        ...

    def finish(self) -> ReplyDelta:
        """Return the parts that were held back until the end of the reply."""
        ...


class ParsedReply:
    """A reply put together from its deltas: ``reasoning``, ``content``, and ``calls`` in order of
    their index.
    """

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._heads: list[CallDelta] = []
        self._arguments: list[list[str]] = []

    def add(self, delta: ReplyDelta) -> None:
        """Append ``delta``."""
        self._reasoning.append(delta.reasoning)
        self._content.append(delta.content)
        for call in delta.calls:
            if call.name:
                self._heads.append(call)
                self._arguments.append([])
            self._arguments[call.index].append(call.arguments)

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """The content."""
        return "".join(self._content)

    @property
    def calls(self) -> list[CallDelta]:
        """The calls, each with all of its arguments."""
        return [
            CallDelta(
                index=head.index,
                id=head.id,
                name=head.name,
                arguments="".join(arguments),
            )
            for head, arguments in zip(self._heads, self._arguments, strict=True)
        ]

    def message(self, before: ReplyDelta = ReplyDelta()) -> JsonDict:  # noqa: B008 (a tuple)
        """Return the reply as an assistant message that continues ``before``."""
        message: JsonDict = {"role": "assistant", "content": before.content + self.content}
        if reasoning := before.reasoning + self.reasoning:
            message["reasoning_content"] = reasoning
        if calls := self.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return message


class ReplySplitter:
    """A splitter of the pieces of one reply: text, and the tokens that it stands for if they are
    known.

    ``echo`` is the part of the reply that the prompt holds already, as it would have been read.
    ``opening`` is text of the prompt with which the content of the reply starts. ``on_end`` gets
    the whole reply in the end: its text, its tokens and its parts; ``reply`` has those so far.
    ``n_reasoning`` counts the tokens so far whose text is reasoning and nothing else.
    """

    def __init__(
        self,
        parser: ReplyParser,
        echo: ReplyDelta = ReplyDelta(),  # noqa: B008 (a tuple)
        opening: str = "",
        on_end: Callable[[str, list[int], ParsedReply], None] | None = None,
    ) -> None:
        self.echo = echo
        self.opening = opening
        self.n_reasoning = 0
        self._parser = parser
        self._on_end = on_end
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self.reply = ParsedReply()

    def feed(self, text: str, tokens: Sequence[int] = ()) -> ReplyDelta:
        """Return the parts that became certain with ``text``."""
        delta = self._parser.feed(text)
        if delta.reasoning and not delta.content and not delta.calls:
            self.n_reasoning += len(tokens)
        self.reply.add(delta)
        if self._on_end is not None:
            self._texts.append(text)
            self._tokens.extend(tokens)
        return delta

    def finish(self) -> ReplyDelta:
        """Return the parts that were held back until the end of the reply."""
        delta = self._parser.finish()
        self.reply.add(delta)
        if self._on_end is not None:
            on_end = self._on_end
            self._on_end = None
            on_end("".join(self._texts), self._tokens, self.reply)
        return delta

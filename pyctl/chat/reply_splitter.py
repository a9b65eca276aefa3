"""A reply as it streams and as a whole: its parts, and who wants to know them in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyctl.chat.call_formats.call_format import ReplyParser
from pyctl.chat.reasoning import CallDelta, ReplyDelta

__all__ = ["ParsedReply", "ReplySplitter"]


class ParsedReply:
    """A reply put together from its deltas: ``reasoning``, ``content``, and ``calls`` in order of their index."""

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
        """What the model thought."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """What it said."""
        return "".join(self._content)

    @property
    def calls(self) -> list[CallDelta]:
        """The calls, each with all of its arguments."""
        return [
            CallDelta(head.index, head.id, head.name, "".join(arguments))
            for head, arguments in zip(self._heads, self._arguments, strict=True)
        ]

    def message(self, before: ReplyDelta = ReplyDelta()) -> dict[str, Any]:  # noqa: B008 (a tuple)
        """The reply as an assistant message that goes on from ``before``."""
        message: dict[str, Any] = {"role": "assistant", "content": before.content + self.content}
        if reasoning := before.reasoning + self.reasoning:
            message["reasoning_content"] = reasoning
        if calls := self.calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message


class ReplySplitter:
    """Feed it the pieces of one reply: text, and the tokens that it stands for where they are known.

    ``on_end`` gets the whole reply in the end: its text, its tokens and its parts.
    """

    def __init__(
        self, parser: ReplyParser, *, on_end: Callable[[str, list[int], ParsedReply], None] | None = None
    ) -> None:
        self._parser = parser
        self._on_end = on_end
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._reply = ParsedReply()

    def feed(self, text: str, tokens: Sequence[int] = ()) -> ReplyDelta:
        """What became certain with ``text``."""
        delta = self._parser.feed(text)
        if self._on_end is not None:
            self._texts.append(text)
            self._tokens.extend(tokens)
            self._reply.add(delta)
        return delta

    def finish(self) -> ReplyDelta:
        """What was still held back when the reply ended."""
        delta = self._parser.finish()
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            self._reply.add(delta)
            on_end("".join(self._texts), self._tokens, self._reply)
        return delta

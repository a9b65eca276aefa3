"""A call without its tags: a reply that is one JSON object with the name and arguments of a tool,
bare or in a fence.

Some models omit the tags of their format. Only the whole reply separates a call from JSON content,
so that text that may still become a call is held back.
"""

from __future__ import annotations

from pyctl.chat.call_formats.scan import (
    NeedMoreInput,
    ValueEnd,
    parse_json,
    skip_blanks,
    starts_with,
    string_at,
)
from pyctl.chat.reply import CallDelta, ReplyDelta, ReplyParser
from pyctl.chat.tool_definitions import Tools
from pyctl.settings.limit import limit
from pyctl.text import random_id

__all__ = ["BareCallParser"]

_MAX_ARGUMENTS = limit(
    1 << 16, "arguments of a call without tags", "it is text", "reply", "characters"
)
_MAX_AROUND = 1 << 10
"""Characters before the arguments, and after them."""

_FENCE = "```"


class BareCallParser:
    """A parser of the content that ``parser`` finds: all of it is one call of ``tools``, or
    text.
    """

    def __init__(self, parser: ReplyParser, tools: Tools) -> None:
        self._parser = parser
        self._tools = tools
        self._object_end = ValueEnd(max_size=_MAX_ARGUMENTS)
        self._held = ""
        self._is_text = False
        self._is_whole = False
        self._name = ""
        self._is_fenced = False
        # of the arguments, 0 as long as unknown
        self._begin = 0
        self._end = 0

    def feed(self, text: str) -> ReplyDelta:
        """Return the parts that became certain with ``text``."""
        return self._read(self._parser.feed(text))

    def finish(self) -> ReplyDelta:
        """Return the parts that were held back until the end of the reply."""
        delta = self._read(self._parser.finish())
        if self._is_text:
            return delta
        arguments = self._held[self._begin : self._end]
        if self._is_whole and self._is_object(arguments):
            return delta._replace(
                calls=(
                    CallDelta(
                        index=0,
                        id=random_id(),
                        name=self._name,
                    ),
                    CallDelta(0, arguments=arguments),
                )
            )
        return delta._replace(content=self._held)

    def _read(self, delta: ReplyDelta) -> ReplyDelta:
        if self._is_text:
            return delta
        self._held += delta.content
        self._is_text = bool(delta.calls) or not self._may_be_call()
        return delta._replace(content=self._held if self._is_text else "")

    def _may_be_call(self) -> bool:
        try:
            self._begin = self._begin or self._arguments_at()
            if 0 < self._begin <= _MAX_AROUND and not self._end:
                self._end = self._object_end.find(self._held, self._begin)
            return self._end > 0 and self._closes()
        except NeedMoreInput:
            return self._begin > 0 or len(self._held) <= _MAX_AROUND

    def _arguments_at(self) -> int:
        """Return the position of the arguments of a call of a tool; 0 if the text is something
        else.
        """
        pos = skip_blanks(self._held, 0)
        self._is_fenced = starts_with(_FENCE, self._held, pos)
        if self._is_fenced:
            pos += len(_FENCE)
            pos += len("json") if starts_with("json", self._held, pos) else 0
        pos = self._after(pos, "{", '"name"', ":")
        if pos:
            self._name, pos = string_at(self._held, skip_blanks(self._held, pos))
        if not any(tool.name == self._name for tool in self._tools.tools):
            return 0
        return max(self._after(pos, ",", '"arguments"', ":", "{") - 1, 0)

    def _closes(self) -> bool:
        """Return whether nothing but the end of the call follows its arguments."""
        if len(self._held) - self._end > _MAX_AROUND:
            return False
        pos = self._after(self._end, "}", *([_FENCE] if self._is_fenced else ()))
        self._is_whole = pos > 0 and not self._held[pos:].strip()
        return self._is_whole

    def _after(self, pos: int, *marks: str) -> int:
        """Return the position after the ``marks`` that follow ``pos``, with blanks between them; 0
        if something else follows.
        """
        for mark in marks:
            pos = skip_blanks(self._held, pos)
            if not starts_with(mark, self._held, pos):
                return 0
            pos += len(mark)
        return pos

    def _is_object(self, arguments: str) -> bool:
        try:
            return isinstance(parse_json(arguments), dict)
        except ValueError:
            return False

"""The format of gpt-oss, in which a reply is several messages, each with a head that names its
recipient::

    <|channel|>analysis<|message|>The user asked...<|end|><|start|>assistant
    <|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"city": "Paris"}<|call|>

    <|channel|>final<|message|>It rains.<|return|>

(without line breaks). Analysis is reasoning, a message to a function is a call, all else is
content. The recipient may also come before the channel.
"""

from __future__ import annotations

import re

from pyctl.chat.call_formats.call_format import CallFormat, json_arguments
from pyctl.chat.call_formats.scan import joined
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.reply import CallDelta, ReasoningTags, ReplyDelta, ReplyParser, ReplyPart
from pyctl.chat.template import SAMPLE_TOOL
from pyctl.chat.tool_definitions import Tool, Tools
from pyctl.text import overlap, random_id

__all__ = ["HARMONY", "MessageFormat"]

_START = "<|start|>"
_MESSAGE = "<|message|>"
_CHANNEL = "<|channel|>"
_ROLE = f"{_START}assistant"
_MAX_HEAD = 256

_ENDS = ("<|end|>", "<|call|>", "<|return|>")
"""The texts of which each closes a message."""
_HEADS = (_CHANNEL, "<|constrain|>", _MESSAGE, " to=", "to=")
"""A head starts with one of these."""

_END = re.compile("|".join(map(re.escape, (*_ENDS, _START))))
_FUNCTION = re.compile(r"\bto=functions\.([\w.-]+)")
_REASONING = re.compile(rf"^(?!.*to=).*{re.escape(_CHANNEL)}\s*analysis\b", re.DOTALL)
_TAGS = ReasoningTags(
    f"{_CHANNEL}analysis{_MESSAGE}",
    "<|end|>",
    next_message=_ROLE,
    content_open=f"{_CHANNEL}final{_MESSAGE}",
)


class MessageFormat(CallFormat):
    """The format of reasoning, calls and content in messages."""

    name = "gpt-oss"
    reasoning = (_TAGS,)
    trigger = rf"({re.escape(_CHANNEL)}commentary to=functions\.)"
    control_tokens = (*_ENDS, _START, _CHANNEL, "<|constrain|>", _MESSAGE)
    around_content = (_TAGS.content_open,)
    _sample = re.compile(
        rf"{re.escape(_ROLE)}\s*(?:{re.escape(_CHANNEL)}commentary\s*)?"
        rf"to=functions\.{SAMPLE_TOOL}\b.*?"
        rf"{re.escape(_MESSAGE)}"
    )

    def parser(
        self, tools: Tools | None, tags: ReasoningTags | None, reply_part: ReplyPart
    ) -> ReplyParser:
        """Return a parser of the messages of a reply."""
        return _Parser(tools, tags is not None, reply_part)

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """Return the expression for a message to the function."""
        to = grammar.quoted(
            f" to=functions.{tool.name}"
        )  # in one piece, as other heads start with the same letters
        head = (
            f"{grammar.text(f'{_CHANNEL}commentary')} {to} "
            f"{grammar.text(f' <|constrain|>json{_MESSAGE}')}"
        )
        return f"{head} {json_arguments(grammar, tool)}"

    def calls(self, grammar: GrammarBuilder, call: str, parallel: bool) -> str:
        """Return the expression for one call: a reply ends with its first call."""
        return call


class _Parser:
    def __init__(self, tools: Tools | None, split: bool, reply_part: ReplyPart) -> None:
        self._tools = tools
        self._split = split
        self._held = ""
        self._kind = "reasoning" if reply_part == "reasoning" and split else "content"
        self._state = self._head if reply_part == "start" else self._body
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._n_calls = 0
        self._has_arguments = False

    def feed(self, text: str) -> ReplyDelta:
        self._held += text
        return self._run(final=False)

    def finish(self) -> ReplyDelta:
        return self._run(final=True)

    def _run(self, final: bool) -> ReplyDelta:
        while self._state(final):
            pass
        delta = ReplyDelta(
            reasoning="".join(self._reasoning),
            content="".join(self._content),
            calls=joined(self._calls),
        )
        self._reasoning = []
        self._content = []
        self._calls = []
        return delta

    # Each state consumes held text and returns whether the next one should try.

    def _head(self, final: bool) -> bool:
        """Read the head of a message: its recipient, and the channel. Text that is not a head is
        content.
        """
        begins = any(head.startswith(self._held[: len(head)]) for head in _HEADS)
        pos = self._held.find(_MESSAGE)
        if begins and pos < 0 and len(self._held) < _MAX_HEAD + len(_MESSAGE) and not final:
            return False
        self._state = self._body
        self._kind = "content"
        head = self._held[: pos + len(_MESSAGE)]
        if begins and 0 <= pos <= _MAX_HEAD and not _END.search(head):
            self._held = self._held[len(head) :]
            self._open(head)
        return bool(self._held)

    def _open(self, head: str) -> None:
        """Start a message."""
        function = _FUNCTION.search(head)
        reasoning = _REASONING.search(head)
        if (
            function is not None
            and self._tools is not None
            and (self._tools.parallel or not self._n_calls)
        ):
            self._calls.append(
                CallDelta(
                    index=self._n_calls,
                    id=random_id(),
                    name=function[1],
                )
            )
            self._n_calls += 1
            self._kind = "call"
            self._has_arguments = False
        elif reasoning is not None and self._split:
            self._kind = "reasoning"
        elif reasoning is not None or "to=" in head:
            self._emit(head)

    def _body(self, final: bool) -> bool:
        """Read the text of a message."""
        end = _END.search(self._held)
        size = end.start() if end is not None else len(self._held)
        if end is None and not final:
            size -= max(overlap(self._held, word) for word in (*_ENDS, _START))
        self._emit(self._held[:size])
        self._held = self._held[size:]
        if end is None:
            return False
        if self._kind == "call" and not self._has_arguments:
            self._emit("{}")
        if end[0] != _START:
            self._held = self._held[len(end[0]) :]
        self._state = self._between
        return True

    def _between(self, final: bool) -> bool:
        """Read the text after a message, up to the next one."""
        if not final and len(self._held) < len(_ROLE) and _ROLE.startswith(self._held):
            return False
        if self._held.startswith(_ROLE):
            self._held = self._held[len(_ROLE) :]
            self._state = self._head
        elif self._held.startswith(_START) or _ROLE.startswith(
            self._held
        ):  # another role's, or a broken one
            size = len(_START)
            self._content.append(self._held[:size])
            self._held = self._held[size:]
            self._state = self._body
            self._kind = "content"
        else:
            self._state = self._head
        return bool(self._held)

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            self._calls.append(CallDelta(self._n_calls - 1, arguments=text))
            self._has_arguments = True
        else:
            (self._reasoning if self._kind == "reasoning" else self._content).append(text)


HARMONY = MessageFormat()

"""Formats in which a reply is several messages, each with a head that says for whom it is, such as gpt-oss's::

    <|channel|>analysis<|message|>The user wants...<|end|><|start|>assistant
    <|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"city": "Paris"}<|call|>

    <|channel|>final<|message|>It rains.<|return|>

(without line breaks). Analysis is reasoning, what is for a function is a call of it, all else is content. The recipient
may also come before the channel. Muse's messages have no channels, and the calls in them are between tags.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pyctl.chat.call_formats.call_format import CallFormat, Chain, json_arguments
from pyctl.chat.call_formats.marked_format import MarkedScanner
from pyctl.chat.call_formats.marks import TagMarks
from pyctl.chat.call_formats.scan import joined
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.reply import CallDelta, ReasoningTags, ReplyDelta, ReplyParser, ReplyPart
from pyctl.chat.template import SAMPLE_TOOL
from pyctl.chat.tools import Tool, Tools
from pyctl.text import overlap, random_id

__all__ = ["HARMONY", "MUSE", "MessageFormat"]

_START, _MESSAGE = "<|start|>", "<|message|>"
_ROLE = f"{_START}assistant"
_MAX_HEAD = 256


@dataclass(frozen=True, kw_only=True)
class MessageMarks:
    """``ends`` close a message; a head begins with one of ``heads``. Expressions find in a head the function that it is
    for, that it is ``reasoning``, and that it is for another ``recipient`` than the user. The head of a call is
    ``before``, ``to`` and its name, and ``behind``; then come its arguments as JSON, or with ``tags`` a call between
    these.
    """

    ends: tuple[str, ...]
    heads: tuple[str, ...]
    function: re.Pattern[str]
    reasoning: re.Pattern[str]
    recipient: re.Pattern[str]
    before: str = ""
    to: str
    behind: str
    tags: TagMarks | None = None

    @property
    def end(self) -> re.Pattern[str]:
        """One of the ends, or the beginning of another message."""
        return re.compile("|".join(map(re.escape, (*self.ends, _START))))


class MessageFormat(CallFormat):
    """Reasoning, calls and content in messages that ``marks`` describe.

    ``trigger`` and ``sample`` are regular expressions: of the beginning of a call, and of the sample call.
    """

    def __init__(self, name: str, marks: MessageMarks, tags: ReasoningTags, trigger: str, sample: str) -> None:
        self.name, self.marks, self.reasoning, self.trigger = name, marks, (tags,), trigger
        tokens = (*marks.ends, _START, *marks.heads, _MESSAGE, *(marks.tags.all_tokens if marks.tags else ()))
        self.control_tokens = tuple(dict.fromkeys(text for text in tokens if text.startswith("<")))
        self.around_content = (tags.content_open,)
        self._sample = re.compile(sample)

    def parser(
        self,
        tools: Tools | None,
        tags: ReasoningTags | None,
        reply_part: ReplyPart,
        new_id: Callable[[], str] = random_id,
    ) -> ReplyParser:
        """Reads the messages of a reply, and calls between tags in them."""
        messages = _Parser(self.marks, tools, tags is not None, reply_part, new_id)
        if self.marks.tags is None or tools is None:
            return messages
        return Chain(messages, MarkedScanner(tools, (self.marks.tags,), new_id))

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """A message for the function."""
        to = grammar.quoted(f"{self.marks.to}{tool.name}")  # in one piece, as other heads begin with the same letters
        head = f"{grammar.text(self.marks.before)} {to} {grammar.text(self.marks.behind)}"
        if (tags := self.marks.tags) is None:
            return f"{head} {json_arguments(grammar, tool)}"
        return f"{head} {grammar.text(tags.begin)} {tags.call(grammar, tool)} {grammar.text(tags.end)}"

    def calls(self, grammar: GrammarBuilder, call: str, parallel: bool) -> str:
        """A reply ends with its first call, unless calls are between tags."""
        if not parallel or self.marks.tags is None:
            return call
        return f"{call} ({grammar.text(self.marks.ends[0] + _ROLE)} {call})*"


class _Parser:
    def __init__(
        self,
        marks: MessageMarks,
        tools: Tools | None,
        split: bool,
        reply_part: ReplyPart,
        new_id: Callable[[], str],
    ) -> None:
        self._marks, self._end = marks, marks.end
        self._tools = tools
        self._split = split
        self._new_id = new_id
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
        delta = ReplyDelta("".join(self._reasoning), "".join(self._content), joined(self._calls))
        self._reasoning, self._content, self._calls = [], [], []
        return delta

    # Each state takes from what is held and says whether the next one should try.

    def _head(self, final: bool) -> bool:
        """Before the text of a message: its recipient, and the channel. What is no head is content."""
        begins = any(head.startswith(self._held[: len(head)]) for head in self._marks.heads)
        at = self._held.find(_MESSAGE)
        if begins and at < 0 and len(self._held) < _MAX_HEAD + len(_MESSAGE) and not final:
            return False
        self._state, self._kind = self._body, "content"
        head = self._held[: at + len(_MESSAGE)]
        if begins and 0 <= at <= _MAX_HEAD and not self._end.search(head):
            self._held = self._held[len(head) :]
            self._open(head)
        return bool(self._held)

    def _open(self, head: str) -> None:
        """A message begins."""
        function, reasoning = self._marks.function.search(head), self._marks.reasoning.search(head)
        if function is not None and self._tools is not None and (self._tools.parallel or not self._n_calls):
            if self._marks.tags is not None:
                return  # the call is in the content
            self._calls.append(CallDelta(self._n_calls, self._new_id(), function[1]))
            self._n_calls += 1
            self._kind, self._has_arguments = "call", False
        elif reasoning is not None and self._split:
            self._kind = "reasoning"
        elif reasoning is not None or self._marks.recipient.search(head):
            self._say(head)

    def _body(self, final: bool) -> bool:
        """The text of a message."""
        end = self._end.search(self._held)
        size = end.start() if end is not None else len(self._held)
        if end is None and not final:
            size -= max(overlap(self._held, word) for word in (*self._marks.ends, _START))
        self._say(self._held[:size])
        self._held = self._held[size:]
        if end is None:
            return False
        if self._kind == "call" and not self._has_arguments:
            self._say("{}")
        if end[0] != _START:
            self._held = self._held[len(end[0]) :]
        self._state = self._between
        return True

    def _between(self, final: bool) -> bool:
        """After a message, where the next one begins."""
        if not final and len(self._held) < len(_ROLE) and _ROLE.startswith(self._held):
            return False
        if self._held.startswith(_ROLE):
            self._held, self._state = self._held[len(_ROLE) :], self._head
        elif self._held.startswith(_START) or _ROLE.startswith(self._held):  # another role's, or a broken one
            size = len(_START)
            self._content.append(self._held[:size])
            self._held, self._state, self._kind = self._held[size:], self._body, "content"
        else:
            self._state = self._head
        return bool(self._held)

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            self._calls.append(CallDelta(self._n_calls - 1, arguments=text))
            self._has_arguments = True
        else:
            (self._reasoning if self._kind == "reasoning" else self._content).append(text)


_CHANNEL = "<|channel|>"

HARMONY = MessageFormat(
    "gpt-oss",
    MessageMarks(
        ends=("<|end|>", "<|call|>", "<|return|>"),
        heads=(_CHANNEL, "<|constrain|>", _MESSAGE, " to=", "to="),
        function=re.compile(r"\bto=functions\.([\w.-]+)"),
        reasoning=re.compile(rf"^(?!.*to=).*{re.escape(_CHANNEL)}\s*analysis\b", re.DOTALL),
        recipient=re.compile("to="),
        before=f"{_CHANNEL}commentary",
        to=" to=functions.",
        behind=f" <|constrain|>json{_MESSAGE}",
    ),
    ReasoningTags(
        f"{_CHANNEL}analysis{_MESSAGE}", "<|end|>", next_message=_ROLE, content_open=f"{_CHANNEL}final{_MESSAGE}"
    ),
    trigger=rf"({re.escape(_CHANNEL)}commentary to=functions\.)",
    sample=rf"{re.escape(_ROLE)}\s*(?:{re.escape(_CHANNEL)}commentary\s*)?to=functions\.{SAMPLE_TOOL}\b.*?"
    rf"{re.escape(_MESSAGE)}",
)
MUSE = MessageFormat(
    "Muse",
    MessageMarks(
        ends=("<|eom|>", "<|eot|>"),
        heads=(" to=", "to=", _MESSAGE),
        function=re.compile(r"\bto=(?!(?:self|user)\b)([\w.-]+)"),
        reasoning=re.compile(r"\bto=self\b"),
        recipient=re.compile(r"\bto=(?!user\b)"),
        to=" to=",
        behind=_MESSAGE,
        tags=TagMarks(
            begin="<atem:function_calls>\n",
            open='<atem:invoke name="',
            name_end='">\n',
            key_open='<atem:parameter name="',
            key_end='">',
            value_end="</atem:parameter>\n",
            close="</atem:invoke>\n",
            end="</atem:function_calls>",
            is_alone=True,
        ),
    ),
    ReasoningTags(f" to=self{_MESSAGE}", "<|eom|>", next_message=_ROLE, content_open=f" to=user{_MESSAGE}"),
    trigger=rf"( to=(?!(?:self|user)\b)[\w.-]{{1,64}}{re.escape(_MESSAGE)})",
    sample=rf"to={SAMPLE_TOOL}{re.escape(_MESSAGE)}\s*<atem:function_calls>",
)

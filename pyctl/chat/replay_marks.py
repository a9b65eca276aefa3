"""Remembered replies in later prompts: marks in the messages, replaced after rendering."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pyctl.chat.json_object import JsonDict
from pyctl.chat.replay import Replay, conversation_keys
from pyctl.chat.replay_log import SampledReply

__all__ = ["Part", "ReplyPlaceholders"]

Part: TypeAlias = str | SampledReply
"""Text as it was rendered, or a reply as it was sampled."""

_MARK = "pyctl-said-before-4c9e-"
_IN_CALL = "-call"
"""The text after a mark in the arguments of a call."""

_MAX_TAGS = 4
"""Tags of reasoning between the start of a message and the sampled text."""


def _as_call(message: JsonDict, marked: JsonDict) -> JsonDict:
    """Return ``marked`` as a call of the same tools, with the mark as an argument of the first;
    itself if it calls nothing.

    Names and ids stay: results that follow may name them.
    """
    if marked is message or not message.get("tool_calls"):
        return marked
    arguments = json.dumps({"x": marked["content"] + _IN_CALL})
    calls = []
    for call in message["tool_calls"]:
        function = {**call["function"], "arguments": arguments}
        calls.append({**call, "function": function})
        arguments = "{}"  # of all but the first
    return {"role": "assistant", "content": "", "tool_calls": calls}


class ReplyPlaceholders:
    """A replacer of messages by the replies that ``replay`` remembers. ``starts`` are the texts of
    the tokens that start a message, ``tags`` are around reasoning, which may follow on the same
    line, and ``around`` are the texts that a template writes around content. ``call_end`` is the
    text of the token that ends a message with calls.
    """

    def __init__(
        self,
        replay: Replay,
        starts: Sequence[str],
        tags: Sequence[str] = (),
        around: Sequence[str] = (),
        call_end: str = "",
    ) -> None:
        self.replay = replay
        self._around = around
        self._call_end = call_end
        self._starts = starts
        self._tags = tags

    def insert(
        self, messages: Sequence[JsonDict], tools: object, *, is_continued: bool
    ) -> tuple[bytes, Sequence[list[JsonDict]], Mapping[str, SampledReply]]:
        """Return the place of the reply, the checked messages with a mark for each one that can be
        replaced, and the replies by mark.

        There are two forms of the marked messages, to be rendered in this order until one has each
        mark in its place; none if no message can be replaced. With ``is_continued`` the last
        message is the beginning of the reply. There is no place if no reply is remembered.
        """
        if self.replay.mode == "off" or not self._starts:
            return b"", [], {}
        keys = conversation_keys(messages, tools)
        n_before = len(messages) - is_continued
        marked = list(messages)
        replayed = {}
        for index, message in enumerate(messages[:n_before]):
            if message["role"] != "assistant":
                continue
            reply = self.replay.find(message, keys[index])
            if reply is None:
                continue
            mark = f"{_MARK}{index};"
            marked[index] = {"role": "assistant", "content": mark}
            replayed[mark] = reply
        attempts = [marked] if replayed else []
        if replayed and self._call_end:
            # Some templates refuse a result without a call before it.
            pairs = zip(messages, marked, strict=True)
            attempts.append([_as_call(message, replacement) for message, replacement in pairs])
        return keys[n_before], attempts, replayed

    def parts(self, text: str, replayed: Mapping[str, SampledReply]) -> tuple[Part, ...] | None:
        """Return ``text`` with each mark, and the header before it, replaced; None if a mark is not
        where it should be.
        """
        if text.count(_MARK) != len(replayed):
            return None
        parts: list[Part] = []
        done = 0
        for mark, reply in replayed.items():
            position = text.find(mark, done)
            if text.startswith(mark + _IN_CALL, position):
                role = self._role(reply.header)
                start = text.rfind(role, done, max(position, done))
                end = text.find(self._call_end, position)
                if not role or start < 0 or end < 0:
                    return None
                parts += [text[done:start] + reply.header, reply]
                done = end
                continue
            if position < 0:
                return None
            head_end = self._before_delimiters(text, done, position)
            start = self._last_start(text, done, head_end)
            if start < 0 or self._role(text[start:head_end]) != self._role(reply.header):
                return None
            parts += [text[done:start] + reply.header, reply]
            done = position + len(mark)
            for delimiter in self._around:
                if text.startswith(delimiter, done):
                    done += len(delimiter)
                    break
        return (*parts, text[done:])

    def _before_delimiters(self, text: str, low: int, end: int) -> int:
        """Return the position before the texts around content that end at ``end``."""
        is_searched = False
        while not is_searched:
            is_searched = True
            for delimiter in self._around:
                if delimiter and text.endswith(delimiter, low, max(end, low)):
                    end -= len(delimiter)
                    is_searched = False
                    break
        return end

    def header(self, text: str, prefill: str) -> str:
        """Return the part of the prompt ``text`` that belongs to the message of the reply,
        ``prefill`` included; empty if unknown.
        """
        if self.replay.mode == "off" or any(start in prefill for start in self._starts):
            return ""
        start = self._last_start(text, 0, len(text))
        return text[start:] if start >= 0 else ""

    def _last_start(self, text: str, low: int, high: int) -> int:
        """Return the start of the last message in this part, -1 for none: a tag that starts with
        the same token is none.
        """
        for _ in range(_MAX_TAGS):
            positions = [text.rfind(start, low, high) for start in self._starts]
            last = max(positions, default=-1)
            if last < 0 or self._role(text[last:high]):
                return last
            high = last
        return -1

    def _role(self, header: str) -> str:
        """Return the role, which is on the first line. The lines that follow may differ, such as an
        empty reasoning block.
        """
        line = header.partition("\n")[0]
        positions = [line.find(tag) for tag in self._tags]
        end = min((position for position in positions if position >= 0), default=len(line))
        return line[:end]

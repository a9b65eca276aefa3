"""A splitter whose input says outright what the parts of a reply are, and what a client makes of named events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from pyctl.chat.reasoning import CallDelta, ReplyDelta
from pyctl.server.generate.prepare import PreparedReply


class PartSplitter:
    """Takes lines: ``r:`` more reasoning, ``c:`` more content, ``k:0:id:name`` a call, ``a:0:`` more arguments."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str, tokens: Sequence[int] = ()) -> ReplyDelta:
        *lines, self._held = (self._held + text).split("\n")
        reasoning, content, calls = "", "", []
        for line in lines:
            kind, _, rest = line.partition(":")
            if kind == "r":
                reasoning += rest
            elif kind == "c":
                content += rest
            else:
                index, _, value = rest.partition(":")
                name, _, function = value.partition(":")
                call = CallDelta(int(index), arguments=value) if kind == "a" else CallDelta(int(index), name, function)
                calls.append(call)
        return ReplyDelta(reasoning, content, tuple(calls))

    def finish(self) -> ReplyDelta:
        return self.feed("\n") if self._held else ReplyDelta()


def split_by_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all replies be taken apart by a `PartSplitter`."""
    monkeypatch.setattr(PreparedReply, "splitter", lambda prepared: PartSplitter())


def named_events(body: bytes) -> list[dict[str, Any]]:
    """Server-sent events whose names are their types; comments are left out."""
    events = []
    for frame in body.split(b"\n\n"):
        if frame and frame != b":":
            name, _, data = frame.partition(b"\n")
            event = msgspec.json.decode(data.removeprefix(b"data: "))
            assert name == b"event: " + event["type"].encode()
            events.append(event)
    return events

"""Replays of chats: floors, the replies that chats go on with, and what happened in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench.traces.chat_server import Answer, ChatServer
from bench.traces.chats import Message, TextScale
from bench.traces.recording import RecordedRequest, Session
from bench.traces.schedule import Event, Turn, turns_of
from bench.traces.served_chats import ChatReplay, ServedChat
from pyctl.cache.request_kind import RequestKind
from pyctl.prompt import Tokens, as_tokens

SCALE = 1 / 32


def units_of(text: str) -> Tokens:
    return as_tokens(np.frombuffer(text.encode(), np.uint8).astype(np.int32))


class EchoServer(ChatServer):
    """A model with a token for each character of `role:text;`, which evaluates whole prompts."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")
        self.chats: list[list[Message]] = []

    def measure_text(self, scale: float) -> TextScale:
        return TextScale(scale, 1.0, 6.0)

    def prompt_units(self, messages: Sequence[Message]) -> Tokens:
        return units_of("".join(f"{each['role']}:{each['content']};" for each in messages))

    def reply_units(self, message: Message) -> Tokens:
        return units_of(f"{message['role']}:{message['content']};")

    def chat(self, messages: Sequence[Message], max_tokens: int) -> Answer:
        self.chats.append(list(messages))
        n_prompt = self.prompt_units(messages).size
        message = {"role": "assistant", "content": f"{len(self.chats):04}"[:max_tokens]}
        return Answer(message, n_prompt, n_prompt, max_tokens, 0.25)


def request(row: int, n_prompt: int, kind: RequestKind, n_common: int = 0) -> RecordedRequest:
    """Return a request after the one before it; kind FIRST starts anew."""
    parent = None if kind is RequestKind.FIRST else row - 1
    return RecordedRequest(row, 0, 0.0, n_prompt, 128, parent, n_common, kind, float(row))


SESSION = Session(
    1,
    [
        request(0, 20_000, RequestKind.FIRST),
        request(1, 24_000, RequestKind.APPEND, 20_000),
        request(2, 24_000, RequestKind.REWRITE, 16_000),
        request(3, 6_400, RequestKind.FIRST),
    ],
)

TURNS = turns_of([SESSION], n_at_once=1, max_context=100_000)


def run(replay: ChatReplay, steps: Sequence[Turn | Event] = TURNS) -> list[ServedChat]:
    return list(replay.run(steps))


def test_the_floor_is_the_part_that_no_earlier_prompt_or_reply_had() -> None:
    server = EchoServer()
    served = run(ChatReplay(server, SCALE))
    lengths = [chat.answer.n_prompt for chat in served]
    assert served[0].floor == lengths[0]
    first_reply = len("assistant:0001;")
    assert abs(served[1].floor - (lengths[1] - lengths[0] - first_reply)) <= len("user:")
    assert served[2].floor == pytest.approx((24_000 - 16_000) / 32, abs=10)
    assert served[3].floor == pytest.approx(lengths[3], abs=len("system:") + 3)
    assert [chat.n_above for chat in served] == [
        chat.answer.n_prompt - chat.floor for chat in served
    ]


def test_a_prompt_sent_again_has_a_floor_of_one() -> None:
    server = EchoServer()
    turns = turns_of(
        [Session(1, SESSION.requests[:1]), Session(1, SESSION.requests[:1])], 1, 100_000
    )
    assert [chat.floor for chat in run(ChatReplay(server, SCALE), turns)][1] == 1


def test_chats_go_on_with_the_servers_replies() -> None:
    server = EchoServer()
    run(ChatReplay(server, SCALE))
    assert {"role": "assistant", "content": "0001"} in server.chats[1]


def test_a_request_that_is_not_sent_has_no_reply_in_later_chats() -> None:
    server = EchoServer()
    replay = ChatReplay(server, SCALE, restart=lambda: None)
    first, second = TURNS[:2]
    third = RecordedRequest(2, 0, 0.0, 26_000, 128, 1, 24_000, RequestKind.APPEND, 2.0)
    left_out = replace(second, is_sent=False)
    steps: list[Turn | Event] = [first, Event.RESTART, left_out, replace(second, request=third)]
    served = run(replay, steps)
    assert [chat.turn.request.row for chat in served] == [0, 2]
    assert [each["role"] for each in server.chats[1]].count("assistant") == 1, "the first reply"
    assert served[1].n_earlier_reply == 0
    assert served[1].happened == "restart", "since the last request that was answered"


def test_what_happened_since_the_parent_was_answered_is_told() -> None:
    n_restarts = 0

    def restart() -> None:
        nonlocal n_restarts
        n_restarts += 1

    visitor = Session(-1, SESSION.requests[:1])
    other = Turn(visitor, SESSION.requests[0], "other model", is_other_model=True)
    steps: list[Turn | Event] = [TURNS[0], Event.RESTART, TURNS[1], other, TURNS[2], TURNS[3]]
    replay = ChatReplay(EchoServer(), SCALE, other_model=EchoServer(), restart=restart)
    served = run(replay, steps)
    assert [chat.happened for chat in served] == ["", "restart", "", "switch", ""]
    assert [chat.n_earlier_reply for chat in served] == [0, 4, 0, 0, 0]
    assert n_restarts == 1


def test_models_know_nothing_of_each_other() -> None:
    other = Turn(SESSION, SESSION.requests[0], "other model", is_other_model=True)
    replay = ChatReplay(EchoServer(), SCALE, other_model=EchoServer())
    first, second = run(replay, [TURNS[0], other])
    assert first.floor == second.floor == first.answer.n_prompt


def test_a_step_without_what_it_needs_is_an_error() -> None:
    replay = ChatReplay(EchoServer(), SCALE)
    with pytest.raises(ValueError, match="no restart"):
        run(replay, [Event.RESTART])
    other = Turn(SESSION, SESSION.requests[0], "other model", is_other_model=True)
    with pytest.raises(ValueError, match="no other model"):
        run(replay, [other])

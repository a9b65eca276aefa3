"""Chats of recorded requests: their lengths, shared messages, and replies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import pytest

from bench.traces.chats import Message, SessionChats, TextScale
from bench.traces.recording import RecordedRequest, Session, read_sessions
from pyctl.cache.request_kind import RequestKind

TEXT = TextScale(1 / 32, chars_per_token=1.0, message_tokens=9.0)

REPLY: Message = {"role": "assistant", "content": "as you can"}
"""A reply of the recorded 10 tokens, scaled."""


@pytest.fixture(scope="module")
def sessions() -> list[Session]:
    """Return the first recorded sessions."""
    return read_sessions()[:4]


def request(row: int, n_prompt: int, kind: RequestKind, n_common: int = 0) -> RecordedRequest:
    """Return a request after the one before it, with a reply of 320 tokens."""
    parent = row - 1 if row else None
    return RecordedRequest(row, 0, 0.0, n_prompt, 320, parent, n_common, kind)


def build_all(session: Session, n: int) -> list[list[Message]]:
    """Return the chats of the first ``n`` requests; each got REPLY."""
    chats = SessionChats(session, TEXT)
    built = []
    for each in session.requests[:n]:
        built.append(chats.build(each))
        chats.record_reply(each, REPLY)
    return built


def n_tokens(messages: Sequence[Message]) -> float:
    return sum(TEXT.message(len(each["content"])) for each in messages)


def n_shared(chat: Sequence[Message], other: Sequence[Message]) -> int:
    """Return the number of leading messages that two chats share."""
    pairs = zip(chat, other, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_a_chat_has_the_recorded_tokens_scaled(sessions: list[Session]) -> None:
    session = sessions[1]
    reply = 9 + 10 + 9  # REPLY in place of a reply of the recorded length, and a short message
    for each, chat in zip(session.requests, build_all(session, 33), strict=True):
        n_replies = sum(message["role"] == "assistant" for message in chat)
        longest_reply = max(earlier.n_reply for earlier in session.requests[: each.row + 1]) / 32
        assert abs(n_tokens(chat) - each.n_prompt / 32) <= n_replies * (longest_reply + reply) + 10


def test_a_chat_begins_with_a_system_message_and_ends_with_a_user(sessions: list[Session]) -> None:
    for session in sessions:
        for chat in build_all(session, 40):
            roles = [message["role"] for message in chat]
            assert roles[0] == "system"
            assert "system" not in roles[1:]
            assert roles[-1] == "user"
            assert all(message["content"].strip() for message in chat)


def test_an_append_is_its_parents_chat_with_the_reply_and_new_messages() -> None:
    session = Session(
        1,
        [
            request(0, 20_000, RequestKind.FIRST),
            request(1, 22_400, RequestKind.APPEND, n_common=19_968),
        ],
    )
    first, second = build_all(session, 2)
    assert second[: len(first) + 1] == [*first, REPLY]
    assert [message["role"] for message in second[len(first) + 1 :]] == ["user", "user"]
    tags_of_reply = 9
    assert n_tokens(second[len(first) + 1 :]) == (22_400 - 20_320) // 32 - tags_of_reply


def test_without_a_reply_an_append_has_only_new_messages() -> None:
    session = Session(
        1,
        [
            request(0, 20_000, RequestKind.FIRST),
            request(1, 22_400, RequestKind.APPEND, n_common=19_968),
        ],
    )
    chats = SessionChats(session, TEXT)
    first = chats.build(session.requests[0])
    second = chats.build(session.requests[1])
    assert second[: len(first)] == first
    assert {message["role"] for message in second[len(first) :]} == {"user"}
    assert round(n_tokens(second)) == 22_400 / 32


def test_a_rewrite_leaves_its_parent_at_the_start_of_a_message() -> None:
    session = Session(
        1,
        [
            request(0, 40_000, RequestKind.FIRST),
            request(1, 30_000, RequestKind.REWRITE, n_common=25_600),
        ],
    )
    first, second = build_all(session, 2)
    shared = n_shared(first, second)
    assert round(n_tokens(first[:shared])) == 25_600 / 32
    assert second[shared] != first[shared]
    assert abs(n_tokens(second) - 30_000 / 32) < 1


def test_a_request_that_shares_nothing_starts_anew() -> None:
    session = Session(
        1, [request(0, 20_000, RequestKind.FIRST), request(1, 640, RequestKind.SUB_AGENT)]
    )
    first, second = build_all(session, 2)
    assert n_shared(first, second) == 0
    assert [message["role"] for message in second] == ["system", "user"]


def test_a_message_that_is_too_long_shortens_the_next_one() -> None:
    requests = [request(0, 20_000, RequestKind.FIRST)]
    for row in range(1, 20):
        requests.append(request(row, 20_000 + row * 400, RequestKind.APPEND, n_common=10**6))
    requests.append(request(20, 60_000, RequestKind.APPEND, n_common=10**6))
    chat = build_all(Session(1, requests), 21)[-1]
    # A reply of 10 tokens and a message of 9 and a word are more than 400 recorded tokens.
    assert abs(n_tokens(chat) - 60_000 / 32) <= 1


def test_two_builds_are_equal(sessions: list[Session]) -> None:
    assert build_all(sessions[2], 120) == build_all(sessions[2], 120)

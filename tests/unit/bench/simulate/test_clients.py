"""Clients that send recorded requests, scaled down."""

from __future__ import annotations

import random

from bench.simulate.clients import Client, clients, scaled
from bench.traces.recording import RecordedRequest, Session
from pyctl.cache.request_kind import RequestKind
from pyctl.prompt import common_prefix


def request(
    row: int, n: int, parent: int | None, n_common: int, kind: RequestKind
) -> RecordedRequest:
    return RecordedRequest(row, 0, 5.0, n, 600, parent, n_common, kind)


SESSION = Session(
    7,
    [
        request(0, 40_000, None, 0, RequestKind.FIRST),
        request(1, 60_000, 0, 40_000, RequestKind.APPEND),
        request(2, 30_000, 1, 20_000, RequestKind.REWRITE),
    ],
)


def test_an_append_continues_with_the_reply_that_was_received() -> None:
    client = Client(SESSION, 0)
    first, n_reply = client.make()
    assert len(first) == scaled(40_000)
    assert n_reply == scaled(600)
    client.receive([1, 2, 3])
    second, _ = client.make()
    assert common_prefix(first.tokens, second.tokens) == len(first)
    assert second.tokens[len(first) :][:3].tolist() == [1, 2, 3]
    assert len(second) == scaled(60_000)


def test_a_rewrite_shares_what_was_recorded() -> None:
    client = Client(SESSION, 0)
    client.make()
    second, _ = client.make()
    third, _ = client.make()
    assert common_prefix(second.tokens, third.tokens) == scaled(20_000)
    assert client.is_over


def test_each_run_has_other_texts_and_the_same_ones_again() -> None:
    first, _ = Client(SESSION, 0).make()
    again, _ = Client(SESSION, 0).make()
    other, _ = Client(SESSION, 1).make()
    assert first.tokens.tolist() == again.tokens.tolist()
    assert common_prefix(first.tokens, other.tokens) == 0


def test_sessions_come_in_random_order_for_ever() -> None:
    sessions = [Session(number, SESSION.requests) for number in range(5)]
    stream = clients(sessions, random.Random(1))
    rounds = [[next(stream) for _ in sessions] for _ in range(3)]
    assert all({each.session.number for each in part} == set(range(5)) for part in rounds)
    assert [part[0].run for part in rounds] == [0, 1, 2]

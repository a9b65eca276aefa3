"""The order in which a server gets the requests of several sessions, and the events in between.

The order depends on nothing but the recorded times, so each server gets the same one.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from bench.traces.recording import RecordedRequest, Session
from pyctl.cache.request_kind import RequestKind

__all__ = ["Event", "Step", "Turn", "schedule", "turns_of", "visiting_session"]

VISITOR = 0
"""The number of the session of a second client; recorded ones count from 1."""

OTHER_MODEL = -1
"""The number of the session with another model."""

VISIT_EVERY = 10
"""Requests of the recorded sessions from one request of the second client to the next."""

VISITOR_TURNS = 12
"""Requests of a chat of the second client, before it starts another one."""

FIRST_TOKENS = 2_000
"""Recorded tokens of the second client's first prompt, a system message and a question."""

TURN_TOKENS = 500
"""Recorded tokens of its next messages, with the reply."""

REPLY_TOKENS = 200
"""Recorded tokens of a reply to it."""

N_OTHER_MODEL = 5
"""Requests to the other model, before the first one is back."""


class Event(Enum):
    """Something that happens to the server between two requests."""

    RESTART = "restart"


@dataclass(frozen=True)
class Turn:
    """A request of a session at its place in the order.

    Attributes:
        session: The session, with the earlier requests.
        request: Its lengths and its parent.
        kind: The kind of request in the tables.
        is_sent: False for a request that the client leaves out, since it exceeds the context.
        is_other_model: True if the other model answers it.
    """

    session: Session
    request: RecordedRequest
    kind: str
    is_sent: bool = True
    is_other_model: bool = False


Step = Turn | Event


def turns_of(sessions: Sequence[Session], n_at_once: int, max_context: int) -> list[Turn]:
    """Return the requests of ``sessions`` by their recorded times.

    ``n_at_once`` sessions start together; the next one starts when one of them has ended. Requests
    of more than ``max_context`` tokens, with the reply, are not sent.
    """
    free_from = [0.0] * n_at_once
    timed: list[tuple[float, Turn]] = []
    for session in sessions:
        began = heapq.heappop(free_from)
        for request in session.requests:
            is_sent = request.n_prompt + request.n_reply <= max_context
            turn = Turn(session, request, request.kind.value, is_sent)
            timed.append((began + request.seconds, turn))
        heapq.heappush(free_from, began + max(each.seconds for each in session.requests))
    timed.sort(key=lambda each: each[0])
    return [turn for _, turn in timed]


def schedule(
    turns: Sequence[Turn], *, restart: bool, switch: bool, second_client: bool
) -> list[Step]:
    """Return ``turns`` with the events in between, counted by the requests that are sent.

    The server restarts after half of them. The other model answers N_OTHER_MODEL requests after a
    third. The second client sends one every VISIT_EVERY turns.
    """
    n_sent = sum(turn.is_sent for turn in turns)
    visits = visiting_session(VISITOR, n_sent // VISIT_EVERY)
    others = visiting_session(OTHER_MODEL, N_OTHER_MODEL)
    before: dict[int, list[Step]] = defaultdict(list)
    if restart:
        before[n_sent // 2].append(Event.RESTART)
    if switch:
        before[n_sent // 3] += [
            Turn(others, request, "other model", is_other_model=True) for request in others.requests
        ]
    if second_client:
        for number, request in enumerate(visits.requests, 1):
            before[number * VISIT_EVERY - 1].append(Turn(visits, request, "second client"))
    steps: list[Step] = []
    number = 0
    for turn in turns:
        if turn.is_sent:
            steps += before[number]
            number += 1
        steps.append(turn)
    return steps


def visiting_session(number: int, n_requests: int) -> Session:
    """Return a session of ``n_requests`` in short chats of VISITOR_TURNS each."""
    return Session(number, list(_visits(n_requests)))


def _visits(n_requests: int) -> Iterator[RecordedRequest]:
    for row in range(n_requests):
        n_before = row % VISITOR_TURNS
        n_prompt = FIRST_TOKENS + n_before * TURN_TOKENS
        yield RecordedRequest(
            row=row,
            stream=0,
            think=0.0,
            n_prompt=n_prompt,
            n_reply=REPLY_TOKENS,
            parent=row - 1 if n_before else None,
            n_common=n_prompt - TURN_TOKENS if n_before else 0,
            kind=RequestKind.APPEND if n_before else RequestKind.FIRST,
        )

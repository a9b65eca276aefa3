"""Prompts of recorded requests: the recorded lengths, shared prefixes, and replies."""

from __future__ import annotations

import numpy as np
import pytest

from bench.simulated import Known
from bench.traces.prompts import SessionPrompts
from bench.traces.recording import Session, read_sessions
from pyctl.cache.request_kind import RequestKind
from pyctl.prompt import as_tokens

MAX_REPLY = 16


@pytest.fixture(scope="module")
def sessions() -> list[Session]:
    """Return the first recorded sessions."""
    return read_sessions()[:4]


def test_prompts_have_the_recorded_lengths_and_share_what_was_recorded(
    sessions: list[Session],
) -> None:
    session = sessions[2]
    prompts = SessionPrompts(session, MAX_REPLY)
    made = [prompts.make(request) for request in session.requests[:120]]
    for request, prompt in zip(session.requests, made, strict=False):
        assert len(prompt.prompt) == request.n_prompt
        if request.parent is None:
            continue
        parent = made[request.parent]
        before = parent.prompt.tokens
        n_common = min(request.n_common, before.size)
        assert np.array_equal(prompt.prompt.tokens[:n_common], before[:n_common])
        if request.kind is RequestKind.APPEND and request.n_prompt > before.size + MAX_REPLY + 3:
            said = prompt.prompt.tokens[before.size : before.size + parent.reply.size]
            assert np.array_equal(said, parent.reply)


def test_the_floor_is_the_tokens_that_no_earlier_request_or_reply_had(
    sessions: list[Session],
) -> None:
    session = sessions[2]
    prompts = SessionPrompts(session, MAX_REPLY)
    known = Known()
    for request in session.requests[:60]:
        made = prompts.make(request)
        shared = known.shared(made.prompt.tokens)
        # A parent shares the longest prefix in blocks; another prompt may share one more in part.
        assert 0 <= shared - made.n_known < 64
        known.add(as_tokens(np.concatenate([made.prompt.tokens, made.reply])))


def test_a_prompt_that_was_not_served_makes_nothing_known(sessions: list[Session]) -> None:
    session = sessions[0]
    prompts = SessionPrompts(session, MAX_REPLY)
    assert prompts.make(session.requests[0], is_served=False).n_known == 0
    assert session.requests[1].parent == 0
    assert prompts.make(session.requests[1]).n_known == 0

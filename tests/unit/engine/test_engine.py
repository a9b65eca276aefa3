"""A request on the fake backend: restores, snapshots, and the cache after a failure."""

from __future__ import annotations

import numpy as np
import pytest

from pyctl.errors import EngineError
from pyctl.prompt import Prompt, Tokens
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ask, cold, engine_of
from tests.unit.engine.messages import KINDS, chat


def test_generated_text_is_reused_unless_exact() -> None:
    for exact in (False, True):
        engine = engine_of(FakeBackend(), exact=exact)
        prompt = chat((1, 300))
        reply = ask(engine, prompt, n=10)
        follow = Prompt.from_ids([*prompt.tokens, *reply.tokens, *range(1, 40)], prompt.boundaries)
        stats = ask(engine, follow).done.stats
        evaluated = len(prompt) + len(reply.tokens) - (1 if reply.done.stop_type == "limit" else 0)
        assert stats.n_cached == (300 if exact else evaluated), exact
        assert stats.source == "live"


@pytest.mark.parametrize("kind", KINDS)
def test_alternating_conversations_on_one_head(kind: str) -> None:
    engine = engine_of(FakeBackend(kind), exact=True)
    head = (1, 500)
    for turn in range(4):
        for conversation in (10, 20, 30):
            prompt = chat(head, *((conversation + i, 40) for i in range(turn + 1)))
            reply = ask(engine, prompt)
            assert reply.tokens == cold(FakeBackend(kind), prompt).tokens
            new = 4 + 40 if turn or conversation > 10 else len(prompt)
            assert reply.done.stats.n_evaluated == new, (turn, conversation)
    check_invariants(engine.prefix_cache.cache)


def test_a_rewind_moves_no_rows_and_an_extension_only_what_is_missing() -> None:
    engine = engine_of(FakeBackend(can_hold=False), exact=True)
    long = chat((1, 300), (2, 240), (3, 240))
    short = chat((1, 300), (4, 60))
    ask(engine, long)
    ask(engine, short)
    assert engine.backend.n_loaded == 0, "the head is still there"
    stats = ask(engine, long).done.stats
    assert stats.source == "ram"
    assert stats.n_cached == 784
    assert engine.backend.n_loaded == 484, "the head is live, only the rest is copied"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fail", [1, 2, 3, 50])
def test_a_snapshot_that_cannot_be_restored_is_a_miss(kind: str, fail: int) -> None:
    """Also where the attempt before it has left the sequence empty."""
    backend = FakeBackend(kind)
    engine = engine_of(backend, exact=True)
    first = chat((1, 300), (2, 240))
    second = chat((7, 420))
    ask(engine, first)
    ask(engine, second)
    backend.fail_loads = fail
    reply = ask(engine, first)
    assert reply.tokens == cold(FakeBackend(kind), first).tokens
    backend.fail_loads = 0
    assert ask(engine, second).tokens == cold(FakeBackend(kind), second).tokens
    check_invariants(engine.prefix_cache.cache)


def test_an_evaluation_that_fails_ends_the_request_and_nothing_else() -> None:
    backend = FakeBackend(n_ctx=600)
    engine = engine_of(backend)
    good = chat((1, 300))
    expected = ask(engine, good).tokens
    original = backend.evaluate
    backend.evaluate = lambda *args, **kwargs: (_ for _ in ()).throw(EngineError("boom"))
    reply = ask(engine, chat((1, 300), (2, 100)))
    assert str(reply.error) == "boom"
    backend.evaluate = original
    assert ask(engine, good).tokens == expected
    check_invariants(engine.prefix_cache.cache)


@pytest.mark.parametrize(("n_slots", "budget", "maximum"), [(0, 20_000, 124), (8, None, 2 * 124)])
def test_side_requests_do_not_push_the_conversation_out(
    n_slots: int, budget: int | None, maximum: int
) -> None:
    engine = engine_of(FakeBackend(n_ctx=16384), n_slots=n_slots, budget=budget, exact=True)
    messages = [(1, 620)]
    for turn in range(30):
        messages.append((100 + turn, 120))
        stats = ask(engine, chat(*messages)).done.stats
        assert not turn or stats.n_evaluated <= maximum
        ask(engine, chat((5000 + turn, 240)))  # a title request with a head of its own


def test_limits_and_ends() -> None:
    backend = FakeBackend(n_ctx=320)
    engine = engine_of(backend)
    reply = ask(engine, chat((1, 300)), n=-1)
    assert reply.done.stop_type in ("limit", "eos")
    assert len(reply.tokens) <= 320 - 304
    assert ask(engine, chat((1, 300)), n=0).done.timings.n_predicted == 0
    word = ask(engine, chat((1, 250)), n=20).text[3:5]
    stopped = ask(engine, chat((1, 250)), n=20, stop=(word,))
    assert stopped.done.stop_type == "word"
    assert stopped.done.stopping_word == word
    assert word not in stopped.text


def test_what_a_client_wants_forgotten_is_neither_read_nor_kept() -> None:
    engine = engine_of(FakeBackend())
    prompt = chat((1, 300))
    for _ in range(2):
        stats = ask(engine, prompt, cache_prompt=False).done.stats
        assert stats.n_cached == 0
        assert stats.source == "none"
        assert stats.n_saved == 0
    cache = engine.prefix_cache.cache
    assert not cache.prompt_ends
    ask(engine, prompt)
    assert len(cache.prompt_ends) == 1
    cache.clear()
    assert len(cache.prompt_ends) == 0
    assert cache.n_bytes == 0


def test_a_miss_names_the_first_differing_token() -> None:
    engine = engine_of(FakeBackend(), exact=True)
    prompt = chat((1, 300), (2, 240))
    ask(engine, prompt)
    edited: Tokens = prompt.tokens.copy()
    edited[440] = 59 - edited[440]
    stats = ask(engine, Prompt.from_ids(edited, prompt.boundaries)).done.stats
    assert stats.miss.position == 440
    assert stats.miss.nearest == 300
    assert stats.miss.is_by_chance is False
    edited[400] = 59 - edited[400]
    assert ask(engine, Prompt.from_ids(edited, prompt.boundaries)).done.stats.miss.is_by_chance


@pytest.mark.parametrize("budget", [16_000, None])
@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_what_leaves_the_device_for_a_restore_is_no_row_that_it_counts_on(
    kind: str, budget: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Three conversations in turn, larger than the context; idle moments copy rows to RAM that stay
    on the device.
    """
    rng = np.random.default_rng(5 if budget else 6)
    engine = engine_of(FakeBackend(kind, n_ctx=1024), n_slots=0, budget=budget)
    conversations = [[(i, 200)] for i in range(3)]
    for step in range(40):
        messages = conversations[int(rng.integers(3))]
        messages.append((1000 + step, int(rng.integers(20, 80))))
        if sum(length for _, length in messages) > 700:
            del messages[1:]
        ask(engine, chat(*messages))
        while engine.prefix_cache.device.copies.copy_one():
            pass
    assert engine.backend.n_loaded > 1000
    assert not [record for record in caplog.records if "no room for the snapshot" in record.message]
    check_invariants(engine.prefix_cache.cache)

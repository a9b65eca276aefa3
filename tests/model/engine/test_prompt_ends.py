"""A repeated prompt evaluates no token, and its reply is bit-identical."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest

from pyctl.cache.prompt_ends import MAX_ENDS
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import PromptMatch
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.sampling import Sampling
from pyctl.llama.loader import Loaded
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.drive import AtOnce, Reply, ask, cold, collect, empty, request, run_all


def prompt_of(seed: int, n: int, boundaries: tuple[int, ...] = ()) -> Prompt:
    return Prompt.from_ids(np.random.default_rng(seed).integers(1, 60, n), boundaries)


def n_evaluated(reply: Reply) -> int:
    assert reply.done is not None, reply.error
    assert reply.done.timings.n_evaluated == reply.done.stats.n_evaluated
    assert reply.done.timings.n_cached == reply.done.stats.n_prompt - reply.done.stats.n_evaluated
    return reply.done.stats.n_evaluated


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["hybrid", "opaque", "attention"])
@pytest.mark.parametrize("can_hold", [False, True])
def test_an_equal_prompt_evaluates_nothing(kind: str, exact: bool, can_hold: bool) -> None:
    """A prompt that was evaluated before, live or after another one, is answered from its kept
    output with the cold run's tokens; a longer prompt does not take that output for its own.
    """
    backend = FakeBackend(kind, can_hold=can_hold and kind != "opaque")
    settings = EngineSettings(exact=exact)
    prompt = prompt_of(1, 300, (120, 290))
    other = prompt_of(2, 200)
    expected = cold(backend, prompt, 20).tokens
    engine = Engine(backend, RamCache(0, None), settings)
    assert ask(engine, prompt, 20).tokens == expected
    again = ask(engine, prompt, 20)
    assert n_evaluated(again) == 0
    assert again.tokens == expected
    ask(engine, other)
    back = ask(engine, prompt, 20)
    assert n_evaluated(back) == 0
    assert back.tokens == expected
    assert ask(engine, prompt, 0).tokens == []
    longer = Prompt.from_ids([*prompt.tokens.tolist(), 5, 6, 7], (120, 290))
    exactly = cold(backend, longer, 12).tokens if exact else None
    engine = Engine(backend, RamCache(0, None), settings)
    ask(engine, prompt, 20)
    found = ask(engine, longer, 12)
    assert n_evaluated(found) >= 3, "another prompt has an end of its own"
    assert exactly is None or found.tokens == exactly


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "name", ["hybrid", "opaque", "attention", "tiny-hybrid", "tiny-gemma3", "tiny-dense"]
)
def test_raw_text_that_grows_evaluates_what_is_new(
    name: str, exact: bool, open_model: Callable[..., Loaded]
) -> None:
    """Also where its last token became another one: where a state is needed, the second time."""
    backend = open_model(name).backend if name.startswith("tiny") else FakeBackend(name)  # type: ignore[arg-type]
    settings = EngineSettings(exact=exact)
    tokens = prompt_of(70, 400).tokens.tolist()
    prompts = [
        tokens[:230],
        tokens[:237],
        [*tokens[:236], 1, 2],
        [*tokens[:237], 1, 2],
        tokens[:243],
    ]
    prompts.append([*tokens[:236], 1, 3, 4])
    expected = [cold(backend, Prompt.from_ids(prompt), 5, settings).tokens for prompt in prompts]
    engine = Engine(backend, RamCache(0, None), settings)
    replies = [ask(engine, Prompt.from_ids(prompt), 5) for prompt in prompts]
    if exact:
        assert [reply.tokens for reply in replies] == expected
        assert sum(map(n_evaluated, replies[1:])) > 100
    else:
        parted = 2 if backend.memory.shape.cut_anywhere else 8
        assert [n_evaluated(reply) for reply in replies[1:]] == [7, parted, 2, 6, 3]
    empty(backend)


def test_another_prompt_of_the_same_tokens_has_other_batches() -> None:
    """The end of the same tokens with other boundaries is not taken for exact, since a cold run
    evaluates other batches.
    """
    backend = FakeBackend()
    plain = prompt_of(3, 200)
    marked = prompt_of(3, 200, (50, 110))
    expected = cold(backend, marked, 12).tokens
    engine = Engine(backend, RamCache(0, None), EngineSettings(exact=True))
    ask(engine, plain, 12)
    found = ask(engine, marked, 12)
    assert n_evaluated(found) > 0
    assert found.tokens == expected


def test_choices_of_one_prompt_evaluate_it_once() -> None:
    """Though the cache is full of what is worth more."""
    backend = FakeBackend(n_ctx=4096, n_seqs=3)
    prompt = prompt_of(4, 300, (100, 290))
    cache = RamCache(0, None)
    engine = Engine(backend, cache, EngineSettings())
    ask(engine, prompt_of(5, 900))
    cache.budget.limit = cache.n_bytes
    handles = [RequestHandle(request(prompt, 6)) for _ in range(5)]
    run_all(engine, *handles)
    replies = [collect(handle) for handle in handles]
    assert len({tuple(reply.tokens) for reply in replies}) == 1
    assert [n_evaluated(reply) for reply in replies] == [300, 0, 0, 0, 0]
    assert cache.n_bytes <= cache.budget.limit


def test_a_full_cache_gives_up_nothing_for_an_end_that_nobody_may_want() -> None:
    backend = FakeBackend(n_ctx=4096)
    cache = RamCache(0, None)
    engine = Engine(backend, cache, EngineSettings())
    first = prompt_of(6, 300, (100, 290))
    ask(engine, first)
    assert len(cache.prompt_ends) == 1
    names = {snapshot.prefix.name for snapshot in cache.snapshots()}
    cache.budget.limit = cache.n_bytes
    ask(engine, prompt_of(7, 300, (100, 290)))
    assert PromptMatch(first.tokens).prefix(300) not in {end.prefix for end in cache.prompt_ends}, (
        "it is the first to leave"
    )
    assert cache.n_bytes <= cache.budget.limit
    cache.budget.limit = 0
    assert names


def test_an_end_far_behind_the_last_batch_takes_room_that_others_have() -> None:
    """The end of a raw prompt, which is asked again for another reply, evicts others when it is
    added.
    """
    backend = FakeBackend(n_ctx=4096, n_ubatch=256, batch_cost=480)
    cache = RamCache(0, None)
    engine = Engine(backend, cache, EngineSettings(min_step=0))
    for seed in range(8, 12):
        ask(engine, prompt_of(seed, 400, (200,)))
    cache.prompt_ends.clear()
    cache.budget.limit = cache.n_bytes
    raw = prompt_of(12, 400, (200,))
    ask(engine, raw)
    assert cache.n_bytes <= cache.budget.limit
    assert n_evaluated(ask(engine, raw)) == 0


def test_a_snapshot_that_is_dropped_takes_the_ends_behind_it_along() -> None:
    """An end needs the snapshot below it, so dropping that snapshot drops the end; dropping an end
    by its name touches no other.
    """
    engine = Engine(FakeBackend(), RamCache(0, None), EngineSettings(min_step=0))
    admin = EngineAdmin(AtOnce(), engine)  # type: ignore[arg-type]
    cache = engine.prefix_cache.cache
    for seed in (30, 31):
        ask(engine, prompt_of(seed, 300, (100, 290)))
    assert admin.view().result().n_ends == 2
    one, other = list(cache.prompt_ends)
    assert admin.drop(one.prefix.name), "by the name that timings gave it"
    assert list(cache.prompt_ends) == [other]
    stem = next(
        each
        for each in cache.snapshots()
        if PromptMatch(other.last_tokens(other.n)).shared(each) == each.n
    )
    assert admin.drop(stem.prefix.name)
    assert admin.view().result().n_ends == 0
    assert not admin.drop(one.prefix.name)


def test_no_more_than_the_ends_of_the_last_prompts_are_kept() -> None:
    cache = RamCache(0, None)
    engine = Engine(FakeBackend(), cache, EngineSettings())
    for seed in range(40, 52):
        ask(engine, prompt_of(seed, 150, (100, 140)))
    assert len(cache.prompt_ends) == MAX_ENDS
    assert n_evaluated(ask(engine, prompt_of(51, 150, (100, 140)))) == 0
    assert n_evaluated(ask(engine, prompt_of(40, 150, (100, 140)))) > 0


def test_a_look_at_what_matches_changes_no_order_and_a_use_does() -> None:
    cache = RamCache(0, None)
    engine = Engine(FakeBackend(), cache, EngineSettings())
    prompts = [prompt_of(seed, 150, (100, 140)) for seed in (60, 61, 62)]
    for prompt in prompts:
        ask(engine, prompt)
    before = list(cache.prompt_ends)
    assert engine.prefix_cache.prefetch.n_ready(prompts[0], [150], engine.sequences[0]) == 150
    assert list(cache.prompt_ends) == before
    assert n_evaluated(ask(engine, prompts[0])) == 0
    assert list(cache.prompt_ends) == [*before[1:], before[0]]


def test_rows_that_leave_the_device_take_the_ends_with_them() -> None:
    """Without a budget for copies, a conversation whose cells are needed loses its rows, and every
    end that builds on them is dropped.
    """
    backend = FakeBackend(n_ctx=700, can_hold=True)
    cache = RamCache(0, 40_000)
    engine = Engine(backend, cache, EngineSettings())
    prompts = [prompt_of(seed, 300, (100, 290)) for seed in range(24, 28)]
    expected = [cold(FakeBackend(n_ctx=700), prompt, 10).tokens for prompt in prompts]
    for _ in range(2):
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert ask(engine, prompt, 10).tokens == tokens
            for end in list(cache.prompt_ends):
                assert all(each.held is not None or each.rows.size for each in end.chain)
            assert cache.n_bytes <= 40_000


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-dense"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(seed=7, temperature=1.5),
        Sampling(seed=7, temperature=1.5, samplers=("temperature",)),
        Sampling(seed=7, temperature=1.2, post_sampling_probs=True),
        Sampling(
            seed=3, temperature=1.0, grammar='root ::= ("a" | "b" | "c")+', grammar_kind="gbnf"
        ),
        Sampling(seed=5, mirostat=2),
    ],
    ids=["greedy", "top-k", "all", "probabilities", "grammar", "mirostat"],
)
def test_a_model_samples_as_it_did(
    name: str, sampling: Sampling, open_model: Callable[..., Loaded]
) -> None:
    """A repeated request samples from the kept outputs by the same random numbers, with the same
    probabilities.
    """
    loaded = open_model(name)
    backend = loaded.backend
    prompt = Prompt(
        np.array(loaded.tokenizer.tokenize("One two three four. " * 12), np.int32), (60,)
    )
    engine = Engine(backend, RamCache(0, None), EngineSettings(exact=True))
    fields = {"sampling": sampling, "n_probs": 4}
    handles = [RequestHandle(request(prompt, 12, **fields)) for _ in range(3)]
    seen = []
    for handle in handles:
        run_all(engine, handle)
        events = handle.drain()
        seen.append([(e.tokens, e.probs) for e in events if hasattr(e, "probs")])
        handle.stats = next(e.stats for e in events if hasattr(e, "stats"))  # type: ignore[attr-defined]
        ask(engine, Prompt(prompt.tokens[::-1].copy()), 3)
    assert [handle.stats.n_evaluated for handle in handles] == [len(prompt), 0, 0]  # type: ignore[attr-defined]
    assert seen[0]
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]
    empty(backend)


def test_an_end_that_cannot_be_kept_leaves_nothing_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = FakeBackend(can_hold=True)
    cache = RamCache(0, None)
    engine = Engine(backend, cache, EngineSettings())

    monkeypatch.setattr(backend, "output", Mock(side_effect=MemoryError))
    assert ask(engine, prompt_of(20, 300), 4).done is not None
    assert not len(cache.prompt_ends)
    ask(engine, prompt_of(21, 50), 4)
    assert backend.memory.cells.n_held_cells >= 256, (
        "no sequence has the cells of its snapshots now"
    )
    cache.clear()
    assert backend.memory.cells.n_held_cells == 0

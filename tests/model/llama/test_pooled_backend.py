"""A backend with rows in a pool is bit-identical to one with rows in llama.cpp's context."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyctl.cache.device_limits import DeviceLimits
from pyctl.cache.ram import RamCache
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.errors import ModelError, PreemptedError, StateError
from pyctl.llama import llama_backend
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.draft_settings import FEATURE_TYPES, DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.prompt import as_tokens
from tests.effort import examples
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ask, chat, cold, tier_on

N_CTX = 2048
"""Stands for <|im_start|>: every boundary is where one of these is."""

Opened = Callable[..., Loaded]


@pytest.fixture
def opened(open_model: Opened, model_path: Callable[[str], Path]) -> Opened:
    """opened("tiny-hybrid", 1024) -> the model with a pool of so many tokens, 0 for none; drafts by
    name.
    """

    def get(name: str, n_tokens: int, *types: str, type_kv: str = "f16") -> Loaded:
        files = [
            str(model_path(each.replace("draft", "tiny-hybrid")))
            for each in types
            if each in FEATURE_TYPES
        ]
        drafts = DraftSettings(draft_types=types, draft_path="".join(files))
        pool = PoolSettings(n_tokens)
        return open_model(
            name, n_ctx=N_CTX, type_k=type_kv, type_v=type_kv, drafts=drafts, pool=pool
        )

    return get


def engine_of(backend: LlamaBackend, budget: int | None = None, **fields: object) -> Engine:
    return Engine(backend, RamCache(32, budget), EngineSettings(exact=True, **fields))


@pytest.mark.parametrize("type_kv", ["f16", "q8_0"])
@pytest.mark.parametrize(
    ("name", "n_layers"), [("tiny-hybrid", 2), ("tiny-moe", 2), ("tiny-dense", 4)]
)
def test_every_number_of_layers_on_the_device_gives_the_same_bits(
    opened: Opened, name: str, n_layers: int, type_kv: str
) -> None:
    """However many layers are resident, logits, layout and fingerprint are those of a context
    without a pool, so snapshots move freely between the two.
    """
    tokens = as_tokens(np.random.default_rng(1).integers(0, 250, 600))

    def logits(backend: LlamaBackend) -> list[bytes]:
        found = []
        for first, last in ((0, 64), (64, 128), (128, 150), *((i, i + 1) for i in range(150, 180))):
            backend.evaluate(0, tokens[first:last], first)
            found.append(backend.logits(0).tobytes())
        backend.memory.rewind(0, 0)
        return found

    plain = opened(name, 0, type_kv=type_kv)
    expected = logits(plain.backend)
    for n in range(1, n_layers + 1):
        pooled = opened(name, n * N_CTX // n_layers, type_kv=type_kv)
        pool = pooled.info.pool
        backend = pooled.backend
        assert pool is not None
        assert pool.n_resident == (n_layers if n == n_layers else max(n - 2, 0))
        assert logits(backend) == expected
        assert (backend.memory.store.streamed_bytes > 0) == (pool.n_streamed > 0)
        assert backend.facts.n_ctx == N_CTX
        assert backend.facts.n_cells == N_CTX
        assert backend.memory.layout == plain.backend.memory.layout
        assert pooled.info.fingerprint == plain.info.fingerprint


messages = st.tuples(st.integers(0, 9), st.sampled_from([3, 40, 70, 130, 300]))
asked = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["extend", "edit", "again"]), messages), max_size=7
)


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-dense"])
@settings(
    max_examples=examples(8),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    asked=asked,
    n_tokens=st.sampled_from([N_CTX // 2, N_CTX]),
    budget=st.sampled_from([None, 400_000, 800_000]),
)
def test_conversations_that_take_turns(
    opened: Opened,
    name: str,
    asked: list[tuple[int, str, tuple[int, int]]],
    n_tokens: int,
    budget: int | None,
) -> None:
    """Also where RAM has room for a part of them, and the pool has the rest."""
    plain = opened(name, 0).backend
    pooled = opened(name, n_tokens).backend
    engine = engine_of(pooled, budget, device=DeviceLimits(piece_bytes=2**16))
    talks = [[(10, 200), (i, 50)] for i in range(4)]
    for number, how, message in asked:
        talk = talks[number]
        if how == "extend" and sum(length for _, length in talk) < 1200:
            talk.append(message)
        elif how == "edit":
            talk[-1] = message
        prompt = chat(*talk)
        reply = ask(engine, prompt, 4)
        assert reply.error is None
        assert reply.tokens == cold(plain, prompt, 4).tokens
        check_invariants(engine.prefix_cache.cache)
        assert engine.cells.n_used + engine.prefix_cache.device.n_cells <= pooled.facts.n_cells


@pytest.mark.parametrize("sizes", [(0, N_CTX // 2), (N_CTX // 2, 0), (N_CTX, N_CTX // 2)])
def test_files_go_from_one_kind_of_server_to_the_other(
    opened: Opened, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    prompt = chat((1, 300), (2, 240))
    longer = chat((1, 300), (2, 240), (3, 90))
    replies = []
    expected = [cold(opened("tiny-hybrid", 0).backend, each).tokens for each in (prompt, longer)]
    for n_tokens, asked in zip(sizes, (prompt, longer), strict=True):
        loaded = opened("tiny-hybrid", n_tokens)
        sizes = loaded.backend.memory.shape.sizes
        tier = tier_on(tmp_path, loaded.info.fingerprint, sizes=sizes)
        engine = Engine(loaded.backend, RamCache(32, None), EngineSettings(exact=True), tier)
        replies.append(ask(engine, asked))
        assert engine.close(StateError("the end"))
    assert [reply.tokens for reply in replies] == expected
    assert replies[1].done.stats.source == "disk"
    assert replies[1].done.stats.n_cached == prompt.end


@pytest.mark.parametrize(
    "types",
    [("draft-mtp",), ("cache",), ("draft-mtp", "cache"), *((each,) for each in FEATURE_TYPES)],
)
def test_drafts_are_taken_back_as_without(opened: Opened, types: tuple[str, ...]) -> None:
    """Short ones by planes, long ones by going back to a mark."""
    tokens = as_tokens(np.random.default_rng(1).integers(0, 250, 100))
    found = []
    for n_tokens in (0, N_CTX // 2, N_CTX):
        backend = opened("tiny-hybrid-nextn", n_tokens, *types).backend
        n = 100
        seen = []
        backend.evaluate(0, tokens[:64], 0)
        backend.evaluate(0, tokens[64:], 64)
        for n_drafts, n_right in ((3, 0), (3, 2), (20, 5), (20, 19), (3, 3)):
            if n_drafts <= backend.facts.max_drafts:
                item = SequenceTokens(0, tuple(range(30, 31 + n_drafts)), n)
                seen.append(backend.draft([item], 3))
                backend.decode([item])
                seen.append([backend.logits(i).tobytes() for i in range(n_drafts + 1)])
                n = backend.memory.rollback(0, n + 1 + n_right)
        found.append((seen, n, backend.facts.max_drafts, backend.facts.n_rollback))
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) >= 2 * 3


def test_sleep_wakes_up_to_an_empty_pool(opened: Opened) -> None:
    backend = opened("tiny-hybrid", N_CTX // 2).backend
    prompt = chat((1, 300))
    engine = engine_of(backend)
    first = ask(engine, prompt)
    engine.sleep()
    engine.wake()
    again = ask(engine, prompt)
    assert again.tokens == first.tokens
    assert again.done.stats.source == "ram"
    assert again.done.stats.n_cached == len(prompt)


@pytest.mark.parametrize("n_beats", [0, 20, 60])
def test_a_batch_that_is_broken_off_leaves_nothing(opened: Opened, n_beats: int) -> None:
    """Before it begins, and in the middle of its graph."""
    tokens = as_tokens(np.random.default_rng(5).integers(0, 250, 128))
    backend = opened("tiny-hybrid", N_CTX // 2).backend
    backend.evaluate(0, tokens[:64], 0)
    state = backend.memory.save_state(0, 64)

    def again() -> bytes:
        backend.memory.rewind(0, 64)
        backend.memory.restore(0, 64, (), state)
        backend.evaluate(0, tokens[64:], 64)
        return backend.logits(0).tobytes()

    def break_off() -> None:
        while backend.control.heartbeat < wanted:
            pass
        backend.control.preempt()

    expected = again()
    assert backend.control.can_preempt
    backend.control.allow_preemption(True)
    wanted = backend.control.heartbeat + n_beats
    other = threading.Thread(target=break_off)
    other.start()
    try:
        with pytest.raises(PreemptedError):
            [again() for _ in range(1000)]  # until it comes in time
    finally:
        other.join()
        backend.control.preempt(False)
        backend.control.allow_preemption(False)
    assert again() == expected


def test_a_context_may_be_smaller_than_the_trial(model_path: Callable[[str], Path]) -> None:
    model = ModelSettings(path=str(model_path("tiny-hybrid")), n_ctx=100, n_threads=1)
    loaded = load(model, pool=PoolSettings(128))
    assert loaded.info.n_ctx == 256
    assert loaded.info.pool.n_resident == 0
    assert loaded.backend.facts.n_ubatch == 512
    loaded.backend.facts = replace(loaded.backend.facts, is_async=True)
    Engine(
        loaded.backend, RamCache(1, 0), EngineSettings()
    ).warm_up()  # no more than there is room for
    assert loaded.backend.memory.cells.n_tokens(0) == 0
    loaded.backend.unload()


def test_another_release_of_llama_cpp_is_found_out(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference in a single bit of one logit refuses the pool."""
    trial = llama_backend.pool_trial
    n_trials = 0

    def changed(*given: object, **named: object) -> list[np.ndarray]:
        nonlocal n_trials
        n_trials += 1
        found = trial(*given, **named)
        if n_trials == 2:
            found[-1].view(np.uint32)[0] ^= 1
        return found

    monkeypatch.setattr(llama_backend, "pool_trial", changed)
    model = ModelSettings(path=str(model_path("tiny-hybrid")), n_ctx=N_CTX, n_threads=1)
    with pytest.raises(
        ModelError, match=r"llama.cpp .* gives other results with --kv-pool than without"
    ):
        load(model, pool=PoolSettings(N_CTX))

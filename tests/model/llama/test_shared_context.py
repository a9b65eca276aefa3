"""Several sequences of a tiny model in one context: idle ones are parked, replies that outgrow it
are suspended.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.sampling import Sampling
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import Prompt
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import Reply, cold, collect, empty, run_all
from tests.unit.engine.test_scheduler import submit

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)


def prompt_of(seed: int, n: int) -> Prompt:
    return Prompt.from_ids(np.random.default_rng(seed).integers(1, 250, n), [n // 2, n - 4])


def fresh(backend: LlamaBackend, **options: object) -> Engine:
    empty(backend)
    return Engine(backend, RamCache(32, None), EngineSettings(**options))


@pytest.mark.parametrize("shape", ["tiny-hybrid", "tiny-dense"])
def test_replies_that_outgrow_the_context_go_on_later(
    open_model: Callable[..., Loaded], shape: str
) -> None:
    """Rows that were moved yield the same bytes; only the company in a batch may change a reply,
    and it may not here.

    Two replies that differ from those alone would show that one was resumed from what it was not.
    """
    backend = open_model(shape, n_ctx=1024, n_seqs=2).backend
    prompts = [prompt_of(seed, 300) for seed in (1, 2)]
    engine = fresh(backend)
    handles = [submit(engine, prompt, -1, sampling=ENDLESS) for prompt in prompts]
    run_all(engine)
    replies: list[Reply] = [collect(handle) for handle in handles]
    assert engine.counters.n_suspended > 0
    assert [reply.error for reply in replies] == [None, None]
    assert [len(reply.tokens) for reply in replies] == [1024 - 300] * 2
    check_invariants(engine.prefix_cache.cache)
    assert engine.prefix_cache.cache.index.retained == []


def test_a_suspended_sequence_comes_back_to_the_byte(open_model: Callable[..., Loaded]) -> None:
    """A suspended sequence is restored with equal rows and an equal state, so its reply is that of
    a run that was never suspended.
    """
    backend = open_model("tiny-hybrid", n_ctx=1024, n_seqs=2).backend
    engine = fresh(backend)
    prompt = prompt_of(3, 300)
    handle = submit(engine, prompt, 60, sampling=ENDLESS)
    for _ in range(20):
        engine.step()
    (active,) = engine.running
    assert active.seq is not None
    n = active.seq.n
    rows = backend.memory.save_rows(0, 0, n).block.tobytes()
    state = backend.memory.save_state(0, n).recurrent.tobytes()
    engine.scheduler.suspend(active)
    assert engine.sequences[0].n == 0
    engine.scheduler.admit()
    assert engine.running == [active]
    assert active.suspended_snapshot is None
    seq = active.seq.id
    assert backend.memory.save_rows(seq, 0, n).block.tobytes() == rows
    assert backend.memory.save_state(seq, n).recurrent.tobytes() == state
    run_all(engine)
    assert collect(handle).tokens == cold(backend, prompt, 60, sampling=ENDLESS).tokens


@pytest.mark.parametrize(
    ("settings", "n_ctx", "n_cells"),
    [
        ({}, 2048, 2048),
        ({"kv_unified": False}, 512, 2048),
        ({"kv_unified": False, "n_ctx": 1000}, 256, 1024),
        ({"n_ctx_per_seq": 700}, 700, 2048),
    ],
)
def test_what_one_client_may_send(
    model_path: Callable[[str], Path], settings: dict[str, object], n_ctx: int, n_cells: int
) -> None:
    chosen = {"n_ctx": 2048, "n_seqs": 4, "n_threads": 1, "n_ubatch": 64, **settings}
    loaded = load(ModelSettings(path=str(model_path("tiny-hybrid")), **chosen))  # type: ignore[arg-type]
    assert loaded.info.n_ctx == n_ctx
    assert loaded.backend.facts.n_ctx == n_ctx
    assert loaded.backend.facts.n_cells == n_cells
    loaded.backend.unload()

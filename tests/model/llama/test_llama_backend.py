"""The backend on llama.cpp: vocabulary, samplers, batches, and memories that have no rows to
move.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pyctl.cache.ram import RamCache
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.sampling import Sampling
from pyctl.errors import EngineError, ModelError, OutOfCellsError, RequestError, UnavailableError
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import Prompt, as_tokens
from tests.unit.engine.drive import ask
from tests.waiting import until


@pytest.fixture
def hybrid(open_model: Callable[..., Loaded]) -> Iterator[Loaded]:
    loaded = open_model("tiny-hybrid")
    loaded.backend.memory.clear(0)
    yield loaded
    loaded.backend.memory.clear(0)


def sampled(loaded: Loaded, sampling: Sampling, n: int = 24) -> list[int]:
    prompt = Prompt(as_tokens(loaded.tokenizer.tokenize("The quick brown fox")))
    return ask(
        Engine(loaded.backend, RamCache(0, 0), EngineSettings()), prompt, n, sampling=sampling
    ).tokens


def test_seeds_repeat_and_differ(hybrid: Loaded) -> None:
    first = sampled(hybrid, Sampling(seed=1, temperature=1.5, ignore_eos=True))
    assert first == sampled(hybrid, Sampling(seed=1, temperature=1.5, ignore_eos=True))
    assert first != sampled(hybrid, Sampling(seed=2, temperature=1.5, ignore_eos=True))


def test_each_sampler_changes_what_it_should(hybrid: Loaded) -> None:
    """The extreme value of a sampler gives the reply that follows from its definition, and every
    other sampler still gives a whole reply.
    """
    greedy = sampled(hybrid, Sampling(temperature=0.0, ignore_eos=True))
    assert sampled(hybrid, Sampling(top_k=1, seed=3, ignore_eos=True)) == greedy
    assert sampled(hybrid, Sampling(top_p=1e-6, seed=3, ignore_eos=True)) == greedy
    assert sampled(hybrid, Sampling(min_p=1.0, seed=3, ignore_eos=True)) == greedy
    forbidden = sampled(
        hybrid, Sampling(temperature=0.0, logit_bias=((greedy[0], float("-inf")),), ignore_eos=True)
    )
    assert greedy[0] not in forbidden
    wanted = sampled(hybrid, Sampling(temperature=0.0, logit_bias=((65, 1000.0),), ignore_eos=True))
    assert set(wanted) == {65}
    penalised = sampled(hybrid, Sampling(temperature=0.0, frequency_penalty=100.0, ignore_eos=True))
    assert len(set(penalised)) == len(penalised), "a token that was used once is out"
    digits = sampled(hybrid, Sampling(temperature=0.0, grammar="root ::= [0-9]+", ignore_eos=True))
    assert hybrid.tokenizer.detokenize(digits).decode().isdigit()
    for extra in (
        {"mirostat": 1},
        {"mirostat": 2},
        {"dry_multiplier": 0.8},
        {"xtc_probability": 0.9},
        {"typical_p": 0.5},
        {"top_n_sigma": 1.0},
        {"repeat_penalty": 1.3},
        {"dynatemp_range": 0.4},
        {"samplers": ("top_k", "temperature")},
    ):
        assert len(sampled(hybrid, Sampling(seed=1, ignore_eos=True, **extra))) == 24, extra


def test_bad_sampling_is_the_clients_fault(hybrid: Loaded) -> None:
    prompt = Prompt(as_tokens([65, 66]))
    engine = Engine(hybrid.backend, RamCache(0, 0), EngineSettings())
    for sampling in (Sampling(grammar="root ::= ["), Sampling(logit_bias=((10**6, 1.0),))):
        assert isinstance(ask(engine, prompt, sampling=sampling).error, RequestError)
    assert ask(engine, prompt).error is None
    with pytest.raises(RequestError, match="unknown sampler"):
        Sampling(samplers=("top_k", "nonsense"))
    with pytest.raises(RequestError, match="repeat_penalty"):
        Sampling(repeat_penalty=0.0)


def test_probabilities_sum_to_one_and_name_the_best(hybrid: Loaded) -> None:
    backend = hybrid.backend
    backend.evaluate(0, as_tokens([65, 66, 67]), 0)
    logits = backend.logits(0)
    top = backend.top_tokens(0, 70, backend.tokenizer.n_vocab)
    assert top[0][0] == 70
    assert abs(sum(np.exp(logprob) for _, logprob in top[1:]) - 1.0) < 1e-6
    assert [token for token, _ in top[1:4]] == np.argsort(-logits, kind="stable")[:3].tolist()


def test_batches_that_do_not_fit_are_refused(open_model: Callable[..., Loaded]) -> None:
    backend = open_model("tiny-hybrid", n_ctx=256).backend
    with pytest.raises(EngineError, match="larger than 64"):
        backend.evaluate(0, as_tokens(range(65)), 0)
    for start in range(0, 256, 64):
        backend.evaluate(0, as_tokens(range(64)), start)
    with pytest.raises(OutOfCellsError):
        backend.decode([SequenceTokens(0, (1,), 256)])
    backend.memory.clear(0)
    backend.evaluate(0, as_tokens(range(64)), 0)
    backend.memory.clear(0)


def test_penalties_over_all_tokens_take_no_more_memory_than_the_context(hybrid: Loaded) -> None:
    fields = {"seed": 1, "ignore_eos": True, "repeat_penalty": 1.3, "dry_multiplier": 0.8}
    replies = [
        sampled(hybrid, Sampling(repeat_last_n=n, dry_penalty_last_n=n, **fields))
        for n in (-1, 4096, 2**31 - 1, 0)
    ]
    assert replies[0] == replies[1] == replies[2] != replies[3]


def test_closed_and_opened_again_it_is_the_same(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """A model that slept answers from its RAM cache as before; a file that has changed meanwhile is
    refused, since cached rows would belong to other weights.
    """
    path = tmp_path / "model.gguf"
    shutil.copy(model_path("tiny-hybrid"), path)
    settings = ModelSettings(
        path=str(path), n_ctx=512, n_ubatch=64, n_threads=1, embeddings=True, pooling="mean"
    )
    loaded = load(settings)
    backend = loaded.backend
    prompt = Prompt.from_ids(range(120), [100])
    engine = Engine(backend, RamCache(8, None), EngineSettings(exact=True))
    first = ask(engine, prompt)
    vector = backend.embed(as_tokens([1, 2, 3]))
    engine.sleep()
    assert loaded.tokenizer.tokenize("hi")
    assert loaded.tokenizer.special_tokens()
    engine.wake()
    warm = ask(engine, prompt)
    assert warm.done.stats.source == "ram"
    assert warm.done.stats.n_cached == 120
    assert warm.tokens == first.tokens
    assert (backend.embed(as_tokens([1, 2, 3])) == vector).all()
    engine.sleep()
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match="has changed"):
        engine.wake()
    assert engine.asleep
    path.unlink()
    with pytest.raises(ModelError, match="cannot read"):
        engine.wake()


def test_loading_can_be_stopped(model_path: Callable[[str], Path]) -> None:
    with pytest.raises(UnavailableError):
        load(ModelSettings(path=str(model_path("tiny-hybrid")), n_ctx=512), lambda fraction: False)


def test_an_evaluation_is_interrupted_and_counts_its_progress(
    model_path: Callable[[str], Path],
) -> None:
    """An interrupt ends a running evaluation before its last node and refuses later ones, and the
    heartbeat moves with each node: the stall watch depends on it.
    """
    settings = ModelSettings(
        path=str(model_path("tiny-hybrid")), n_ctx=4096, n_ubatch=2048, n_threads=1
    )
    backend = load(settings).backend
    try:
        before = backend.control.heartbeat
        backend.evaluate(0, as_tokens([5] * 2048), 0)
        n_nodes = backend.control.heartbeat - before
        assert n_nodes > 20
        first = backend.control.heartbeat
        began = [0]

        def evaluate() -> None:
            backend.memory.clear(0)
            began[0] = backend.control.heartbeat
            backend.evaluate(0, as_tokens([5] * 2048), 0)

        # On another thread: the evaluation holds this one, but not the interpreter.
        stopper = threading.Thread(
            target=lambda: (
                until(lambda: backend.control.heartbeat > first, every=0.0),
                backend.control.interrupt(),
            )
        )
        stopper.start()
        with pytest.raises(UnavailableError, match="stopped"):
            [evaluate() for _ in range(1000)]  # until it comes in time
        stopper.join()
        assert backend.control.heartbeat - began[0] < n_nodes
        backend.memory.clear(0)
        with pytest.raises(UnavailableError, match="stopped"):
            backend.evaluate(0, as_tokens([5]), 0)
    finally:
        backend.unload()

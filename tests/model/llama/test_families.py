"""Every memory that llama.cpp has: a restored sequence goes on with the bits of a cold run, or nothing is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyctl.cache.places import ANYWHERE, NOWHERE, ResumePlaces
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Rows
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.request import Failed, Piece
from pyctl.errors import StateError
from pyctl.llama import LlamaBackend, Loaded, load, memory_check
from pyctl.llama.context_memory import ContextMemory
from pyctl.prompt import Prompt, as_tokens
from tests.unit.engine.drive import chat, request, tier_on
from tools.generator.families import FAMILIES, WINDOW, Family, cached_family

RING = 256
"""Cells of a ring for one window and one batch of 128 tokens, padded as llama.cpp does."""

RINGS = ResumePlaces(WINDOW, RING)
CHUNKS = ResumePlaces(8192, 0)
"""Those of llama4 have a size of their own."""

PLACES = {name: RINGS for name, family in FAMILIES.items() if family.sliding} | {"tiny-llama4": CHUNKS}

OPENING = (1, 90)
CONVERSATION = [OPENING, (2, 150), (3, 40), (4, 300), (5, 60), (6, 200)]
PROMPTS = {
    "first": chat(OPENING, (2, 150)),
    "goes on": chat(*CONVERSATION[:4]),
    "another": chat((9, 400), (10, 120)),
    "long": chat(*CONVERSATION),
    "asked again": chat(*CONVERSATION),
    "edited": chat(*CONVERSATION[:3], (7, 280), *CONVERSATION[4:]),
    "branched": chat(*CONVERSATION[:5], (8, 170)),
    "cut back": chat(*CONVERSATION[:4]),
    "short": chat(OPENING),
}
AFTER_RESTART = ("long", "edited", "first", "another", "branched")


@pytest.fixture(scope="module")
def family_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    directory = tmp_path_factory.mktemp("families")
    return lambda family: cached_family(family, directory)


@pytest.fixture
def open_family(family_path: Callable[[Family], Path]) -> Iterator[Callable[..., Loaded]]:
    """open_family("tiny-gemma3", n_seqs=2, ...) -> a loaded model, closed after the test."""
    opened: list[Loaded] = []

    def get(name: str, *, keep_vocabulary: bool = False, **settings: Any) -> Loaded:
        chosen = {"n_ctx": 2048, "n_ubatch": 128, "n_threads": 1, "n_seqs": 1, **settings}
        path = str(family_path(FAMILIES[name]))
        opened.append(load(ModelSettings(path=path, **chosen), keep_vocabulary=keep_vocabulary))
        return opened[-1]

    yield get
    for loaded in opened:
        loaded.backend.unload()


def probabilities(engine: Engine, prompt: Prompt, **fields: object) -> tuple[list[object], int]:
    """The five best log probabilities of each of six tokens, and how much of the prompt was cached."""
    handle = RequestHandle(request(prompt, 6, n_probs=5, **fields))
    engine.submit(handle)
    while engine.step():
        pass
    events = list(handle.drain())
    assert not [event for event in events if isinstance(event, Failed)]
    return [event.probs for event in events if isinstance(event, Piece)], events[-1].stats.n_cached


def cold_replies(backend: LlamaBackend) -> dict[str, list[object]]:
    engine = Engine(backend, RamCache(0, 0), EngineSettings(exact=True))
    replies = {}
    for name, prompt in PROMPTS.items():
        backend.memory.clear(0)
        engine.prefix_cache.forget(engine.sequences[0])
        replies[name], cached = probabilities(engine, prompt, cache_prompt=False)
        assert cached == 0
    backend.memory.clear(0)
    return replies


def engine_on(directory: Path, backend: LlamaBackend) -> Engine:
    tier = tier_on(directory, backend.memory.identity, min_tokens=32)
    backend.memory.release_all()
    backend.memory.clear(0)
    return Engine(backend, RamCache(0, None), EngineSettings(exact=True), tier)


SMOKE = [pytest.param(name, marks=[pytest.mark.smoke] * (name == "tiny-lfm2")) for name in FAMILIES]


@pytest.mark.parametrize("name", SMOKE)
def test_replies_are_those_of_a_cold_run(name: str, open_family: Callable[..., Loaded], tmp_path: Path) -> None:
    loaded = open_family(name)
    backend, family = loaded.backend, FAMILIES[name]
    assert backend.memory.kv.type == family.memory
    assert backend.memory.shape.places == PLACES.get(name, ANYWHERE)
    expected = cold_replies(backend)
    assert len({str(reply) for reply in expected.values()}) == len(expected) - 2, "two prompts are asked twice"
    shares = []
    for asked in (PROMPTS, AFTER_RESTART):
        engine = engine_on(tmp_path, backend)
        for each in asked:
            reply, cached = probabilities(engine, PROMPTS[each])
            assert reply == expected[each], f"{each}, {cached} tokens cached"
            shares.append(cached)
        assert engine.prefix_cache.close()
    assert sum(share > 0 for share in shares[: len(PROMPTS)]) >= (4 if family.sliding else 6), "from RAM or live"
    assert sum(share > 0 for share in shares[len(PROMPTS) :]) >= (2 if family.sliding else 5), "from disk"


@pytest.mark.parametrize("name", SMOKE)
def test_weights_without_texts_of_tokens_give_the_same_bits(name: str, open_family: Callable[..., Loaded]) -> None:
    """Those of a model whose vocabulary stays while it is unloaded; it comes back to the same bits, too."""
    tokens = as_tokens(np.random.default_rng(3).integers(1, 200, 100))
    found = []
    for keeps in (False, True):
        loaded = open_family(name, keep_vocabulary=keeps)
        for _ in range(1 + keeps):
            loaded.backend.evaluate(0, tokens, 0)
            logits = loaded.backend.logits(0)
            found.append((logits.tobytes(), loaded.info.fingerprint, loaded.tokenizer.special_tokens()))
            if keeps:
                loaded.backend.unload()
                loaded.backend.load()
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["tiny-qwen4exp", "tiny-glm5-next"])
def test_a_memory_with_a_further_cache_is_no_plain_hybrid(name: str, open_family: Callable[..., Loaded]) -> None:
    loaded = open_family(name)
    assert loaded.backend.memory.kind == "opaque"
    assert loaded.info.memory == "whole sequences of llama_memory_hybrid_idx"


def test_a_window_says_where_it_is_resumed(open_family: Callable[..., Loaded]) -> None:
    text = open_family("tiny-gemma3").info.memory
    assert text.endswith("with a sliding window: resumed within 64 tokens, then every 256")
    assert open_family("tiny-gemma3", swa_full=True).backend.memory.shape.places == ResumePlaces(
        WINDOW, memory_check.TILE
    )


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-lfm2", "tiny-mamba2", "tiny-gemma3"])
def test_a_memory_that_is_not_on_the_list_is_tried(
    name: str, open_family: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "TESTED", frozenset())
    assert open_family(name).backend.memory.shape.places == PLACES.get(name, ANYWHERE)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-lfm2", "tiny-mamba2"])
def test_a_memory_that_does_not_come_back_is_not_cached(
    name: str, open_family: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows or states that lose a bit on their way, of a class that no test knows."""
    monkeypatch.setattr(memory_check, "TESTED", frozenset())
    for part in ("save_rows", "save_state"):
        monkeypatch.setattr(ContextMemory, part, losing_a_bit(getattr(ContextMemory, part)))
    backend = open_family(name, n_seqs=2).backend
    assert backend.memory.shape.places == NOWHERE
    assert backend.facts.n_ctx == 1024, "each of two sequences has its share, so that none has to make way"
    assert backend.memory_text.startswith("not cached: llama_")
    with pytest.raises(StateError, match="same bits"):
        backend.memory.save_file(0, tmp_path / "slot", np.arange(3, dtype=np.int32), ())
    engine = engine_on(tmp_path, backend)
    expected = [probabilities(engine, PROMPTS["first"], cache_prompt=False)[0] for _ in range(2)]
    for _ in range(3):
        for each in ("first", "another"):
            reply, cached = probabilities(engine, PROMPTS[each])
            assert each != "first" or reply == expected[0]
            assert cached == 0 or engine.prefix_cache.totals.n_cached["live"]
    assert not engine.prefix_cache.cache.snapshots()
    assert engine.prefix_cache.close()
    assert not engine.prefix_cache.disk.store.lengths()


def losing_a_bit(save: Callable[..., Any]) -> Callable[..., Any]:
    def damaged(*given: Any) -> Any:
        saved = save(*given)
        given[0].synchronize()
        block = saved.block if isinstance(saved, Rows) else saved.recurrent
        block[-2:] ^= 64
        return saved

    return damaged

"""Every kind of memory in llama.cpp: a restored sequence is bit-identical to a cold run, or it is not restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.families import Answer, answers, cold_answer, empty_engine
from pyctl.cache.disk_tier import DiskTier
from pyctl.cache.places import ANYWHERE, NOWHERE, ResumePlaces
from pyctl.cache.snapshot import Rows
from pyctl.engine.engine import Engine
from pyctl.engine.model_settings import ModelSettings
from pyctl.errors import StateError
from pyctl.llama import Loaded, load, memory_check
from pyctl.llama.context_memory import ContextMemory
from pyctl.prompt import Prompt
from tests.unit.engine.drive import chat
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

    def get(name: str, **settings: Any) -> Loaded:
        chosen = {"n_ctx": 2048, "n_ubatch": 128, "n_threads": 1, "n_seqs": 1, **settings}
        opened.append(load(ModelSettings(path=str(family_path(FAMILIES[name])), **chosen)))
        return opened[-1]

    yield get
    for loaded in opened:
        loaded.backend.unload()


def ask(engine: Engine, prompt: Prompt, **fields: object) -> Answer:
    return answers(engine, [prompt], **fields)[0]


SMOKE = [pytest.param(name, marks=[pytest.mark.smoke] * (name == "tiny-lfm2")) for name in FAMILIES]


@pytest.mark.parametrize("name", SMOKE)
def test_replies_are_those_of_a_cold_run(name: str, open_family: Callable[..., Loaded], tmp_path: Path) -> None:
    loaded = open_family(name)
    backend, family = loaded.backend, FAMILIES[name]
    assert backend.memory.kv.type == family.memory
    assert backend.memory.shape.places == PLACES.get(name, ANYWHERE)
    expected = {each: cold_answer(backend, prompt).best for each, prompt in PROMPTS.items()}
    assert len({str(reply) for reply in expected.values()}) == len(expected) - 2, "two prompts are asked twice"
    shares = []
    for asked in (PROMPTS, AFTER_RESTART):
        engine = empty_engine(backend, tmp_path, exact=True)
        for each in asked:
            reply = ask(engine, PROMPTS[each])
            assert reply.best == expected[each], f"{each}, {reply.n_cached} tokens cached"
            shares.append(reply.n_cached)
        assert engine.prefix_cache.close()
    assert sum(share > 0 for share in shares[: len(PROMPTS)]) >= (4 if family.sliding else 6), "from RAM or live"
    assert sum(share > 0 for share in shares[len(PROMPTS) :]) >= (2 if family.sliding else 5), "from disk"


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
    engine = empty_engine(backend, tmp_path, exact=True)
    expected = [ask(engine, PROMPTS["first"], cache_prompt=False).best for _ in range(2)]
    for _ in range(3):
        for each in ("first", "another"):
            reply = ask(engine, PROMPTS[each])
            assert each != "first" or reply.best == expected[0]
            assert reply.n_cached == 0 or engine.prefix_cache.totals.n_cached["live"]
    assert not engine.prefix_cache.cache.snapshots()
    assert engine.prefix_cache.close()
    assert isinstance(engine.prefix_cache.disk, DiskTier)
    assert not engine.prefix_cache.disk.store.lengths()


def losing_a_bit(save: Callable[..., Any]) -> Callable[..., Any]:
    def damaged(*given: Any) -> Any:
        saved = save(*given)
        given[0].synchronize()
        block = saved.block if isinstance(saved, Rows) else saved.recurrent
        block[-2:] ^= 64
        return saved

    return damaged

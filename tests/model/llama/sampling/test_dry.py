"""Sequence breakers of DRY are looked up in the vocabulary outside of the engine's thread."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.sampling import Sampling
from pyctl.llama.loader import Loaded
from pyctl.llama.sampling import sampler
from pyctl.prompt import Prompt, as_tokens
from tests.unit.engine.drive import ask


@pytest.mark.parametrize("n_last", [-1, 64])
def test_breakers_are_looked_up_before_the_engine_has_the_request(
    open_model: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch, n_last: int
) -> None:
    """Checking a request prepares the sampler's breakers once, and replies reuse it: the look-up
    walks the vocabulary and would hold up every other sequence in the engine's thread.
    """
    model = open_model("tiny-hybrid")
    prompt = Prompt(as_tokens(model.tokenizer.tokenize("ab" * 40)))
    sampling = Sampling(
        dry_multiplier=9.0,
        dry_penalty_last_n=n_last,
        dry_sequence_breakers=("x", f"y{n_last}"),
        temperature=0.0,
    )

    def say(asked: Sampling) -> list[int]:
        return list(
            ask(
                Engine(model.backend, RamCache(0, 0), EngineSettings()), prompt, 150, sampling=asked
            ).tokens
        )

    made: list[int] = []
    init = sampler.api.llama_sampler_init_dry
    monkeypatch.setattr(
        sampler.api, "llama_sampler_init_dry", lambda *args: made.append(1) or init(*args)
    )
    model.backend.vocabulary.check(sampling)
    assert len(made) == 1
    first = say(sampling)
    assert say(sampling) == first
    assert len(made) == 1
    assert first != say(Sampling(temperature=0.0))

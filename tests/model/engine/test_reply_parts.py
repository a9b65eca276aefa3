"""A reply is continued, or left, at any of its tokens: where rows suffice, nothing before that is
evaluated again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.sampling import Sampling
from pyctl.llama.loader import Loaded
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.drive import Reply, ask, empty

# tokens
PROMPT = 100
END = 170
TEXT = np.random.default_rng(8).integers(1, 60, 200).tolist()
MESSAGE = TEXT[100:112]
PLACES = {
    "a finished reply is continued": (END - 2, 1),
    "its first half is kept": (END - 40, len(MESSAGE)),
    "a continuation is dropped": (END, len(MESSAGE)),
}


def chat(engine: Engine, tokens: list[int], n: int = 0) -> Reply:
    return ask(
        engine,
        Prompt.from_ids(tokens, (41, 96)),
        n,
        sampling=Sampling(temperature=0.0, ignore_eos=True),
    )


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize(
    "name", ["attention", "tiny-dense", "tiny-dense --exact", "tiny-hybrid", "tiny-gemma3"]
)
def test_a_reply_goes_on_from_any_of_its_tokens_as_if_it_had_ended_there(
    name: str, is_live: bool, open_model: Callable[..., Loaded]
) -> None:
    """A prompt that keeps a part of a reply evaluates the new tokens only, with the logits of a run
    that ended there. Where a state is needed, or with --exact, it goes back to the batches of a
    cold run.
    """
    name, _, exact = name.partition(" ")
    backend = open_model(name).backend if name.startswith("tiny") else FakeBackend("attention")

    def after_reply(n: int) -> tuple[Engine, list[int]]:
        """Return an engine whose sequence holds ``n`` tokens of the prompt, a reply and its
        continuation; one token more.
        """
        empty(backend)
        engine = Engine(backend, RamCache(0, None), EngineSettings(exact=bool(exact)))
        tokens = TEXT[:PROMPT]
        for end in sorted({min(n + 1, END), n + 1}):
            tokens += chat(engine, tokens, end - len(tokens)).tokens
        return engine, tokens

    for place, (n, n_new) in PLACES.items():
        engine, tokens = after_reply(END - 1 if n < END else END + 30)
        if not is_live:
            chat(engine, TEXT[150:], 1)
        tokens = tokens[: n + 1] if n_new == 1 else [*tokens[:n], *MESSAGE]
        stats = chat(engine, tokens).done.stats
        output = backend.output().tobytes()
        if exact or not (backend.memory.shape.cut_anywhere or n == END):
            assert stats.n_cached <= END - 10, "the batches of a cold run"
        else:
            assert stats.n_cached == n, place
            assert stats.n_evaluated == n_new, place
            chat(after_reply(n)[0], tokens)
            assert output == backend.output().tobytes(), place
    empty(backend)

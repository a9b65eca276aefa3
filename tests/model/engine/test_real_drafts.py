"""Drafts on tiny models through the whole engine: with one width of batch, no draft changes a
reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyctl.cache.ram import RamCache
from pyctl.chat.reasoning import ReasoningLimit
from pyctl.engine.draft.speculation import ModelDrafts, Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Piece
from pyctl.engine.sampling import Sampling
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.prompt import Prompt
from tests.unit.engine.draft.guesses import Continuing, Guesses
from tests.unit.engine.drive import request, run_all
from tests.unit.engine.single_precision import F32_ROWS

N_MAX = 3
GRAMMAR = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-z]+ | [0-9]+ | "{" item ":" item "}"'
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": Sampling(temperature=0.0, ignore_eos=True)},
    "seed": {"sampling": Sampling(temperature=0.8, seed=7, ignore_eos=True), "n_probs": 3},
    "ends": {"sampling": Sampling(temperature=1.5, seed=3, top_k=0)},
    "penalties": {
        "sampling": Sampling(
            temperature=0.7, seed=1, repeat_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2
        )
    },
    "dry": {
        "sampling": Sampling(
            temperature=0.5, seed=2, dry_multiplier=0.8, dry_base=1.2, ignore_eos=True
        )
    },
    "bias": {
        "sampling": Sampling(temperature=0.9, seed=5, logit_bias=((40, 3.0), (41, float("-inf"))))
    },
    "mirostat": {"sampling": Sampling(temperature=0.9, seed=5, mirostat=2, ignore_eos=True)},
    "adaptive": {
        "sampling": Sampling(
            temperature=0.9,
            seed=5,
            samplers=("top_k", "adaptive_p"),
            adaptive_target=0.3,
            ignore_eos=True,
        )
    },
    "grammar": {"sampling": Sampling(temperature=0.8, seed=11, grammar=GRAMMAR), "n_probs": 2},
    "after sampling": {
        "sampling": Sampling(temperature=0.8, seed=4, post_sampling_probs=True, ignore_eos=True),
        "n_probs": 4,
    },
    "budget": {
        "sampling": Sampling(temperature=0.8, seed=6, ignore_eos=True),
        "reasoning": ReasoningLimit(
            9, "<", (">",), (102, 103, 104, 101), (100,), {100: b"<", 101: b">"}
        ),
    },
    "limit": {"sampling": Sampling(temperature=0.0, ignore_eos=True), "max_tokens": 18},
}


@pytest.fixture
def drafting(open_model: Callable[..., Loaded]) -> Callable[..., LlamaBackend]:
    """drafting("tiny-hybrid-nextn", n_seqs=4) -> a backend with a head, all sequences empty."""
    drafts = DraftSettings(draft_types=("draft-mtp",), n_draft=N_MAX)
    return lambda name, **fields: open_model(name, n_ctx=1024, drafts=drafts, **fields).backend


def prompt_for(backend: LlamaBackend, seed: int, n: int = 90) -> Prompt:
    tokens = np.random.default_rng(seed).integers(20, 220, n)
    return Prompt.from_ids(tokens, [n // 2, n - 4])


def reply_of(
    backend: LlamaBackend, prompt: Prompt, speculation: Speculation, fields: dict[str, Any]
) -> tuple[list[int], list[Any], str, str]:
    """Return tokens, their probabilities, text and end of a reply with all of a new context for
    itself.
    """
    backend.memory.clear(0)
    engine = Engine(backend, RamCache(8, None), EngineSettings(exact=True), speculation=speculation)
    handle = RequestHandle(request(prompt, **{"n": 60, **_named(fields)}))
    engine.submit(handle)
    run_all(engine)
    return collected(handle)


def _named(fields: dict[str, Any]) -> dict[str, Any]:
    return {"n" if name == "max_tokens" else name: value for name, value in fields.items()}


def collected(handle: RequestHandle) -> tuple[list[int], list[Any], str, str]:
    tokens: list[int] = []
    probs: list[Any] = []
    text = ""
    end = ""
    for event in handle.drain():
        assert not isinstance(event, Failed), event.error
        if isinstance(event, Piece):
            tokens += event.tokens
            probs += event.probs
            text += event.text
        elif isinstance(event, Done):
            end = f"{event.stop_type} {event.stopping_word} {event.timings.n_predicted}"
    return tokens, probs, text, end


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("name", ["tiny-hybrid-nextn", "tiny-moe-nextn"])
def test_with_one_width_no_draft_changes_a_bit(
    drafting: Callable[..., LlamaBackend], name: str, how: str
) -> None:
    """Right, wrong, missing and composed drafts in batches of one width give the tokens,
    probabilities, text and end of a run without drafts, for every sampler.
    """
    backend = drafting(name)
    fields = SAMPLINGS[how]
    prompt = prompt_for(
        backend, seed=len(how), n=230 if how == "seed" else 90
    )  # past 256 cells, or not
    expected = reply_of(backend, prompt, Speculation([Guesses({}, 1)], width=N_MAX), fields)
    assert len(expected[0]) > 3 or how in ("ends", "grammar")
    assert len(expected[1]) == (len(expected[0]) if "n_probs" in fields else 0)
    known = {prompt: expected[0]}
    for wrong, silent in ((0.0, 0.0), (1.0, 0.0), (0.3, 0.3)):
        speculation = Speculation([Guesses(known, N_MAX, wrong, silent)], width=N_MAX)
        assert reply_of(backend, prompt, speculation, fields) == expected
    head = Speculation([Guesses(known, N_MAX, 0.2, 0.7)], ModelDrafts(backend, N_MAX), width=N_MAX)
    assert reply_of(backend, prompt, head, fields) == expected
    composed = Speculation([Continuing(known, 2, 0.2, 0.5)], ModelDrafts(backend, 1), width=N_MAX)
    assert reply_of(backend, prompt, composed, fields) == expected
    if expected[2][5:8]:
        word = expected[2][5:8]
        stopped = {**fields, "stop": (word,)}
        plain = reply_of(backend, prompt, Speculation([Guesses({}, 1)], width=N_MAX), stopped)
        assert plain[2] == expected[2][: expected[2].index(word)]
        assert reply_of(backend, prompt, head, stopped) == plain


@pytest.mark.parametrize("name", ["tiny-hybrid-nextn", "tiny-moe-nextn"])
def test_four_at_once_draft_in_one_evaluation(
    drafting: Callable[..., LlamaBackend], name: str
) -> None:
    """All accept different numbers of drafts, and each sequence holds its own reply."""
    backend = drafting(name, n_seqs=4, **F32_ROWS)
    prompts = [prompt_for(backend, seed, 60 + 7 * seed) for seed in range(4)]
    speculation = Speculation(model=ModelDrafts(backend, N_MAX))
    engine = Engine(backend, RamCache(8, None), EngineSettings(), speculation=speculation)
    fields = {"sampling": Sampling(temperature=0.0, ignore_eos=True), "n_probs": 1}
    handles = [RequestHandle(request(prompt, 70, **fields)) for prompt in prompts]
    for handle in handles:
        engine.submit(handle)
    run_all(engine)
    n_calls = engine.counters.n_calls
    assert n_calls < 4 * 3 + 70, "one evaluation for all of them in a step"
    for prompt, handle, seq in zip(prompts, handles, engine.sequences, strict=True):
        tokens, probs, _, _ = collected(handle)
        assert handle.drafts.n_accepted > 0
        assert len(tokens) == len(probs) == 70
        check_chosen(backend, [*prompt.tokens.tolist(), *tokens], len(prompt), probs)
        assert seq.n == len(prompt) + 69, "all but the last token"


def check_chosen(backend: LlamaBackend, tokens: list[int], n_prompt: int, probs: list[Any]) -> None:
    """Check that each token is the likeliest after those before, within the roundings of batches of
    another shape.
    """
    backend.memory.clear(0)
    ids = np.array(tokens, np.int32)
    errors = []
    for first in range(0, n_prompt, 64):
        backend.evaluate(0, ids[first : min(first + 64, n_prompt)], first)
    for i in range(n_prompt, len(tokens)):
        own, best = backend.top_tokens(0, int(ids[i]), 1)
        errors.append(max(abs(own[1] - probs[i - n_prompt][0][1]), best[1] - own[1]))
        assert probs[i - n_prompt][0][0] == ids[i]
        backend.evaluate(0, ids[i : i + 1], i)
    backend.memory.clear(0)
    assert max(errors) < 0.005

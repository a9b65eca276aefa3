"""Drafts on models with a sliding window: wrong ones are cut off, and each row that a later token
sees is still there, in the cell of a cold run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from pyctl.cache.ram import RamCache
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.draft.speculation import Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.sampling import Sampling
from pyctl.errors import StateError
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.prompt import Prompt, as_tokens
from tests.model.engine.test_real_drafts import collected
from tests.unit.engine.draft.guesses import Guesses
from tests.unit.engine.drive import request, run_all
from tests.unit.engine.single_precision import F32_ROWS

FAMILIES = ("tiny-gemma3", "tiny-gpt-oss", "tiny-llama4", "tiny-dots3note")
"""Windows that slide, chunks of attention, and a window with an indexer."""

UBATCH = 64
RING = 256
"""Cells of the layers with a window: a window of 64 tokens and a batch, padded."""

N_DRAFTS = 20
N_AFTER = 12

each_family = pytest.mark.parametrize("name", FAMILIES)
Opened = Callable[..., LlamaBackend]


@pytest.fixture
def opened(open_model: Callable[..., Loaded]) -> Opened:
    """opened("tiny-gemma3", n_seqs=2) -> a backend with a ring of RING cells, all empty."""

    def get(name: str, n_seqs: int = 1, **fields: str) -> LlamaBackend:
        options = {"n_ctx": 1024, "n_ubatch": UBATCH, "n_batch": UBATCH, "n_seqs": n_seqs}
        drafts = DraftSettings(draft_types=("ngram-mod",))
        backend = open_model(name, drafts=drafts, **options, **fields).backend
        for seq in range(n_seqs):
            backend.memory.clear(seq)
        return backend

    return get


def tokens(seed: int, n: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 256, n).tolist())


def prefill(backend: LlamaBackend, text: tuple[int, ...], seq: int = 0) -> None:
    for start in range(0, len(text), UBATCH):
        backend.evaluate(seq, as_tokens(text[start : start + UBATCH]), start)


def go_on(backend: LlamaBackend, n: int) -> list[NDArray[np.float32]]:
    """Return the logits of tokens that follow the first ``n`` one by one."""
    found = []
    for i, token in enumerate(tokens(5, N_AFTER)):
        backend.decode([SequenceTokens(0, (token,), n + i)])
        found.append(backend.logits(0))
    assert all(np.isfinite(logits).all() for logits in found)
    return found


def check_continues_as_restored(backend: LlamaBackend, n: int) -> None:
    """Assert that sequence 0, of ``n`` tokens, has the same next logits as after a restore of its
    rows and state into empty cells.
    """
    memory = backend.memory
    rows = memory.save_rows(0, 0, n)
    state = memory.save_state(0, n)
    memory.synchronize()
    found = go_on(backend, n)
    memory.clear(0)
    memory.restore(0, 0, [(rows, 0, n)], state)
    expected = go_on(backend, n)
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("n_right", [0, 3, N_DRAFTS - 1])
@pytest.mark.parametrize("n", [30, RING - N_DRAFTS + 2, RING - 2, 3 * RING - 9, 3 * RING + 50])
@each_family
def test_after_wrong_drafts_it_goes_on_like_a_restored_sequence(
    opened: Opened, name: str, n: int, n_right: int
) -> None:
    """A restore puts the window into the cells of a cold run. So does a rollback, before the ring
    is full, where drafts go round its end, and after that: each later logit has the same bits.
    """
    backend = opened(name)
    memory = backend.memory
    prefill(backend, tokens(1, n))
    backend.decode([SequenceTokens(0, tokens(2, 1 + N_DRAFTS), n)])
    n_kept = n + 1 + n_right
    assert memory.rollback(0, n_kept) == n_kept
    check_continues_as_restored(backend, n_kept)


@each_family
def test_rollbacks_follow_each_other_all_round_the_ring(opened: Opened, name: str) -> None:
    """Steps of many lengths, each with wrong drafts at its end, leave the sequence where a cold run
    has it.
    """
    backend = opened(name)
    memory = backend.memory
    rng = np.random.default_rng(8)
    n = 10
    prefill(backend, tokens(1, n))
    while n < 3 * RING:
        n_drafts = int(rng.choice([1, 4, 17, 40]))
        backend.decode([SequenceTokens(0, tokens(n, 1 + n_drafts), n)])
        n += 1 + int(rng.integers(0, n_drafts + 1))
        assert memory.rollback(0, n) == n
    check_continues_as_restored(backend, n)


@each_family
def test_any_number_of_drafts_of_the_last_evaluation_is_taken_back(
    opened: Opened, name: str
) -> None:
    backend = opened(name)
    assert backend.facts.n_rollback == backend.facts.n_ctx
    assert not backend.facts.has_state_history
    prefill(backend, tokens(1, 100))
    backend.decode([SequenceTokens(0, tokens(2, 10), 100, 2)])
    with pytest.raises(StateError):
        backend.memory.rollback(0, 101)  # a sure token
    assert backend.memory.cells.n_tokens(0) == 0, "the sequence is empty"


@pytest.mark.parametrize("n_right", [0, 3, N_DRAFTS - 1])
@pytest.mark.parametrize("n", [30, RING - N_DRAFTS + 2, RING - 2, 3 * RING - 9, 3 * RING + 50])
def test_with_a_recurrent_state_wrong_drafts_go_back_to_their_mark(
    opened: Opened, n: int, n_right: int
) -> None:
    """The state and the window return to the start of the evaluation, wherever that is in the
    ring: each later logit has the bits of a restored sequence.
    """
    backend = opened("tiny-lfm2-window")
    assert backend.facts.max_drafts == UBATCH - 1
    memory = backend.memory
    prefill(backend, tokens(1, n))
    backend.decode([SequenceTokens(0, tokens(2, 1 + N_DRAFTS), n)])
    assert memory.rollback(0, n + 1 + n_right) == n
    assert memory.cells.n_tokens(0) == n
    check_continues_as_restored(backend, n)


def test_marks_follow_each_other_all_round_the_ring(opened: Opened) -> None:
    """Steps of many lengths evaluate their right tokens again after each rollback."""
    backend = opened("tiny-lfm2-window")
    memory = backend.memory
    rng = np.random.default_rng(8)
    n = 10
    prefill(backend, tokens(1, n))
    while n < 3 * RING:
        n_drafts = int(rng.choice([1, 4, 17, 40]))
        step = tokens(n, 1 + n_drafts)
        backend.decode([SequenceTokens(0, step, n)])
        n_right = int(rng.integers(0, n_drafts))
        assert memory.rollback(0, n + 1 + n_right) == n
        sure = step[: 1 + n_right]
        backend.decode([SequenceTokens(0, sure, n, len(sure))])
        n += len(sure)
    check_continues_as_restored(backend, n)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAMILIES[:-1])  # with an indexer there is one request at a time
def test_two_sequences_keep_their_windows(opened: Opened, name: str, seed: int) -> None:
    """Two sequences share the cells and go back by different numbers of tokens; each predicts as
    one that evaluated its tokens alone.
    """
    backend = opened(name, n_seqs=2, **F32_ROWS)
    rng = np.random.default_rng(seed)
    held = [list(tokens(10 + seq, int(rng.integers(20, 200)))) for seq in range(2)]
    for seq, text in enumerate(held):
        prefill(backend, tuple(text), seq)
    for step in range(40):
        items = []
        for seq, text in enumerate(held):
            n_drafts = int(rng.choice([0, 1, 3, 30]))
            items.append(SequenceTokens(seq, tokens(100 * step + seq, 1 + n_drafts), len(text)))
        backend.decode(items)
        for item, text in zip(items, held, strict=True):
            n = len(text) + 1 + int(rng.integers(0, item.n_drafts + 1))
            text += item.tokens[: n - len(text)]
            assert backend.memory.rollback(item.seq, n) == n
    backend.decode([SequenceTokens(seq, (77,), len(text)) for seq, text in enumerate(held)])
    found = [backend.logits(seq) for seq in range(2)]
    for text, logits in zip(held, found, strict=True):
        for seq in range(2):
            backend.memory.clear(seq)
        prefill(backend, (*text, 77))
        assert np.abs(backend.logits(0) - logits).max() < 0.01 * np.abs(logits).max()


@pytest.mark.parametrize("n", [90, RING - 40])
@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-gpt-oss"])
def test_with_exact_no_draft_changes_a_bit(opened: Opened, name: str, n: int) -> None:
    """A reply that goes round the ring in batches of one width has the same tokens and
    probabilities with right, wrong and missing drafts.
    """
    backend = opened(name)
    prompt = Prompt.from_ids(tokens(3, n), [n // 2, n - 4])
    width = 8
    fields = {"sampling": Sampling(temperature=0.8, seed=7, ignore_eos=True), "n_probs": 3}

    def reply(source: Guesses) -> tuple[object, ...]:
        backend.memory.clear(0)
        speculation = Speculation([source], width=width)
        settings = EngineSettings(exact=True)
        engine = Engine(backend, RamCache(8, None), settings, speculation=speculation)
        handle = RequestHandle(request(prompt, 200, **fields))
        engine.submit(handle)
        run_all(engine)
        return collected(handle)

    expected = reply(Guesses({}, 1))
    drafted = {prompt: expected[0]}
    assert len(drafted[prompt]) == 200
    for wrong, silent in ((0.0, 0.0), (1.0, 0.0), (0.3, 0.3)):
        assert reply(Guesses(drafted, width, wrong, silent)) == expected

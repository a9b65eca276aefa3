"""A sequence returns to its mark with the bits that it had there, after any evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pyctl.cache.snapshot import Rows
from pyctl.engine.backend import SequenceTokens
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import as_tokens

N = 150
OPTIONS = [
    ("tiny-hybrid", {}),
    ("tiny-moe", {}),
    ("tiny-hybrid", {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}),
    ("tiny-qwen4exp", {}),
    ("tiny-glm5-next", {}),
]


def opened(path: Path, **options: object) -> Loaded:
    chosen = {"n_ctx": 1024, "n_ubatch": 64, "n_seqs": 2, "n_threads": 1, **options}
    return load(
        ModelSettings(path=str(path), **chosen), drafts=DraftSettings(draft_types=("ngram-mod",))
    )


TWO = pytest.mark.parametrize(
    "backend", OPTIONS[:3], ids=("tiny-hybrid", "tiny-moe", "q8_0"), indirect=True
)
"""Models that run two sequences."""


@pytest.fixture(
    params=OPTIONS, ids=lambda param: "-".join([param[0], *map(str, param[1].values())])
)
def backend(
    model_path: Callable[[str], Path], request: pytest.FixtureRequest
) -> Iterator[LlamaBackend]:
    name, options = request.param
    loaded = opened(model_path(name), **options)
    yield loaded.backend
    loaded.backend.unload()


def tokens(seed: int, n: int) -> np.ndarray:
    return as_tokens(np.random.default_rng(seed).integers(3, 256, n))


def go_on(
    backend: LlamaBackend, seq: int, seed: int, *widths: int, start: int = N
) -> list[np.ndarray]:
    """Evaluate batches of ``widths``; the logits after each."""
    found = []
    for i, width in enumerate(widths):
        backend.evaluate(seq, tokens(100 * seed + i, width), start)
        found.append(backend.logits(0))
        start += width
    return found


def prompt(backend: LlamaBackend, seq: int, seed: int) -> None:
    for start in range(0, N, 50):
        backend.evaluate(seq, tokens(seed, N)[start : start + 50], start)


def same(ours: list[np.ndarray], others: list[np.ndarray]) -> bool:
    assert all(np.isfinite(logits).all() for logits in ours)
    return all(np.array_equal(a, b) for a, b in zip(ours, others, strict=True))


def test_what_follows_the_mark_has_the_same_bits(backend: LlamaBackend) -> None:
    memory = backend.memory.kv
    assert memory.has_marks
    prompt(backend, 0, 1)
    expected = go_on(backend, 0, 5, 1, 4, 17, 1)
    backend.memory.clear(0)
    prompt(backend, 0, 1)
    memory.mark(0, N)
    for seed, widths in enumerate([(1,), (40,), (3, 1, 1), (64, 64), (1, 33)]):
        wrong = go_on(backend, 0, 50 + seed, *widths)
        assert not same(wrong[:1], expected[:1])
        assert memory.reset(0) == N
        assert same(go_on(backend, 0, 5, 1, 4, 17, 1), expected)
        assert memory.reset(0) == N


def test_the_state_itself_is_the_one_at_the_mark(backend: LlamaBackend) -> None:
    memory = backend.memory.kv
    prompt(backend, 0, 2)
    memory.mark(0, N)
    before = backend.memory.save_state(0, N).recurrent
    backend.memory.synchronize()
    before = before.copy()
    go_on(backend, 0, 9, 30)
    memory.reset(0)
    after = backend.memory.save_state(0, N).recurrent
    backend.memory.synchronize()
    assert np.array_equal(before, after)


@TWO
def test_each_sequence_has_its_own_mark(backend: LlamaBackend) -> None:
    """A reset takes its own sequence back to its own mark, whatever others marked or evaluated
    since.
    """
    memory = backend.memory.kv
    expected = []
    for seq in (0, 1):
        prompt(backend, seq, seq)
        expected.append(go_on(backend, seq, 7, 1, 5))
        backend.memory.clear(seq)
    for seq in (0, 1):
        prompt(backend, seq, seq)
    for seq in (1, 0):
        memory.mark(seq, N)
    for seq in (0, 1):
        go_on(backend, seq, 8, 20, 1)
    for seq in (1, 0):
        memory.reset(seq)
    # Beside what lies in the context now, so the rows' places differ: only nearly equal.
    for seq in (0, 1):
        for ours, others in zip(go_on(backend, seq, 7, 1, 5), expected[seq], strict=True):
            assert np.abs(ours - others).max() < 0.05 * np.abs(others).max()


def test_a_later_mark_replaces_the_earlier_one(backend: LlamaBackend) -> None:
    memory = backend.memory.kv
    prompt(backend, 0, 3)
    memory.mark(0, N)
    go_on(backend, 0, 4, 6)
    memory.mark(0, N + 6)
    expected = go_on(backend, 0, 5, 2, start=N + 6)
    assert memory.reset(0) == N + 6
    assert same(go_on(backend, 0, 5, 2, start=N + 6), expected)


@pytest.mark.parametrize("change", ["rewind", "clear", "load_state", "load_rows"])
def test_there_is_no_way_back_over_a_change(backend: LlamaBackend, change: str) -> None:
    memory = backend.memory.kv
    prompt(backend, 0, 1)
    state = backend.memory.save_state(0, N)
    rows = backend.memory.save_rows(0, 0, N).block
    memory.mark(0, N)
    if change == "rewind":
        backend.memory.rewind(0, N - 10)
    elif change == "load_state":
        backend.memory.restore(0, N, (), state)
    else:
        backend.memory.clear(0)
    if change == "load_rows":
        backend.memory.restore(0, 0, [(Rows(rows), 0, N)])
        backend.memory.restore(0, N, (), state)
    with pytest.raises(ValueError, match="no mark"):
        memory.reset(0)


def test_only_where_a_sequence_stands_can_it_be_marked(backend: LlamaBackend) -> None:
    memory = backend.memory.kv
    with pytest.raises(ValueError, match="no mark"):
        memory.reset(0)
    with pytest.raises(ValueError, match="stands at 0"):
        memory.mark(0, 0)
    prompt(backend, 0, 1)
    for n in (0, -1, N - 1, N + 1):
        with pytest.raises(ValueError, match="cannot be marked"):
            memory.mark(0, n)
    for seq in (-1, 2):
        with pytest.raises(ValueError, match="is not in"):
            memory.mark(seq, N)
        with pytest.raises(ValueError, match="is not in"):
            memory.reset(seq)


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-dense"])
def test_without_room_nothing_can_be_marked(
    open_model: Callable[..., Loaded], model_path: Callable[[str], Path], name: str
) -> None:
    unasked = name == "tiny-hybrid"  # the other has nothing to keep
    backend = (open_model(name) if unasked else opened(model_path(name))).backend
    assert not backend.memory.kv.has_marks
    backend.memory.clear(0)
    prompt(backend, 0, 1)
    with pytest.raises(ValueError, match="no room for marks"):
        backend.memory.kv.mark(0, N)
    backend.memory.clear(0)


def drafted(backend: LlamaBackend, seed: int, look: Callable[[], None]) -> list[np.ndarray]:
    """Return steps of a reply after N tokens, each with drafts of which some are wrong, up to long
    ones; the logits of all.
    """
    rng = np.random.default_rng(seed)
    at = N
    found = []
    kinds = set()
    maximum = min(backend.facts.max_drafts, 20)
    for step in range(12):
        n_drafts = int(rng.integers(1, maximum + 1)) if step % 3 else min(1, maximum)
        item = SequenceTokens(0, tuple(tokens(1000 * seed + step, 1 + n_drafts).tolist()), at)
        backend.decode([item])
        found += [backend.logits(i) for i in range(1 + n_drafts)]
        look()
        n_right = int(rng.integers(0, n_drafts + 1))
        held = backend.memory.rollback(0, at + 1 + n_right)
        look()
        if (
            held < at + 1 + n_right
        ):  # back to the mark: what was right is evaluated once more, and is sure now
            assert n_drafts > backend.facts.n_rollback
            again = item.tokens[held - at : 1 + n_right]
            backend.decode([SequenceTokens(0, again, held, len(again))])
            found.append(backend.logits(0))
            look()
        at += 1 + n_right
        kinds.add(held == at)
    assert kinds == {True, False}, "by planes and by marks"
    return found


@TWO
@pytest.mark.parametrize("n_free", [40, 300])
def test_drafts_and_marks_leave_what_is_held_and_are_no_different_beside_it(
    backend: LlamaBackend, n_free: int
) -> None:
    """Drafts take cells where held rows lie; what is taken back was never held, and what is held
    has not moved on.
    """
    prompt(backend, 0, 1)
    expected = drafted(backend, 3, lambda: None)
    ends = backend.memory.cells.n_tokens(0)
    backend.memory.clear(0)

    # Another conversation had the low cells, and leaves about as many free as this one needs.
    n = backend.facts.n_cells - ends - n_free
    for start in range(0, n, 64):
        backend.evaluate(1, tokens(9, n)[start : start + 64], start)
    other = backend.memory.cells.hold_rows(1, 0, n)
    own_end = N
    before = backend.memory.save_rows(1, 0, n).block
    backend.memory.synchronize()
    backend.memory.clear(1)
    prompt(backend, 0, 1)
    own = backend.memory.cells.hold_rows(0, 0, own_end)
    mine = backend.memory.save_rows(0, 0, own_end).block
    backend.memory.synchronize()

    def look() -> None:
        for held, block, last in ((other, before, n), (own, mine, own_end)):
            found = backend.memory.cells.fetch(held, 0, last)
            backend.memory.synchronize()
            assert np.array_equal(found, block)

    assert same(drafted(backend, 3, look), expected)
    assert backend.memory.cells.n_tokens(0) == ends
    assert backend.memory.cells.n_held_cells == n, "its own rows lie where the sequence has them"
    state = backend.memory.save_state(0, ends)
    last = backend.memory.save_rows(0, own_end, ends).block
    backend.memory.synchronize()
    backend.memory.clear(0)
    backend.memory.restore(0, 0, [(Rows(own), 0, own_end), (Rows(last), own_end, ends)])
    backend.memory.restore(0, ends, (), state)
    look()
    backend.memory.cells.release_all()

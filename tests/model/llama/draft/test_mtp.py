"""The model's own head: its drafts, their rollback, and that drafts change no logit."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as api
from llama_cpp import llama_cpp_ext as ext
from numpy.typing import NDArray

from pyctl.engine.backend import SequenceTokens
from pyctl.errors import EngineError, StateError
from pyctl.llama.draft.mtp import MtpHead
from pyctl.llama.library.native import HiddenRows
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.prompt import as_tokens
from tests.model.llama.draft.drafting import (
    HYBRIDS,
    UBATCH,
    Draft,
    greedy_reply,
    head_of,
    prefill,
    prompt,
)


class PlainHead:
    """The head by the shortest way: all rows in one go from the model's hidden rows, then one token
    after the other.
    """

    def __init__(self, backend: LlamaBackend) -> None:
        params = api.llama_context_default_params()
        params.n_ctx = 2048
        params.n_ubatch = 512
        params.n_batch = 512
        params.n_threads = 1
        params.ctx_type = api.LLAMA_CONTEXT_TYPE_MTP
        params.ctx_other = backend.ctx
        self.ctx = api.llama_init_from_model(backend.model, params)
        self.backend = backend
        ext.llama_set_embeddings_nextn(self.ctx, True, False)

    def drafts(self, tokens: list[int], n: int) -> tuple[int, ...]:
        """After ``tokens``, of which the model has not evaluated the last, which are in its
        sequence 2 otherwise.
        """
        self.backend.memory.clear(2)
        rows = HiddenRows(ctypes.cast(self.backend.ctx, ctypes.c_void_p).value or 0)
        hidden = [np.zeros((1, rows.rows(0).shape[1]), np.float32)]
        for first in range(0, len(tokens) - 1, UBATCH):
            part = tokens[first : min(first + UBATCH, len(tokens) - 1)]
            self.backend.evaluate(2, as_tokens(part), first)
            hidden.append(np.array(rows.rows(len(part))))
        self.backend.memory.clear(2)
        api.llama_memory_clear(api.llama_get_memory(self.ctx), True)
        given = np.concatenate(hidden)
        found: list[int] = []
        start = 0
        while len(found) < n:
            now = [*tokens, *found][start:]
            batch = api.llama_batch_init(len(now), 0, 1)
            embd = np.ascontiguousarray(given[-len(now) :])
            for i, token in enumerate(now):
                batch.token[i] = token
                batch.pos[i] = start + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = i == len(now) - 1
            batch.n_tokens = len(now)
            batch.embd = embd.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            assert api.llama_decode(self.ctx, batch) == 0
            n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.backend.model))
            logits = np.ctypeslib.as_array(
                api.llama_get_logits_ith(self.ctx, len(now) - 1), (n_vocab,)
            )
            found.append(int(logits.argmax()))
            row = np.ctypeslib.as_array(
                ext.llama_get_embeddings_nextn_ith(self.ctx, len(now) - 1), (given.shape[1],)
            )
            given = np.concatenate((given, row[None]))
            batch.embd = None
            api.llama_batch_free(batch)
            start += len(now)
        return tuple(found)


@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("shape", HYBRIDS)
def test_the_head_drafts_what_the_block_says(
    open_head: Callable[..., LlamaBackend], shape: str, as_on_gpu: bool
) -> None:
    backend = open_head(shape, as_on_gpu=as_on_gpu)
    tokens = prompt(100)
    reply, _, drafts = greedy_reply(backend, tokens, 60, head_of(backend))
    reference = PlainHead(backend)
    rights = [
        draft == reference.drafts([*tokens, *reply][: end + 1], 3)
        for end, draft in drafts
        if end < 155
    ]
    api.llama_free(reference.ctx)
    # Rows that were evaluated in other batches differ in their last digits, which now and then
    # decides.
    assert len(rights) > 15
    assert sum(rights) >= len(rights) - 1


@pytest.mark.parametrize(
    "fields", [{}, {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}], ids=["f16", "q8_0"]
)
@pytest.mark.parametrize("shape", HYBRIDS)
def test_drafts_change_no_bit_of_a_logit(
    open_head: Callable[..., LlamaBackend], shape: str, fields: dict[str, str]
) -> None:
    """Logits are the same to the bit whether all drafts are wrong, some are right, or the head
    makes them: speculation may change the speed and nothing else.
    """
    backend = open_head(shape, **fields)
    tokens = prompt(150)
    wrong = greedy_reply(backend, tokens, 80, lambda reply, end: (1, 2, 3))
    right: list[int] = [*wrong[0], 0, 0, 0, 0]
    odd = random.Random(3)
    drafters: dict[str, Draft] = {
        "right": lambda reply, end: right[len(reply) : len(reply) + 3],
        "mixed": lambda reply, end: [
            each if odd.random() < 0.7 else 5 for each in right[len(reply) : len(reply) + 3]
        ],
        "head": head_of(backend),
    }
    for name, drafter in drafters.items():
        backend.memory.clear(0)
        reply, logits, drafts = greedy_reply(backend, tokens, 80, drafter)
        assert reply == wrong[0], name
        assert all(
            np.array_equal(one, other) for one, other in zip(logits, wrong[1], strict=True)
        ), name
        assert name != "right" or len(drafts) < 22  # steps, of 80 tokens
    assert backend.facts.n_rollback == 3


def near(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    return bool(np.abs(one - other).max() < 0.05)


def ready(backend: LlamaBackend, batches: Sequence[tuple[int, ...]], n_sure: int = 1) -> list[int]:
    """Evaluate a prompt of 100 tokens and further batches in sequence 0; return all its tokens."""
    tokens = prompt(100)
    prefill(backend, tokens)
    for batch in batches:
        backend.decode([SequenceTokens(0, batch, len(tokens), n_sure)])
        tokens += batch
    return tokens


@pytest.mark.parametrize(
    ("batches", "n_sure", "n"),
    [
        pytest.param([(11, 12, 13, 14)], 1, 100, id="all of a batch of four"),
        pytest.param([(11,)], 1, 100, id="a batch of one"),
        pytest.param([(11, 12)], 1, 100, id="a batch of two"),
        pytest.param([(11,), (12,)], 1, 100, id="two batches of one"),
        pytest.param([(11, 12, 13, 14), (15,)], 1, 103, id="beyond the last batch"),
        pytest.param([(11, 12, 13, 14, 15, 16)], 1, 102, id="more than there are planes"),
        pytest.param([(11, 12, 13, 14)], 3, 102, id="what is sure"),
        pytest.param([], 1, 99, id="a token of the prompt"),
        pytest.param([(11, 12)], 1, 103, id="what it does not hold"),
    ],
)
def test_nothing_else_is_taken_back(
    open_head: Callable[..., LlamaBackend], batches: Sequence[tuple[int, ...]], n_sure: int, n: int
) -> None:
    """llama.cpp says of most of these that it has done it, and goes on from a wrong state."""
    backend = open_head()
    ready(backend, batches, n_sure)
    with pytest.raises(StateError, match="cannot roll back"):
        backend.memory.rollback(0, n)
    ready(backend, [])  # it is empty now, and works


def test_what_was_taken_back_is_not_taken_back_again(
    open_head: Callable[..., LlamaBackend],
) -> None:
    backend = open_head()
    ready(backend, [(11, 12, 13, 14)])
    backend.memory.rollback(0, 103)
    with pytest.raises(StateError):
        backend.memory.rollback(0, 102)


@pytest.mark.parametrize("what", ["state", "rows", "rewound", "other"])
def test_what_was_loaded_or_moved_is_not_taken_back(
    open_head: Callable[..., LlamaBackend], what: str
) -> None:
    """A rollback needs the planes of the last batch; after a restore, or once another sequence may
    have moved the cell, they belong to other tokens, so it is refused.
    """
    backend = open_head()
    tokens = ready(backend, [(11, 12, 13, 14)])
    n = 104
    if what == "state":
        backend.memory.restore(0, n, (), backend.memory.save_state(0, n))
    elif what == "rows":
        backend.memory.restore(0, n, [])
    elif what == "rewound":
        state = backend.memory.save_state(0, n)
        backend.memory.rewind(0, n)
        backend.memory.restore(0, n, (), state)
    else:
        backend.evaluate(1, as_tokens(tokens[:20]), 0)  # may move the cell without its planes
    with pytest.raises(StateError):
        backend.memory.rollback(0, n - 1)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_others_may_be_evaluated_while_drafts_are_taken_back(
    open_head: Callable[..., LlamaBackend], order: tuple[int, ...]
) -> None:
    """A pending rollback survives what other sequences do, wherever the cells of all lie."""
    backend = open_head()
    texts = {seq: prompt(70 + seq, seed=seq) for seq in order}
    for seq, text in texts.items():
        prefill(backend, text, seq)
    for width in (4, 2, 4):
        group = [seq for seq in texts if width == 4 or seq != order[1]]
        backend.decode(
            [SequenceTokens(seq, (7, 8, 9, 10)[:width], len(texts[seq])) for seq in group]
        )
        for seq in group:
            texts[seq] += (7, 8, 9, 10)[: max(width - 1 - seq % width, 1)]
            backend.memory.rollback(seq, len(texts[seq]))
        single = order[2]
        backend.decode([SequenceTokens(single, (20,), len(texts[single]))])
        texts[single].append(20)
    for seq, text in texts.items():
        backend.decode([SequenceTokens(seq, (50,), len(text))])
        found = backend.logits(0)
        backend.memory.rollback(seq, len(text) + 1)
        fresh = open_head(n_seqs=1)
        prefill(fresh, text)
        fresh.decode([SequenceTokens(0, (50,), len(text))])
        assert near(found, fresh.logits(0)), seq


def test_unequal_widths_are_not_taken_back(open_head: Callable[..., LlamaBackend]) -> None:
    backend = open_head()
    prefill(backend, prompt(70), 0)
    prefill(backend, prompt(80), 1)
    backend.decode([SequenceTokens(0, (1, 2, 3, 4), 70), SequenceTokens(1, (5, 6), 80)])
    with pytest.raises(StateError):
        backend.memory.rollback(0, 72)
    assert backend.memory.rollback(1, 82) == 82


def test_several_sequences_draft_what_each_would_alone(
    open_head: Callable[..., LlamaBackend],
) -> None:
    backend = open_head()
    texts = [prompt(60 + 9 * seq, seed=seq) for seq in range(3)]
    lasts = [prefill(backend, text, seq) for seq, text in enumerate(texts)]
    items = [SequenceTokens(seq, (last,), len(texts[seq])) for seq, last in enumerate(lasts)]
    alone = [backend.draft([item], 3)[0] for item in items]
    assert backend.draft(items, 3) == alone
    assert backend.draft(items[::-1], 2) == [draft[:2] for draft in alone[::-1]]
    assert len(set(alone)) > 1


def test_a_draft_may_follow_several_sure_tokens(open_head: Callable[..., LlamaBackend]) -> None:
    backend = open_head()
    tokens = prompt(90)
    prefill(backend, tokens)
    first, second, third = backend.draft([SequenceTokens(0, (4,), 90)], 3)[0]
    assert backend.draft([SequenceTokens(0, (4, first), 90)], 2)[0] == (second, third)
    assert len(backend.draft([SequenceTokens(0, (4, 9, 9), 90)], 3)[0]) == 3


def test_too_many_outputs_are_refused(open_head: Callable[..., LlamaBackend]) -> None:
    backend = open_head()
    prefill(backend, prompt(20))
    with pytest.raises(EngineError, match="outputs"):
        backend.decode([SequenceTokens(0, tuple(range(backend.facts.n_outputs + 1)), 20)])


def test_a_sequence_that_went_back_is_emptied_like_any(
    open_head: Callable[..., LlamaBackend],
) -> None:
    """NaN in any plane does not outlive it."""
    backend = open_head("tiny-hybrid-nextn")
    tokens = ready(backend, [])
    state = backend.memory.save_state(0, 100)
    backend.memory.synchronize()
    state.recurrent[64:].view(np.float32)[:] = np.nan
    backend.memory.restore(0, 100, (), state)
    backend.decode([SequenceTokens(0, (1, 2, 3, 4), 100)])
    assert np.isnan(backend.logits(0)).all()
    backend.memory.rollback(0, 102)
    backend.memory.clear(0)
    prefill(backend, tokens)
    assert np.isfinite(backend.logits(0)).all()


def test_what_is_saved_means_the_same_with_and_without_a_head(
    open_head: Callable[..., LlamaBackend],
) -> None:
    """Blocks of the trunk restore in both directions between a backend with a head and one without,
    to the bit: turning drafts on keeps the cache.
    """
    drafting = open_head()
    plain = open_head(types=())
    assert drafting.memory.identity == plain.memory.identity
    assert plain.facts.draft_type == ""
    assert plain.memory.shape.sizes.draft_rows(0, 9) == 0
    assert plain.facts.n_rollback == 0
    tokens = prompt(90)
    for one, other in ((drafting, plain), (plain, drafting)):
        prefill(one, tokens)
        rows = one.memory.save_rows(0, 0, 90)
        state = one.memory.save_state(0, 90)
        one.memory.synchronize()
        other.memory.restore(0, 0, [(rows, 0, 90)], state)
        other.decode([SequenceTokens(0, (4,), 90)])
        one.decode([SequenceTokens(0, (4,), 90)])
        assert np.array_equal(one.logits(0), other.logits(0))
        assert len(other.draft([SequenceTokens(0, (4,), 91)], 3)[0]) == (
            3 if other is drafting else 0
        )
        one.memory.clear(0)
        other.memory.clear(0)


@pytest.mark.parametrize("n_right", [0, 1, 3])
def test_a_gpu_evaluates_as_many_rows_in_each_call(
    open_head: Callable[..., LlamaBackend], monkeypatch: pytest.MonkeyPatch, n_right: int
) -> None:
    """Whatever was right before: else llama.cpp makes another graph for each width."""
    backend = open_head(as_on_gpu=True)
    head = backend.memory.drafts.model
    assert isinstance(head, MtpHead)
    shapes = []
    real = head._head

    class Counting:
        def draft(self, items: Any, n: int, window: int) -> Any:
            shapes.append((len(items[0][3]), window))
            return real.draft(items, n, window)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    monkeypatch.setattr(head, "_head", Counting())
    prefill(backend, prompt(100))
    end = 100
    for _ in range(12):
        drafts = backend.draft([SequenceTokens(0, (4,), end)], 3)[0]
        backend.decode([SequenceTokens(0, (4, *drafts), end)])
        end += 1 + n_right
        backend.memory.rollback(0, end)
    assert set(shapes[4:]) == {(4, 4)}


def test_a_cut_does_not_wait_for_the_head(
    open_head: Callable[..., LlamaBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head evaluates rows that were saved between two batches of a prompt while the second
    batch runs, or when the copy is read.
    """
    backend = open_head(as_on_gpu=True)
    tokens = prompt(160)
    asked: list[str] = []
    head = backend.memory.drafts.model
    assert isinstance(head, MtpHead)
    for name in ("follow", "save_rows", "save_state"):
        real = getattr(head, name)
        monkeypatch.setattr(
            head, name, lambda *args, name=name, real=real: (asked.append(name), real(*args))[1]
        )
    blocks = []
    for first, last in ((0, 64), (64, 128), (128, 160)):
        backend.evaluate(0, as_tokens(tokens[first:last]), first)
        asked.clear()
        blocks.append(
            (
                backend.memory.save_rows(0, first, last).draft,
                backend.memory.save_state(0, last).draft,
            )
        )
        assert asked == []
    backend.memory.synchronize()
    assert asked == ["follow", "save_rows", "save_state"]
    late = [(rows.copy(), state.copy()) for rows, state in blocks]
    backend.memory.clear(0)
    plain = open_head()
    for (first, last), (rows, state) in zip(((0, 64), (64, 128), (128, 160)), late, strict=True):
        plain.evaluate(0, as_tokens(tokens[first:last]), first)
        assert np.array_equal(plain.memory.save_rows(0, first, last).draft, rows)
        assert np.array_equal(plain.memory.save_state(0, last).draft, state)

"""Attention to a few chosen rows: the choice depends on tokens, batches and pins alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from llama_cpp import llama_cpp as api

from pyctl.errors import StateError
from pyctl.llama import LlamaBackend
from pyctl.prompt import Tokens
from tests.model.native.stores import Store, assert_same, evaluate_on, run, tokens_of
from tools.generator import TINY_DENSE, cached_model

CHUNK = 64
N_PROMPT, N = 1280, 1300
PROMPT_ENDS = [*range(96, N_PROMPT, 96), N_PROMPT]
FEW = {"select_rows": 4 * CHUNK, "sinks": 50, "tail": 100}
"""One chunk of sinks, four that are chosen, and a tail of two or three."""

LAYERS = {"tiny-hybrid": 2, "tiny-moe": 2, "tiny-dense": 4}
Logits = dict[int, np.ndarray]


@pytest.fixture
def chooser(store: Callable[..., Store]) -> Callable[..., Store]:
    """chooser("tiny-dense", resident=[0], select_rows=64) -> an empty store that can choose, with room for N rows."""

    def get(
        name: str, kv: str = "f16", *, resident: list[int], lag: int = 0, marks: bool = False, **select: int
    ) -> Store:
        return store(name, kv, resident=resident, n_ctx=2000, lag=lag, marks=marks, select={**FEW, **select})

    return get


def reply(made: Store, tokens: Tokens, start: int = N_PROMPT, *, width: int = 1) -> Logits:
    """The logits behind each batch of a reply whose tokens are known, with rows chosen."""
    return run(
        lambda part, at: made.evaluate(part, at, select=True), tokens, start, [*range(start + width, N + 1, width)]
    )


def prompt_of(made: Store, tokens: Tokens) -> Store:
    made.rows.clear(0)
    made.run(tokens[:N_PROMPT], ends=PROMPT_ENDS)
    return made


def different(found: Logits, wanted: Logits) -> bool:
    return any((found[end] != wanted[end]).any() for end in found)


@pytest.mark.parametrize("name", LAYERS)
def test_with_room_for_all_rows_nothing_is_left_out(chooser: Callable[..., Store], name: str) -> None:
    """To the bit: also while layers are streamed, and up to the row from which on a chunk would be missing."""
    tokens = tokens_of(1, N)
    exact = prompt_of(chooser(name, resident=[0], select_rows=CHUNK), tokens)
    wanted = exact.run(tokens, N_PROMPT, [*range(N_PROMPT + 1, N + 1)])
    assert exact.rows.selected_chunks == 0
    # Behind 1,300 rows, 1,200 are before the tail: 18 chunks, of which one is a sink.
    roomy = prompt_of(chooser(name, resident=[0], select_rows=17 * CHUNK), tokens)
    assert_same(reply(roomy, tokens), wanted)
    assert roomy.rows.selected_chunks == roomy.rows.fetched_chunks == 0
    tight = prompt_of(chooser(name, resident=[0], select_rows=16 * CHUNK + 63, tail=130), tokens)
    found = reply(tight, tokens)
    first = next(end for end in found if (found[end] != wanted[end]).any())
    assert first == 18 * CHUNK + 130 + 1  # the first whose tail begins with chunk 18


@pytest.mark.parametrize(
    ("name", "kv"), [("tiny-hybrid", "q8_0"), ("tiny-hybrid", "f16"), ("tiny-moe", "q4_0"), ("tiny-dense", "f16")]
)
def test_where_rows_lie_and_what_was_before_makes_no_difference(
    chooser: Callable[..., Store], name: str, kv: str
) -> None:
    tokens, other = tokens_of(2, N), tokens_of(3, N)
    n = LAYERS[name]
    all_resident = prompt_of(chooser(name, kv, resident=[*range(n)]), tokens)
    block, state = (
        all_resident.backend.memory.save_rows(0, 0, N_PROMPT).block,
        all_resident.backend.memory.save_state(0, N_PROMPT),
    )
    wanted = reply(all_resident, tokens)
    assert all_resident.rows.selected_chunks == 20 * 4 * n
    assert all_resident.rows.fetched_chunks == 0
    rows = all_resident.backend.memory.save_rows(0, 0, N).block
    for resident, lag in (([n - 1], 0), ([], 2)):
        made = prompt_of(chooser(name, kv, resident=resident, lag=lag), tokens)
        assert_same(reply(made, tokens), wanted)
        made.rows.finish()
        assert (made.backend.memory.save_rows(0, 0, N).block == rows).all()
        fetched = made.rows.fetched_chunks
        assert 0 < fetched < made.rows.selected_chunks
        # Another conversation between, and back by what was saved.
        prompt_of(made, other)
        assert different(reply(made, other), wanted)
        made.rows.clear(0)
        made.resume(N_PROMPT, [(block, 0, 700), (block, 700, N_PROMPT)], state.recurrent)
        assert_same(reply(made, tokens), wanted)
        assert made.rows.fetched_chunks > fetched
        # The rows of the reply are complete: all of them can be saved.
        made.rows.finish()
        assert (made.backend.memory.save_rows(0, 0, N).block == rows).all()


def test_a_reply_is_taken_back_and_goes_on(chooser: Callable[..., Store]) -> None:
    """Exact batches and selecting ones in turn, rewound in the middle of chunks, blocks and tails."""
    tokens, other = tokens_of(4, N), tokens_of(5, N)
    fresh = prompt_of(chooser("tiny-dense", resident=[1]), tokens)
    wanted = reply(fresh, tokens)
    for n in (1290, 1100, 900, 333):
        fresh.rows.rewind(0, n)
        mixed = np.concatenate([tokens[:n], other[n:]])
        fresh.run(mixed, n, [*range(n + 96, N_PROMPT, 96)])
        start = fresh.rows.n_rows
        found = reply(fresh, mixed, start)
        cold = chooser("tiny-dense", resident=[])
        cold.resume(n, [(fresh.backend.memory.save_rows(0, 0, n).block, 0, n)], np.empty(0, np.uint8))
        cold.run(mixed, n, [*range(n + 96, N_PROMPT, 96)])
        assert_same(found, reply(cold, mixed, start))
        fresh.rows.rewind(0, n)
        fresh.run(tokens, n, [end for end in PROMPT_ENDS if end > n])
        fresh.run(tokens, fresh.rows.n_rows, [N_PROMPT])
    fresh = prompt_of(fresh, tokens)
    assert_same(reply(fresh, tokens), wanted)


def test_verify_batches_choose_by_all_of_their_tokens(chooser: Callable[..., Store]) -> None:
    tokens = tokens_of(6, N)
    one = prompt_of(chooser("tiny-moe", "q8_0", resident=[0, 1]), tokens)
    wanted = reply(one, tokens, width=5)
    other = prompt_of(chooser("tiny-moe", "q8_0", resident=[]), tokens)
    assert_same(reply(other, tokens, width=5), wanted)
    other.rows.rewind(0, N_PROMPT)
    with pytest.raises(StateError):
        other.evaluate(tokens[N_PROMPT : N_PROMPT + 9], N_PROMPT, select=True)


def test_what_is_pinned_is_attended_to(chooser: Callable[..., Store], full: Callable[..., LlamaBackend]) -> None:
    """With all that can be chosen pinned, the logits are those of llama.cpp without the other rows."""
    tokens = tokens_of(7, N)
    reference = full("tiny-dense", "f16")
    run(evaluate_on(reference), tokens, 0, PROMPT_ENDS)
    memory = api.llama_get_memory(reference._ctx)
    for first, last in ((64, 192), (320, 640), (768, 1152)):
        assert api.llama_memory_seq_rm(memory, 0, first, last)
    wanted: Logits = {}
    reference._outputs.set((0,))
    for n in range(N_PROMPT, N):
        reference._batch.fill(0, tokens[n : n + 1], n)
        assert api.llama_decode(reference._ctx, reference._batch.struct) == 0
        wanted[n + 1] = reference.logits(0)
    for resident in ([0, 1, 2, 3], [2]):
        made = prompt_of(chooser("tiny-dense", resident=resident), tokens)
        exact = made.run(tokens, N_PROMPT, [*wanted])
        made.rows.rewind(0, N_PROMPT)
        made.rows.pin([(700, 701), (200, 260), (0, 64), (767, 768)])
        assert made.rows.pinned_chunks == 4
        found = reply(made, tokens)
        assert [made.rows.chosen(layer) for layer in range(4)] == [[3, 4, 10, 11]] * 4
        for end, logits in found.items():
            assert np.abs(logits - wanted[end]).max() < 0.1 < np.abs(logits - exact[end]).max() / 10
        # One place is left for each layer's choice, and then all four are.
        made.rows.rewind(0, N_PROMPT)
        made.rows.pin([(200, 260), (700, 701), (1290, 1300)])
        assert different(reply(made, tokens), found)
        assert all({3, 4, 10} < set(made.rows.chosen(layer)) for layer in range(4))
        made.rows.rewind(0, N_PROMPT)
        made.rows.pin([])
        reply(made, tokens)
        assert any(not {3, 4, 10} & set(made.rows.chosen(layer)) for layer in range(4))


@pytest.mark.parametrize("block", [4, 8, 64])
def test_chunks_are_those_that_queries_look_at_most(tmp_path: Path, store: Callable[..., Store], block: int) -> None:
    """Of the first layer, whose queries follow from the token alone; against the same in numpy."""
    shape = replace(TINY_DENSE, name="tiny-two", num_heads=6, num_kv_heads=2, num_layers=2)
    path = cached_model(shape, tmp_path)
    weights = {tensor.name: np.array(tensor.data, np.float32) for tensor in GGUFReader(path).tensors}
    tokens = tokens_of(8, N)
    chosen, n_sure = {}, 0
    for kv in ("f16", "q8_0"):
        made = store("tiny-two", kv, resident=[0], n_ctx=2000, select={**FEW, "block": block}, path=path)
        prompt_of(made, tokens)
        rows = made.backend.memory.save_rows(0, 0, N_PROMPT).block
        made.rows.finish()
        for start in range(N_PROMPT, N, 2):
            made.evaluate(tokens[start : start + 2], start, select=True)
            chosen[kv, start] = made.rows.chosen(0)
            if kv == "f16":
                keys = rows[64 : 64 + N_PROMPT * 256].view(np.float16).astype(np.float32).reshape(-1, 2, 64)
                queries = np.stack([query_of(weights, int(tokens[at]), at) for at in (start, start + 1)])
                shares = shares_of(queries, keys[64 : (start - 100) // CHUNK * CHUNK], block)
                order = np.argsort(-shares, kind="stable")
                assert len(chosen[kv, start]) == 4
                least = shares[np.array(chosen[kv, start]) - 1].min()
                assert least > 0.9 * shares[order[3]]
                n_sure += sorted(order[:4] + 1) == chosen[kv, start]
    assert n_sure >= 8
    assert len({tuple(each) for each in chosen.values()}) > 5
    same = [len({*chosen["f16", at]} & {*chosen["q8_0", at]}) for at in range(N_PROMPT, N, 2)]
    assert sum(same) >= 0.85 * 4 * len(same)


def test_heads_that_means_cannot_have_are_refused(tmp_path: Path, store: Callable[..., Store]) -> None:
    path = cached_model(replace(TINY_DENSE, name="tiny-odd", head_size=48, rope_size=48), tmp_path)
    with pytest.raises(RuntimeError, match="heads of 48"):
        store("tiny-odd", resident=[0], select=FEW, path=path)


def query_of(weights: dict[str, np.ndarray], token: int, position: int) -> np.ndarray:
    """The queries of the first layer, shape (heads, elements)."""

    def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight)

    hidden = normed(weights["token_embd.weight"][token], weights["blk.0.attn_norm.weight"])
    heads = (weights["blk.0.attn_q.weight"] @ hidden).reshape(-1, 64)
    heads = normed(heads, weights["blk.0.attn_q_norm.weight"])
    angles = position * 1e6 ** (-np.arange(0, 64, 2) / 64)
    low, high = heads[:, :32], heads[:, 32:]
    return np.concatenate(
        [low * np.cos(angles) - high * np.sin(angles), low * np.sin(angles) + high * np.cos(angles)], axis=1
    )


def shares_of(queries: np.ndarray, keys: np.ndarray, block: int) -> np.ndarray:
    """What each chunk of ``keys`` gets; queries of shape (tokens, heads, elements), keys (rows, heads, elements)."""
    means = keys.reshape(-1, block, 2, 64).mean(1)
    weights = np.einsum("thd,nhd->thn", queries, means.repeat(3, axis=1)) / 8
    best = weights.reshape(*weights.shape[:2], -1, CHUNK // block).max(-1)
    shares = np.exp(best - best.max(-1, keepdims=True))
    return np.asarray((shares / shares.sum(-1, keepdims=True)).max((0, 1)))


def test_what_makes_no_sense_is_refused(chooser: Callable[..., Store], store: Callable[..., Store]) -> None:
    wrong: list[dict[str, int]] = [
        {"select_rows": 63}, {"select_rows": -1}, {"sinks": -1}, {"tail": -1}, {"block": 0}, {"block": 5},
        {"block": 128}, {"select_batch": 0},
    ]  # fmt: skip
    for fields in wrong:
        with pytest.raises(ValueError, match="nothing can be chosen"):
            chooser("tiny-dense", resident=[0], **fields)
    made = chooser("tiny-dense", resident=[0])
    for ranges in (
        [(-1, 4)],
        [(5, 5)],
        [(7, 6)],
        [(0, 2049)],
        [(64, 64 * 6)],
        [(100 * i, 100 * i + 1) for i in range(1, 6)],
    ):
        with pytest.raises(ValueError, match=r"no room to pin 5|not a range"):
            made.rows.pin(ranges)
    assert made.rows.pinned_chunks == 0
    with pytest.raises(IndexError):
        made.rows.chosen(4)
    plain = store("tiny-dense", resident=[0])
    with pytest.raises(ValueError, match="attends to all"):
        plain.rows.pin([])
    with pytest.raises(StateError):
        plain.evaluate(tokens_of(1, 1), 0, select=True)
    assert plain.rows.selected_chunks == plain.rows.select_bytes == 0


def test_a_stopped_evaluation_leaves_the_rows_before_it(chooser: Callable[..., Store]) -> None:
    tokens = tokens_of(9, N)
    made = prompt_of(chooser("tiny-dense", resident=[1]), tokens)
    wanted = reply(made, tokens)
    made.rows.rewind(0, N_PROMPT + 7)
    stops = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _: True)
    api.llama_set_abort_callback(made.backend._ctx, ctypes.cast(stops, type(api.ggml_abort_callback())), None)
    batch = made.backend._batch
    batch.fill(0, tokens[N_PROMPT + 7 : N_PROMPT + 8], N_PROMPT + 7)
    assert made.rows.decode(ctypes.addressof(batch.struct), select=True) == 2
    assert made.rows.n_rows == N_PROMPT + 7
    made.backend.control.pulse.attach(ctypes.cast(made.backend._ctx, ctypes.c_void_p).value or 0)
    assert_same(reply(made, tokens, N_PROMPT + 7), wanted)


def test_sizes_are_what_they_say(chooser: Callable[..., Store], store: Callable[..., Store]) -> None:
    """K and V of one row have 128 bytes each; buffers have 4,096 more."""
    for resident in ([0, 1, 2, 3], [1]):
        made = chooser("tiny-dense", resident=resident)
        plain = store("tiny-dense", resident=resident, n_ctx=2000)
        assert made.rows.device_bytes - plain.rows.device_bytes == made.rows.select_bytes
        slack, slots = 4096, (1 + 4 + 4) * CHUNK
        means = 4 * (2048 // 4 * 68 + slack)
        read = 2 * (768 * 128 + slack)
        streams = (4 - len(resident)) * 2 * (slots * 128 + slack)
        landing = 4096 * 128 + slack if len(resident) < 4 else 0
        work = made.rows.select_bytes - (means + read + streams + landing) - 9 * 4 - 8 * 8
        assert 0 < work < 4 * 2**20
    assert chooser("tiny-dense", resident=[0], block=8).rows.select_bytes < made.rows.select_bytes

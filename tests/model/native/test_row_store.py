"""Rows outside of llama.cpp's cache: logits, blocks and states are bit-identical to those of a full
cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from llama_cpp import llama_cpp as api

from pyctl.cache.snapshot import Block
from pyctl.engine.backend import SequenceTokens
from pyctl.errors import OutOfCellsError, StateError
from pyctl.llama.library.native import KVState, RowStore, checked
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.prompt import Tokens, as_tokens
from tests.model.given_model import GivenModel
from tests.model.native.stores import ENDS, N, Store, assert_same, evaluate_on, run, tokens_of

LAYOUTS = [
    (name, kv)
    for name in ("tiny-hybrid", "tiny-moe", "tiny-dense")
    for kv in ("f16", "q8_0", "q4_0")
]


def n_layers(name: str) -> int:
    return 4 if name == "tiny-dense" else 2


def cold(backend: LlamaBackend, tokens: Tokens, ends: list[int] = ENDS) -> dict[int, np.ndarray]:
    backend.memory.clear(0)
    return run(evaluate_on(backend), tokens, 0, ends)


@pytest.mark.parametrize(("name", "kv"), LAYOUTS)
def test_logits_blocks_and_states_are_those_of_a_full_cache(
    full: Callable[[str, str], LlamaBackend], store: Callable[..., Store], name: str, kv: str
) -> None:
    """Rows outside of the context, resident or streamed, give the logits, blocks and states of a
    context that holds them all.
    """
    tokens = tokens_of(1)
    reference = full(name, kv)
    wanted = cold(reference, tokens)
    rows = reference.memory.save_rows(0, 0, N).block
    state = reference.memory.save_state(0, N).recurrent
    n = n_layers(name)
    for resident, stages, lag in (([*range(n)], 2, 0), ([n - 1], 2 if n > 2 else 1, 1), ([], 1, 0)):
        made = store(name, kv, resident=resident, stages=stages, lag=lag)
        assert made.backend.memory.layout == reference.memory.layout
        assert_same(made.run(tokens), wanted)
        assert made.rows.n_tokens(0) == N
        assert api.llama_memory_seq_pos_max(api.llama_get_memory(made.backend.ctx), 0) == N - 1
        saved = made.backend.memory.save_rows(0, 0, N).block
        made.rows.finish()
        assert (saved == rows).all()
        assert (
            made.backend.memory.save_rows(0, 300, 301).block[64:]
            == reference.memory.save_rows(0, 300, 301).block[64:]
        ).all()
        assert (made.backend.memory.save_state(0, N).recurrent == state).all()
        streams_often = n - len(resident) > stages  # else each layer has a stage of its own
        assert (made.store.streamed_bytes > 0) == streams_often


@pytest.mark.parametrize(
    ("name", "kv"),
    [("tiny-hybrid", "q8_0"), ("tiny-hybrid", "f16"), ("tiny-moe", "q4_0"), ("tiny-dense", "q8_0")],
)
def test_conversations_take_turns_and_go_back(
    full: Callable[[str, str], LlamaBackend], store: Callable[..., Store], name: str, kv: str
) -> None:
    """Restored from blocks of either kind, rewound, with part of the rows there: always the bits of
    a cold run.
    """
    reference = full(name, kv)
    made = store(name, kv, resident=[0], stages=1 if name == "tiny-moe" else 2)
    prompts = [tokens_of(seed) for seed in (1, 2)]
    wanted = [cold(reference, prompt) for prompt in prompts]
    chains: list[list[tuple[Block, int, int]]] = [[], []]
    states: list[dict[int, Block]] = [{}, {}]
    for i, (source, evaluate) in enumerate(
        [(made.backend, made.evaluate), (reference, evaluate_on(reference))]
    ):
        source.memory.clear(0)
        for start, cut in ((0, 256), (256, 450), (450, 590)):
            assert_same(run(evaluate, prompts[i][:cut], start, ENDS), wanted[i])
            chains[i].append((source.memory.save_rows(0, start, cut).block, start, cut))
            states[i][cut] = source.memory.save_state(0, cut).recurrent
    for i, n, kept in [
        (1, 450, 0),
        (0, 590, 0),
        (0, 256, 256),
        (1, 590, 0),
        (1, 450, 333),
        (0, 450, 0),
    ]:
        if kept:
            made.rows.rewind(0, kept)
        else:
            made.rows.clear(0)
        made.resume(n, chains[i], states[i][n])
        assert made.rows.n_tokens(0) == n
        assert_same(made.run(prompts[i], n, [end for end in ENDS if end <= n + 100]), wanted[i])


def test_drafts_are_taken_back(store: Callable[..., Store]) -> None:
    """Drafts are taken back by a cut if the model has attention only, and else by a return to a
    mark.
    """
    tokens = tokens_of(3, 300)
    dense = store("tiny-dense", resident=[1])
    wanted = dense.run(tokens, ends=[96, 192, 258, 300])
    dense.rows.rewind(0, 192)
    dense.evaluate(as_tokens([5] * 70), 192)
    assert dense.rows.cut(0, 230)
    assert dense.rows.n_tokens(0) == 230
    dense.rows.rewind(0, 192)
    assert_same(dense.run(tokens, 192, [258, 300]), wanted)

    hybrid = store("tiny-hybrid", resident=[1], marks=True)
    wanted = hybrid.run(tokens, ends=[96, 192, 258, 300])
    hybrid.rows.clear(0)
    hybrid.run(tokens[:192], ends=[96, 192])
    hybrid.rows.mark(0, 192)
    hybrid.evaluate(as_tokens([5] * 70), 192)
    assert hybrid.rows.reset(0) == 192
    assert hybrid.rows.n_tokens(0) == 192
    assert_same(hybrid.run(tokens, 192, [258, 300]), wanted)


def test_more_rows_than_cells_one_token_at_a_time(
    full: Callable[[str, str], LlamaBackend], store: Callable[..., Store]
) -> None:
    tokens = tokens_of(4, 520)
    ends = [90, *range(91, 521)]
    made = store("tiny-dense", resident=[0, 1, 2], stages=1)
    assert made.backend.facts.n_cells == 256
    wanted = cold(full("tiny-dense", "f16"), tokens, ends)
    assert_same(made.run(tokens, ends=ends), wanted)
    assert made.store.streamed_bytes == 0


def test_the_library_has_its_own_graph_back(
    full: Callable[[str, str], LlamaBackend], store: Callable[..., Store]
) -> None:
    """Beside an evaluation of the store, and after it."""
    tokens = tokens_of(10, 140)
    ends = [96, *range(97, 141)]
    wanted = cold(full("tiny-dense", "f16"), tokens, ends)
    made = store("tiny-dense", resident=[0, 1, 2, 3])
    backend = made.backend
    memory = api.llama_get_memory(made.backend.ctx)
    assert_same(made.run(tokens, ends=ends), wanted)

    def own(part: Tokens, start: int) -> np.ndarray:
        batch = backend.batch
        batch.fill(0, part, start)
        assert api.llama_decode(backend.ctx, batch.struct) == 0
        return backend.logits(0)

    api.llama_memory_clear(memory, True)
    assert_same(
        run(own, tokens, 0, [1, 2, 3]),
        run(evaluate_on(full("tiny-dense", "f16")), tokens, 0, [1, 2, 3]),
    )
    api.llama_memory_clear(memory, True)
    made.rows.clear(0)
    assert_same(made.run(tokens, ends=ends), wanted)
    kv_state = KVState(ctypes.cast(backend.ctx, ctypes.c_void_p).value or 0)
    backend.memory.attach(kv_state, backend.facts, n_state_history=0)
    del kv_state
    backend.memory.store = None
    api.llama_memory_clear(memory, True)
    assert_same(
        run(own, tokens, 0, [1, 2, 3]),
        run(evaluate_on(full("tiny-dense", "f16")), tokens, 0, [1, 2, 3]),
    )


def test_large_restores_are_right(store: Callable[..., Store]) -> None:
    """Enough bytes that several threads copy them."""
    n = 23_000
    made = store("tiny-dense", resident=[2], n_ctx=23_001)
    block = np.empty(made.rows.rows_size(0, n), np.uint8)
    block[:64] = made_header(made, n)
    block[64:] = np.random.default_rng(5).integers(0, 60, block.size - 64, dtype=np.uint8)
    made.rows.load(0, 0, [(block, 0, 11_111), (block, 11_111, n)])
    saved = made.backend.memory.save_rows(0, 0, n).block
    made.rows.finish()
    assert (saved == block).all()
    assert made.rows.n_free == 1
    part = made.backend.memory.save_rows(0, 22_998, n).block
    assert (part[64 : 64 + 256] == block[64 + 22_998 * 128 :][:256]).all()


def made_header(made: Store, n: int) -> np.ndarray:
    """Return the header of a block of rows [0, n)."""
    made.evaluate(as_tokens([1]), 0)
    header = made.backend.memory.save_rows(0, 0, 1).block[:64].copy()
    header[24:32] = np.frombuffer(np.int64(n).tobytes(), np.uint8)
    made.rows.clear(0)
    return header


def test_what_does_not_fit_is_refused(store: Callable[..., Store]) -> None:
    """Calls without room, with wrong ranges or foreign blocks are refused and change nothing: the
    store then restores and evaluates as before.
    """
    made = store("tiny-hybrid", resident=[0], n_ctx=300)
    tokens = tokens_of(6, 300)
    wanted = made.run(tokens, ends=[96, 192, 288, 300])
    block = made.backend.memory.save_rows(0, 0, 300).block
    state = made.backend.memory.save_state(0, 300)
    with pytest.raises(OutOfCellsError):
        made.evaluate(tokens[:1], 300)
    with pytest.raises(OutOfCellsError):
        checked(made.rows.reserve, 1)
    made.rows.rewind(0, 288)
    for first, span in (
        (0, (block, 0, 300)),
        (288, (block, 289, 300)),
        (288, (block[:-1], 288, 300)),
    ):
        with pytest.raises(StateError):
            checked(made.rows.load, 0, first, [span])
    held = checked(made.rows.hold, 0, 0, 288)
    made.rows.release(held)
    for rows in (held, held + 1000):
        with pytest.raises(StateError):
            checked(made.rows.load, 0, 288, [(rows, 288, 300)])  # nothing is held here
    for first, last in ((0, 289), (5, 5), (-1, 3)):
        with pytest.raises(StateError):
            checked(made.rows.hold, 0, first, last)
    with pytest.raises(StateError):
        checked(made.rows.add_image, 0, 2, 4)
    with pytest.raises(StateError):
        checked(made.rows.save_rows, 0, 0, 300, block)
    with pytest.raises(StateError):
        checked(made.rows.save_rows, 0, 0, 288, block)
    image = block.copy()
    image[64 + 290 * 12 :][:12] = np.frombuffer(
        np.array([290, 290, -1], np.int32).tobytes(), np.uint8
    )
    with pytest.raises(StateError, match="images"):
        checked(made.rows.load, 0, 288, [(image, 288, 300)])
    assert made.rows.n_tokens(0) == 288
    assert made.rows.n_held == 0
    made.resume(300, [(block, 0, 300)], state.recurrent)
    made.rows.clear(0)
    assert_same(made.run(tokens, ends=[96, 192, 288, 300]), wanted)


@pytest.mark.parametrize(("name", "lag"), [("tiny-hybrid", 0), ("tiny-moe", 2), ("tiny-dense", 1)])
def test_held_rows_stay_in_their_places(store: Callable[..., Store], name: str, lag: int) -> None:
    """Beside another conversation: what that overwrites comes back from a copy, the rest was never
    moved.
    """
    made = store(name, "q8_0", resident=[1], lag=lag)
    tokens = tokens_of(12)
    other = tokens_of(13, 192)
    more = tokens_of(14, 96)
    beside = made.run(other, ends=[96, 192])
    made.rows.clear(0)
    made.run(tokens)
    rows = made.backend.memory.save_rows(0, 0, N).block
    state = made.backend.memory.save_state(0, N).recurrent
    low, high, inside = (
        checked(made.rows.hold, 0, *span) for span in ((0, 254), (254, N), (300, 310))
    )
    assert made.rows.n_held == 0
    assert made.rows.n_own(high, 254, N) == 0
    assert made.rows.n_free == 400
    wanted = made.evaluate(more, N)
    made.rows.clear(0)
    assert made.rows.n_held == N
    assert made.rows.n_own(low, 0, 254) == 254
    assert made.rows.n_own(high, 254, N) == N - 254 - 10
    assert made.rows.n_free == 400
    with pytest.raises(OutOfCellsError):
        checked(made.rows.reserve, 1)
    with pytest.raises(OutOfCellsError):
        made.evaluate(other[:96], 0)
    with pytest.raises(OutOfCellsError):
        checked(made.rows.load, 0, 0, [(rows, 0, 100)])
    with pytest.raises(StateError):
        checked(made.rows.load, 0, 0, [(high, 254, N)])  # they do not begin there
    copy, part = (np.empty(made.rows.rows_size(*span), np.uint8) for span in ((0, 254), (300, 500)))
    checked(made.rows.fetch, low, 0, 254, copy)
    made.rows.release(low)
    assert made.rows.n_free == 654
    assert made.rows.n_own(low, 0, 254) == 0
    assert_same(made.run(other, ends=[96, 192]), beside)
    with pytest.raises(OutOfCellsError):
        made.evaluate(other[:96], 192)
    checked(made.rows.fetch, high, 300, 500, part)
    for span in ((253, 453), (401, 601)):
        with pytest.raises(StateError):
            checked(made.rows.fetch, high, *span, part)
    made.rows.clear(0)
    made.resume(N, [(copy, 0, 254), (high, 254, N)], state)
    again = made.backend.memory.save_rows(0, 0, N).block
    there = made.backend.memory.save_rows(0, 300, 500).block
    made.rows.finish()
    assert (again == rows).all()
    assert (there == part).all()
    assert_same({N: made.evaluate(more, N)}, {N: wanted})
    made.rows.release(high)
    made.rows.clear(0)
    assert made.rows.n_held == 10
    assert made.rows.n_own(inside, 300, 310) == 10


def test_only_what_follows_is_evaluated(store: Callable[..., Store]) -> None:
    made = store("tiny-dense", resident=[0])
    tokens = tokens_of(7, 100)
    wanted = made.run(tokens, ends=[90, 100])
    batch = made.backend.batch
    for items in ([(0, 1, 99)], [(0, 1, 101)], [(0, 1, 100), (0, 1, 102)], []):
        made.backend.batch.fill_all([SequenceTokens(seq, (token,), at) for seq, token, at in items])
        batch.struct.n_tokens = len(items)
        with pytest.raises(StateError):
            checked(made.store.decode, ctypes.addressof(batch.struct))
    assert made.rows.n_tokens(0) == 100
    made.rows.rewind(0, 90)
    assert_same(made.run(tokens, 90, [100]), wanted)


def stop_within(made: Store, tokens: Tokens, first: int, last: int) -> None:
    """Have the evaluation of tokens [first, last) stopped; later ones are not."""
    stops = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _: True)
    api.llama_set_abort_callback(
        made.backend.ctx, ctypes.cast(stops, type(api.ggml_abort_callback())), None
    )
    batch = made.backend.batch
    batch.fill(0, tokens[first:last], first)
    assert made.store.decode(ctypes.addressof(batch.struct)) == 2
    assert made.rows.n_tokens(0) == first
    made.backend.control.pulse.attach(ctypes.cast(made.backend.ctx, ctypes.c_void_p).value or 0)


def test_a_stopped_evaluation_leaves_the_rows_before_it(store: Callable[..., Store]) -> None:
    made = store("tiny-dense", resident=[1])
    tokens = tokens_of(8, 200)
    wanted = made.run(tokens, ends=[96, 192, 200])
    made.rows.rewind(0, 96)
    stop_within(made, tokens, 96, 192)
    assert_same(made.run(tokens, 96, [192, 200]), wanted)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"flash_attn": "off"}, "flash attention"),
        ({"n_seqs": 2}, "more than one sequence"),
        ({"kv": "f32"}, "f32"),
    ],
)
def test_contexts_that_it_cannot_serve_are_refused(
    store: Callable[..., Store], fields: dict[str, object], why: str
) -> None:
    with pytest.raises(RuntimeError, match=why):
        store("tiny-dense", resident=[0], **fields)


def test_a_memory_without_rows_is_refused(model_path: Callable[[str], object]) -> None:
    """A memory with a stream of cells for each sequence is refused."""
    model = api.llama_model_load_from_file(
        str(model_path("tiny-dense")).encode(), api.llama_model_default_params()
    )
    params = api.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_ubatch, params.n_threads, params.kv_unified = (
        512,
        2,
        64,
        1,
        False,
    )
    backend = LlamaBackend(GivenModel(model, api.llama_init_from_model(model, params)))
    backend.evaluate(0, as_tokens([1]), 0)
    with pytest.raises(RuntimeError, match="no rows"):
        RowStore(KVState(ctypes.cast(backend.ctx, ctypes.c_void_p).value or 0), 1000, [0])
    backend.unload()


def test_a_store_without_rows_is_refused(store: Callable[..., Store]) -> None:
    with pytest.raises(ValueError, match="cannot be made"):
        store("tiny-dense", resident=[0], n_ctx=0)


def test_buffers_live_until_their_copies_are_complete(store: Callable[..., Store]) -> None:
    made = store("tiny-hybrid", "q8_0", resident=[0], lag=3)
    assert made.rows.is_async
    tokens = tokens_of(9, 200)
    wanted = made.run(tokens, ends=[96, 192, 200])
    made.rows.clear(0)
    assert_same(made.run(tokens, ends=[96, 192, 200]), wanted)
    block = made.backend.memory.save_rows(0, 0, 200).block
    assert made.rows.in_flight_bytes >= block.size
    made.rows.finish()
    assert made.rows.in_flight_bytes == 0

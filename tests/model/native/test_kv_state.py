"""The extension on tiny models: saved and loaded rows and states give bit-identical logits."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_cpp import llama_cpp as api

from pyctl.cache.snapshot import Rows, State
from pyctl.errors import OutOfCellsError, StateError
from pyctl.llama.library.native import checked
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded
from pyctl.llama.memory.shared_windows import WindowForm, WindowPiece, WindowRows
from pyctl.prompt import Tokens, as_tokens
from tests.effort import examples
from tests.model.native.stores import assert_same

LAYOUTS = [
    pytest.param(
        (name, {"type_k": kv, "type_v": kv, "flash_attn": flash}), id=f"{name}-{kv}-flash-{flash}"
    )
    for name in ("tiny-hybrid", "tiny-moe", "tiny-dense")
    for kv, flash in (("f16", "on"), ("q8_0", "on"), ("f16", "off"))
]
SEVERAL_PARTS = [
    pytest.param((name, {"type_k": kv, "type_v": kv, "flash_attn": "on"}), id=f"{name}-{kv}")
    for name in (
        *(
            "tiny-minimax-m3",
            "tiny-deepseek32",
            "tiny-qwen4exp",
            "tiny-glm5-next",
            "tiny-gemma3",
            "tiny-gpt-oss",
        ),
        *("tiny-llama4", "tiny-lfm2-window", "tiny-dots3note"),
    )
    for kv in ("f16", "q8_0")
]
"""Memories of several caches: rows of attention and of an indexer, or the rows of a window."""

N = 700
STEP = 64


@pytest.fixture
def backend(open_model: Callable[..., Loaded], request: pytest.FixtureRequest) -> LlamaBackend:
    name, options = request.param
    return open_model(name, **options).backend


Ready = tuple[LlamaBackend, Tokens, dict[int, np.ndarray]]
"""A backend that stands at 300, the prompt, and the logits of a cold run."""

each_layout = pytest.mark.parametrize("backend", LAYOUTS, indirect=True)
one_hybrid = pytest.mark.parametrize("backend", LAYOUTS[:1], indirect=True)


def tokens_of(seed: int, n: int = N) -> Tokens:
    return as_tokens(np.random.default_rng(seed).integers(0, 256, n))


def ends_of(cuts: list[int], n: int = N) -> list[int]:
    """Return batch ends that hit every cut: a grid, and the cuts."""
    ends = []
    last = 0
    for stop in [*sorted(set(cuts)), n]:
        while last + STEP < stop:
            last += STEP
            ends.append(last)
        if stop > last:
            last = stop
            ends.append(last)
    return ends


def run(
    backend: LlamaBackend, tokens: Tokens, ends: list[int], start: int = 0
) -> dict[int, np.ndarray]:
    """Evaluate from ``start`` on; the logits at every batch end."""
    found = {}
    for end in ends:
        if end > start:
            backend.evaluate(0, tokens[start:end], start)
            found[end] = backend.logits(0)
            start = end
    return found


def library_state(backend: LlamaBackend) -> np.ndarray:
    """llama.cpp's own copy of sequence 0: positions and rows in the order of their cells, and the
    recurrent state.
    """
    backend.memory.kv.reserve(0)  # llama.cpp learns of what was dropped when it is to take cells
    found = np.empty(api.llama_state_seq_get_size(backend.ctx, 0), np.uint8)
    pointer = found.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    assert api.llama_state_seq_get_data(backend.ctx, pointer, found.size, 0) == found.size
    return found


def put_state(backend: LlamaBackend, n: int, states: dict[int, State]) -> None:
    if backend.memory.kind == "hybrid":
        backend.memory.restore(0, n, (), states[n])


@each_layout
@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_continued_rewound_and_restored_equal_cold(
    backend: LlamaBackend, data: st.DataObject
) -> None:
    tokens = tokens_of(data.draw(st.integers(0, 99), label="prompt"))
    cuts = sorted(data.draw(st.sets(st.integers(1, N - 1), min_size=1, max_size=6), label="cuts"))
    rewound, restored = (
        data.draw(st.sampled_from(cuts), label=label) for label in ("rewound to", "restored to")
    )
    check_resumed(
        backend, tokens, cuts, rewound, restored, data.draw(st.integers(0, restored), label="kept")
    )


@pytest.mark.parametrize("backend", SEVERAL_PARTS, indirect=True)
def test_a_memory_of_several_parts_goes_on_as_a_cold_run(backend: LlamaBackend) -> None:
    tokens = tokens_of(5)
    cuts = [40, 64, 201, 333, 500, 641]
    for rewound, restored, keep in ((641, 40, 0), (201, 641, 150), (500, 333, 333), (333, 500, 0)):
        check_resumed(backend, tokens, cuts, rewound, restored, keep)


def check_resumed(
    backend: LlamaBackend, tokens: Tokens, cuts: list[int], rewound: int, restored: int, keep: int
) -> None:
    """Saved at ``cuts``, rewound to one of them, restored to another of which ``keep`` live rows
    stay.
    """
    ends = ends_of(cuts)
    backend.memory.clear(0)
    cold = run(backend, tokens, ends)

    # Again, saving at the cuts: taking snapshots must not change a thing.
    backend.memory.clear(0)
    chain = []
    states = {}
    whole = {}
    start = 0
    for cut in cuts:
        before = [end for end in ends if start < end <= cut]
        assert_same(run(backend, tokens, before, start), cold)
        chain.append((backend.memory.save_rows(0, start, cut).block, start, cut))
        states[cut] = backend.memory.save_state(0, cut)
        whole[cut] = library_state(backend)
        start = cut
    assert_same(run(backend, tokens, ends, start), cold)

    # Rewound in place: rows stay, only the state comes back.
    backend.memory.rewind(0, rewound)
    put_state(backend, rewound, states)
    assert_same(run(backend, tokens, ends, rewound), cold)

    # Restored: some live rows are kept, the rest comes from the chain, cut wherever that falls.
    backend.memory.rewind(0, keep)
    backend.memory.restore(
        0, keep, [(Rows(rows), max(a, keep), b) for rows, a, b in chain if keep < b <= restored]
    )
    put_state(backend, restored, states)
    again = backend.memory.save_state(0, restored)
    backend.memory.synchronize()
    assert (again.recurrent == states[restored].recurrent).all()
    if not backend.memory.kv.window[
        0
    ]:  # else the library also writes a row that no later token sees
        assert (library_state(backend) == whole[restored]).all()
    assert_same(run(backend, tokens, ends, restored), cold)


@each_layout
def test_a_chain_of_many_segments_equals_one_whole(backend: LlamaBackend) -> None:
    tokens = tokens_of(1)
    run(backend, tokens, ends_of([]))
    whole = backend.memory.save_rows(0, 0, N).block
    pieces = [
        (backend.memory.save_rows(0, a, min(a + 7, N)), a, min(a + 7, N)) for a in range(0, N, 7)
    ]
    backend.memory.rewind(0, 0)
    backend.memory.restore(0, 0, pieces)
    assert (backend.memory.save_rows(0, 0, N).block == whole).all()
    backend.memory.rewind(0, 0)
    backend.memory.restore(0, 0, [(Rows(whole), 0, 300), (Rows(whole), 300, N)])
    assert (backend.memory.save_rows(0, 0, N).block == whole).all()


HEADER = struct.Struct("<4sIQqq32s")


def fnv1a(text: str) -> int:
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


@each_layout
def test_blocks_have_the_bytes_that_files_hold(backend: LlamaBackend) -> None:
    """csrc/core/block.h: files of earlier releases stay readable only as long as this does not
    change.
    """
    run(backend, tokens_of(6), [40])
    layout = re.fullmatch(
        r"(attention|hybrid) ext=([01]) transposed=([01]) k=(\S+) v=(\S+) state=(\S*)",
        backend.memory.layout,
    )
    assert layout is not None
    tensors = [
        tuple(map(int, part)) for part in re.findall(r"\d+:(\d+)x(\d+),", layout[4] + layout[5])
    ]
    assert layout[3] == ("1" if any(n_runs > 1 for _, n_runs in tensors) else "0")

    first = 10
    last = 30
    n = last - first
    block = backend.memory.save_rows(0, first, last).block
    assert HEADER.unpack(block[:64].tobytes()) == (
        b"ROWS",
        1,
        fnv1a(backend.memory.layout),
        first,
        last,
        bytes(32),
    )
    single = backend.memory.save_rows(0, 13, 14).block[64:]
    at = 64
    further_positions = [(12, 1)] if layout[2] == "1" else []
    for row, n_runs in further_positions + tensors:
        runs = block[at : at + n_runs * n * row].reshape(n_runs, n, row)
        assert (runs[:, 3] == single[: n_runs * row].reshape(n_runs, row)).all()
        single = single[n_runs * row :]
        at = at + runs.size
    assert at == block.size
    assert single.size == 0

    if backend.memory.kind == "hybrid":
        state = backend.memory.save_state(0, 40).recurrent
        assert HEADER.unpack(state[:64].tobytes()) == (
            b"STAT",
            1,
            fnv1a(backend.memory.layout),
            0,
            40,
            bytes(32),
        )
        assert state.size == 64 + sum(map(int, layout[6].split(",")[:-1]))


@one_hybrid
def test_two_prompts_do_not_mix(backend: LlamaBackend) -> None:
    """A prompt restored over the cells of another one goes on with the bits of its own cold run."""
    first = tokens_of(2)
    second = tokens_of(3)
    ends = ends_of([350])
    cold = {}
    for tokens in (first, second):
        backend.memory.clear(0)
        cold[tokens.tobytes()] = run(backend, tokens, ends)
    backend.memory.clear(0)
    run(backend, first, [end for end in ends if end <= 350])
    rows = backend.memory.save_rows(0, 0, 350).block
    state = backend.memory.save_state(0, 350)
    backend.memory.clear(0)
    run(backend, second, ends)
    backend.memory.rewind(0, 0)
    backend.memory.restore(0, 0, [(Rows(rows), 0, 350)])
    backend.memory.restore(0, 350, (), state)
    assert_same(run(backend, first, ends, 350), cold[first.tobytes()])


@pytest.mark.parametrize("keep", [0, 100])
@each_layout
def test_a_prefix_is_its_rows_and_its_state(backend: LlamaBackend, keep: int) -> None:
    tokens = tokens_of(8)
    ends = ends_of([100, 350])
    cold = run(backend, tokens, ends)
    backend.memory.clear(0)
    run(backend, tokens, [end for end in ends if end <= 350])
    rows = backend.memory.save_rows(0, 0, 350).block
    state = backend.memory.save_state(0, 350)
    cells = library_state(backend)
    if not keep:
        backend.memory.clear(0)
        run(backend, tokens_of(9), ends)
    backend.memory.rewind(0, keep)
    backend.memory.restore(0, keep, [(Rows(rows), keep, 350)], state)
    assert (library_state(backend) == cells).all()
    assert_same(run(backend, tokens, ends, 350), cold)


def test_a_prefix_without_cells_leaves_nothing(open_model: Callable[..., Loaded]) -> None:
    """A restore for which cells lack empties its own sequence and leaves the others alone; with
    room, the same blocks restore to the bit.
    """
    large = open_model("tiny-hybrid").backend
    tokens = tokens_of(5, 200)
    large.memory.clear(0)
    cold = run(large, tokens, ends_of([], 200))
    rows = large.memory.save_rows(0, 0, 200).block
    state = large.memory.save_state(0, 200)
    small = open_model("tiny-hybrid", n_ctx=256, n_seqs=2).backend
    run(small, tokens, [64])
    for start in (0, 64):
        small.evaluate(1, tokens[start : start + 64], start)
    with pytest.raises(OutOfCellsError):
        small.memory.restore(0, 64, [(Rows(rows), 64, 200)], state)
    assert small.memory.cells.n_tokens(0) == 0
    assert small.memory.cells.n_tokens(1) == 128
    small.memory.clear(1)
    small.memory.restore(0, 0, [(Rows(rows), 0, 200)], state)
    small.memory.clear(0)
    assert_same(run(small, tokens, ends_of([], 200)), cold)


class TestRefusals:
    """Bad calls raise before anything changes: afterwards the sequence goes on as if they had not
    been made.
    """

    @pytest.fixture
    def ready(self, open_model: Callable[..., Loaded]) -> Iterator[Ready]:
        backend = open_model("tiny-hybrid").backend
        tokens = tokens_of(4)
        backend.memory.clear(0)
        cold = run(backend, tokens, ends_of([300]))
        backend.memory.clear(0)
        run(backend, tokens, [end for end in ends_of([300]) if end <= 300])
        yield backend, tokens, cold
        assert_same(run(backend, tokens, ends_of([300]), 300), cold)

    def test_short_buffers(self, ready: Ready) -> None:
        """A buffer too small to save into, or a block too short to load, is refused with the size
        it needs.
        """
        memory = ready[0].memory.kv
        with pytest.raises(ValueError, match="need a buffer of"):
            memory.save_rows(0, 0, 300, bytearray(memory.rows_size(0, 300) - 1))
        with pytest.raises(ValueError, match="the state needs a buffer of"):
            memory.save_state(0, 300, bytearray(5))
        with pytest.raises(StateError, match="shorter than its header"):
            ready[0].memory.restore(0, 300, [(Rows(np.zeros(8, np.uint8)), 300, 301)])
        with pytest.raises(StateError, match="shorter than its header"):
            checked(memory.load, 0, 300, [], np.empty(0, np.uint8))
        with pytest.raises(StateError, match=r"has \d+ bytes, not"):
            ready[0].memory.restore(
                0, 300, [(Rows(ready[0].memory.save_rows(0, 0, 300).block[:-1]), 0, 300)]
            )
        with pytest.raises(StateError, match=r"a state has \d+ bytes"):
            ready[0].memory.restore(
                0, 300, (), State.from_parts(ready[0].memory.save_state(0, 300).recurrent[:-4])
            )

    def test_readonly_and_strided_buffers(self, ready: Ready) -> None:
        memory = ready[0].memory.kv
        size = memory.rows_size(0, 10)
        with pytest.raises((ValueError, BufferError)):
            memory.save_rows(0, 0, 10, bytes(size))
        with pytest.raises(ValueError, match="not contiguous"):
            memory.save_rows(0, 0, 10, np.zeros(2 * size, np.uint8)[::2])

    @pytest.mark.parametrize(
        ("first", "last"), [(-1, 10), (10, 10), (200, 100), (290, 301), (5000, 5010)]
    )
    def test_ranges(self, ready: Ready, first: int, last: int) -> None:
        with pytest.raises((ValueError, StateError)):
            ready[0].memory.save_rows(0, first, last)

    def test_wrong_positions(self, ready: Ready) -> None:
        """Rows and states are refused at any position but their own."""
        backend = ready[0]
        rows = backend.memory.save_rows(0, 100, 300).block
        state = backend.memory.save_state(0, 300)
        with pytest.raises(StateError, match="cannot be saved"):
            backend.memory.save_state(0, 299)
        with pytest.raises(StateError, match="a state at 300 does not belong behind 200 rows"):
            backend.memory.restore(0, 200, (), state)
        with pytest.raises(StateError, match="ends at 300"):
            backend.memory.restore(0, 100, [(Rows(rows), 100, 300)])
        with pytest.raises(StateError, match="do not follow"):
            backend.memory.restore(0, 300, [(Rows(rows), 301, 302)])
        with pytest.raises(StateError, match="not inside the block"):
            backend.memory.restore(0, 300, [(Rows(rows), 300, 310)])
        with pytest.raises(StateError, match="cannot be rewound"):
            backend.memory.rewind(0, 301)
        with pytest.raises(StateError, match="sequence 1 is not in"):
            backend.memory.save_rows(1, 0, 10)

    def test_prefixes(self, ready: Ready) -> None:
        backend = ready[0]
        rows = backend.memory.save_rows(0, 0, 300).block
        state = backend.memory.save_state(0, 300)
        with pytest.raises(StateError, match="a state at 300 does not belong behind 200 rows"):
            backend.memory.restore(0, 300, [(Rows(rows), 0, 200)], state)
        for spans in ([], [(rows, 0, 200)]):
            with pytest.raises(
                StateError, match=r"a state at 300 does not belong behind (0|200) rows"
            ):
                checked(backend.memory.kv.load, 0, 0, spans, state.recurrent)
        with pytest.raises(StateError, match="ends at 300"):
            backend.memory.restore(0, 100, [(Rows(rows), 100, 300)], state)
        with pytest.raises(StateError, match="not a block of kind"):
            backend.memory.restore(0, 300, [(Rows(rows), 300, 300)], State.from_parts(rows))

    def test_states_for_rows_and_noise(self, ready: Ready) -> None:
        backend = ready[0]
        with pytest.raises(StateError, match="not a block of kind"):
            backend.memory.restore(
                0, 300, (), State.from_parts(backend.memory.save_rows(0, 0, 300).block)
            )
        noise = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
        with pytest.raises(StateError, match="not a block of kind"):
            backend.memory.restore(0, 300, [(Rows(noise), 300, 310)])

    def test_foreign_layout(self, ready: Ready, open_model: Callable[..., Loaded]) -> None:
        for name, options in (
            ("tiny-hybrid", {"type_k": "q8_0", "type_v": "q8_0"}),
            ("tiny-dense", {}),
        ):
            other = open_model(name, **options).backend
            other.memory.clear(0)
            run(other, ready[1], [64])
            with pytest.raises(StateError, match="another layout"):
                ready[0].memory.restore(0, 300, [(other.memory.save_rows(0, 0, 64), 300, 310)])
            assert other.memory.layout != ready[0].memory.layout


def test_rows_that_do_not_fit_the_context(open_model: Callable[..., Loaded]) -> None:
    small = open_model("tiny-hybrid", n_ctx=256).backend
    large = open_model("tiny-hybrid").backend
    tokens = tokens_of(5)
    large.memory.clear(0)
    run(large, tokens, ends_of([]))
    rows = large.memory.save_rows(0, 0, N).block
    with pytest.raises(OutOfCellsError):
        small.memory.restore(0, 0, [(Rows(rows), 0, N)])


def test_more_rows_than_take_their_cells_at_a_time(open_model: Callable[..., Loaded]) -> None:
    """Restores of more rows than are placed in one step have the bytes of the saved sequence, with
    and without a part that was kept.
    """
    n = 9000
    cut = 5000
    backend = open_model("tiny-hybrid", n_ctx=n + 100).backend
    tokens = tokens_of(7, n)
    backend.memory.clear(0)
    for start in range(0, n, backend.facts.n_ubatch):
        backend.evaluate(0, tokens[start : start + backend.facts.n_ubatch], start, output=False)
    parts = [
        (backend.memory.save_rows(0, 0, cut).block, 0, cut),
        (backend.memory.save_rows(0, cut, n).block, cut, n),
    ]
    whole = backend.memory.save_rows(0, 0, n).block
    state = backend.memory.save_state(0, n)
    cells = library_state(backend)
    backend.evaluate(0, tokens[:64], n)
    cold = backend.logits(0)
    for keep in (0, 100):
        backend.memory.rewind(0, keep)
        spans = [(Rows(block), max(first, keep), last) for block, first, last in parts]
        backend.memory.restore(0, keep, spans)
        backend.memory.restore(0, n, (), state)
        assert (library_state(backend) == cells).all()
        assert (backend.memory.save_rows(0, 0, n).block == whole).all()
        backend.evaluate(0, tokens[:64], n)
        assert (backend.logits(0) == cold).all()
    backend.memory.clear(0)


def test_sequences_of_a_unified_cache_move_rows_independently(
    open_model: Callable[..., Loaded],
) -> None:
    """Also where the rows of each lie in several places."""
    backend = open_model("tiny-hybrid", n_seqs=3).backend
    prompts = [tokens_of(10 + i, 201) for i in range(3)]
    for start in range(0, 200, 50):
        for seq, tokens in enumerate(prompts):
            backend.evaluate(seq, tokens[start : start + 50], start)
    saved = []
    expected = []
    for seq, tokens in enumerate(prompts):
        saved.append(
            (backend.memory.save_rows(seq, 0, 200).block, backend.memory.save_state(seq, 200))
        )
        backend.evaluate(seq, tokens[200:], 200)
        expected.append(backend.logits(0).copy())
    for seq in (2, 0, 1):
        rows, state = saved[seq]
        backend.memory.rewind(seq, 60)
        backend.memory.restore(seq, 60, [(Rows(rows), 60, 200)])
        backend.memory.restore(seq, 200, (), state)
        assert (backend.memory.save_rows(seq, 0, 200).block == rows).all()
        assert (backend.memory.save_state(seq, 200).recurrent == state.recurrent).all()
    for seq, tokens in enumerate(prompts):
        backend.evaluate(seq, tokens[200:], 200)
        np.testing.assert_allclose(backend.logits(0), expected[seq], rtol=0, atol=0.05)
        backend.memory.clear(seq)


def test_different_prompts_give_different_logits(open_model: Callable[..., Loaded]) -> None:
    for name in ("tiny-hybrid", "tiny-moe", "tiny-dense"):
        backend = open_model(name).backend
        seen = []
        for seed in range(4):
            backend.memory.clear(0)
            seen.append(run(backend, tokens_of(seed, 200), [64, 128, 192, 200])[200])
        assert all(np.isfinite(logits).all() and logits.std() > 1e-3 for logits in seen)
        assert all(np.abs(a - b).max() > 1e-3 for i, a in enumerate(seen) for b in seen[:i])


@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-gpt-oss", "tiny-lfm2-window"])
def test_a_window_is_saved_and_loaded_in_parts(
    name: str, open_model: Callable[..., Loaded]
) -> None:
    """The rows of a window may be saved and loaded in any pieces that cover it, also with more rows
    than needed; pieces with a gap, out of order or too short are refused.
    """
    backend = open_model(name, n_ubatch=64).backend
    tokens = tokens_of(7)
    n = 150
    memory = backend.memory.kv
    ends = ends_of([150], 300)
    backend.memory.clear(0)
    cold = run(backend, tokens, ends)
    backend.memory.clear(0)
    run(backend, tokens, [end for end in ends if end <= n])
    whole = np.empty(memory.state_size(0), np.uint8)
    form = WindowForm.from_layout(backend.memory.layout)
    memory.save_state(0, n, whole)
    head = np.empty(form.head, np.uint8)
    first = n - (whole.size - form.head) // form.row_bytes
    memory.save_state(0, n, head)
    assert 0 < first < n - 30

    def part(start: int, last: int) -> tuple[np.ndarray, int, int]:
        block = np.empty((last - start) * form.row_bytes, np.uint8)
        checked(memory.save_window, 0, start, last, block)
        return block, start, last

    parts = [part(first, first + 10), part(first + 10, n - 1), part(n - 1, n)]
    longer = (part(first, n - 5)[0], first + 20, n - 5)  # of which the last rows count
    memory.finish()
    assert (
        WindowRows(form, tuple(WindowPiece(*each) for each in parts)).joined(head) == whole
    ).all()
    for wrong in ((first - 200, n), (n, n), (n - 5, n + 1), (-1, 5), (n - 2**40, n)):
        with pytest.raises(StateError, match="lacks rows of its window"):
            checked(memory.save_window, 0, *wrong, np.empty(form.row_bytes, np.uint8))
    with pytest.raises(StateError, match="or these do not have"):
        checked(memory.save_window, 0, n - 2, n, np.empty(form.row_bytes, np.uint8))
    for loaded in (
        parts,
        [part(first, first + 20), longer, part(n - 5, n)],
        [(whole[form.head :], first, n)],
    ):
        backend.memory.rewind(0, n)
        run(backend, tokens_of(8), ends_of([n]), n)  # other rows in all cells of the window
        backend.memory.rewind(0, n)
        memory.load(0, n, [], head, loaded)
        assert_same(run(backend, tokens, ends, n), cold)
        backend.memory.clear(0)
        run(backend, tokens, [end for end in ends if end <= n])
    for wrong_parts in (
        parts[1:],
        parts[:-1],
        parts[::-1],
        [*parts, parts[-1]],
        [(parts[0][0], first, n)],
    ):
        with pytest.raises(StateError, match="do not have the rows"):
            checked(memory.load, 0, n, [], head, wrong_parts)
        assert memory.n_tokens(0) == 0
        run(backend, tokens, [end for end in ends if end <= n])
    with pytest.raises(StateError, match=r"a state has \d+ bytes"):
        checked(memory.load, 0, n, [], whole, parts)


@one_hybrid
def test_a_model_without_a_window_has_none_to_save_or_load(backend: LlamaBackend) -> None:
    backend.memory.clear(0)
    backend.evaluate(0, tokens_of(7)[:50], 0)
    state = backend.memory.save_state(0, 50).recurrent
    backend.memory.synchronize()
    with pytest.raises(StateError, match="no window"):
        checked(backend.memory.kv.save_window, 0, 0, 50, np.empty(50, np.uint8))
    for block in (state, state[:64]):
        with pytest.raises(StateError, match="no window"):
            checked(backend.memory.kv.load, 0, 50, [], block, [(state, 0, 50)])
    assert backend.memory.cells.n_tokens(0) == 50

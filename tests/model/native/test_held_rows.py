"""Held rows keep their bytes while other sequences are evaluated and loaded, and change no bit of
other sequences.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyctl.cache.snapshot import Block, Rows, State
from pyctl.engine.backend import SequenceTokens
from pyctl.errors import OutOfCellsError, StateError, UnavailableError
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded
from pyctl.llama.memory.context_cells import DeviceRows
from pyctl.prompt import Tokens, as_tokens
from tests.effort import examples
from tests.model.native.test_kv_state import library_state

LAYOUTS = [
    pytest.param(
        (name, {"type_k": kv, "type_v": kv, "flash_attn": flash}), id=f"{name}-{kv}-flash-{flash}"
    )
    for name in ("tiny-hybrid", "tiny-dense")
    for kv, flash in (("f16", "on"), ("q8_0", "on"), ("f16", "off"))
]
N_CELLS = 1024
N_SEQS = 3
BATCH = 64


@pytest.fixture
def backend(open_model: Callable[..., Loaded], request: pytest.FixtureRequest) -> LlamaBackend:
    name, options = request.param
    backend = open_model(name, n_ctx=N_CELLS, n_seqs=N_SEQS, n_ubatch=BATCH, **options).backend
    assert backend.facts.n_cells == N_CELLS
    return backend


each_layout = pytest.mark.parametrize("backend", LAYOUTS, indirect=True)
one_hybrid = pytest.mark.parametrize("backend", LAYOUTS[:1], indirect=True)


def tokens_of(seed: int, n: int) -> Tokens:
    return as_tokens(np.random.default_rng(seed).integers(0, 250, n))


def run(backend: LlamaBackend, tokens: Tokens, start: int = 0, seq: int = 0) -> list[np.ndarray]:
    """Evaluate from ``start`` on, in batches of BATCH from 0 on; the logits of each."""
    found = []
    for first in range(start, int(tokens.size), BATCH):
        backend.evaluate(seq, tokens[first : first + BATCH], first)
        found.append(backend.logits(0))
    return found


def held_block(backend: LlamaBackend, held: DeviceRows, first: int, last: int) -> Block:
    block = backend.memory.cells.fetch(held, first, last)
    backend.memory.synchronize()
    return block


def saved_block(backend: LlamaBackend, seq: int, first: int, last: int) -> Block:
    block = backend.memory.save_rows(seq, first, last).block
    backend.memory.synchronize()
    return block


def put_state(backend: LlamaBackend, seq: int, n: int, state: State) -> None:
    if backend.memory.kind == "hybrid":
        backend.memory.restore(seq, n, (), state)


@each_layout
def test_two_conversations_in_turn_equal_cold_runs(backend: LlamaBackend) -> None:
    """Each takes the cells of the other, which is held, comes back without a copy in RAM, and goes
    on to the bit.
    """
    n = 5 * BATCH
    rest = 2 * BATCH
    prompts = [tokens_of(seed, n + rest) for seed in (1, 2)]
    cold = []
    held = []
    states = []
    for tokens in prompts:
        cold.append(run(backend, tokens)[-2:])
        backend.memory.clear(0)
    for tokens in prompts:
        run(backend, tokens[:n])
        held.append(backend.memory.cells.hold_rows(0, 0, n))
        states.append(backend.memory.save_state(0, n))
        backend.memory.clear(0)
    assert backend.memory.cells.n_free == N_CELLS - 2 * n
    for turn in (0, 1, 1, 0):
        backend.memory.restore(0, 0, [(Rows(held[turn]), 0, n)])
        put_state(backend, 0, n, states[turn])
        assert backend.memory.cells.n_free == N_CELLS - 2 * n
        warm = run(backend, prompts[turn], n)
        assert all((a == b).all() for a, b in zip(warm, cold[turn], strict=True))
        assert backend.memory.cells.n_free == N_CELLS - 2 * n - rest
        backend.memory.clear(0)
    for rows in held:
        backend.memory.cells.release(rows)
        backend.memory.cells.release(rows)
    assert backend.memory.cells.n_free == N_CELLS
    with pytest.raises(StateError, match="no longer held"):
        backend.memory.cells.fetch(held[0], 0, n)


@pytest.mark.parametrize("short", [64, 322, 323, 512])
@each_layout
def test_places_change_where_no_cell_is_free(backend: LlamaBackend, short: int) -> None:
    """Two conversations fill the context: whichever is loaded gets the low cells, where the other
    may lie.

    That takes rings of 16 rows, two of half, one of all, and pairs.
    """
    sizes = [short, N_CELLS - short]
    held = []
    blocks = []
    for seq, n in enumerate(sizes):
        run(backend, tokens_of(seq, n), seq=seq)
        held.append(backend.memory.cells.hold_rows(seq, 0, n))
        blocks.append(saved_block(backend, seq, 0, n))
    for seq in (0, 1):
        backend.memory.clear(seq)
    assert backend.memory.cells.n_free == 0
    for turn in (1, 0, 1, 0, 0):
        n = sizes[turn]
        backend.memory.restore(0, 0, [(Rows(held[turn]), 0, n)])
        assert (saved_block(backend, 0, 0, n) == blocks[turn]).all()
        for rows, block, size in zip(held, blocks, sizes, strict=True):
            assert (held_block(backend, rows, 0, size) == block).all()
        with pytest.raises(OutOfCellsError):
            backend.evaluate(1, tokens_of(3, 1), 0)
        backend.memory.clear(0)
    for rows in held:
        backend.memory.cells.release(rows)


@each_layout
def test_a_conversation_takes_over_the_cells_of_another(backend: LlamaBackend) -> None:
    """Rows loaded next take the cells of dropped rows: the same cells and bits as if these had been
    freed.
    """
    tokens = tokens_of(1, 400)
    other = tokens_of(2, 300)
    for fork, end, n_other in (
        (0, 400, 300),
        (0, 200, 300),
        (128, 300, 250),
        (256, 400, 300),
        (0, 300, 300),
        (64, 65, 300),
    ):
        cold = (
            run(backend, tokens[:end]) and saved_block(backend, 0, 0, end),
            library_state(backend),
        )
        rows = cold[0]
        state = backend.memory.save_state(0, end)
        held = backend.memory.cells.hold_rows(0, 0, end)
        backend.memory.clear(0)
        backend.evaluate(0, tokens_of(9, 1), 0)  # elsewhere for a while
        for source in (held, rows):
            backend.memory.clear(0)
            run(backend, tokens[:fork])
            run(backend, other[:n_other], fork)
            before = backend.memory.cells.n_free
            backend.memory.rewind(0, fork)
            assert backend.memory.cells.n_free == before + n_other - fork
            backend.memory.restore(0, fork, [(Rows(source), fork, end)])
            put_state(backend, 0, end, state)
            assert (saved_block(backend, 0, 0, end) == rows).all()
            assert (library_state(backend) == cold[1]).all(), (
                "the cells differ from those of a cold run"
            )
            assert (held_block(backend, held, 0, end) == rows).all()
        backend.memory.cells.release(held)
        backend.memory.clear(0)
    assert backend.memory.cells.n_free == N_CELLS


@one_hybrid
def test_a_few_free_cells_are_enough(backend: LlamaBackend) -> None:
    """Rows loaded from RAM take the low cells of held rows, which move to the only free cells."""
    n = 24
    run(backend, tokens_of(1, n))
    small = saved_block(backend, 0, 0, n)
    backend.memory.clear(0)
    run(backend, tokens_of(2, N_CELLS - n))
    block = saved_block(backend, 0, 0, N_CELLS - n)
    held = backend.memory.cells.hold_rows(0, 0, N_CELLS - n)
    backend.memory.clear(0)
    backend.memory.restore(0, 0, [(Rows(small), 0, n)])
    assert backend.memory.cells.n_free == 0
    assert (saved_block(backend, 0, 0, n) == small).all()
    assert (held_block(backend, held, 0, N_CELLS - n) == block).all()
    backend.memory.clear(0)
    # Some from RAM and some that are held: there are free cells, and cells that are left.
    backend.memory.restore(0, 0, [(Rows(small), 0, n), (Rows(held), n, 2 * n)])
    assert backend.memory.cells.n_free == 0
    assert (held_block(backend, held, 0, N_CELLS - n) == block).all()
    backend.memory.cells.release(held)


@one_hybrid
def test_what_is_evaluated_finds_its_cells_ready(backend: LlamaBackend) -> None:
    """A single relocation serves many steps: the held rows lie above all that is evaluated until
    the cells run out.
    """
    n = 300
    run(backend, tokens_of(1, n))
    held = backend.memory.cells.hold_rows(0, 0, n)
    block = saved_block(backend, 0, 0, n)
    backend.memory.clear(0)
    backend.evaluate(0, tokens_of(2, 1), 0)
    assert (held_block(backend, held, 0, n) == block).all()
    for position in range(1, N_CELLS - n):
        backend.decode([SequenceTokens(0, (position % 250,), position)])
    assert backend.memory.cells.n_free == 0
    assert (held_block(backend, held, 0, n) == block).all()
    with pytest.raises(OutOfCellsError):
        backend.decode([SequenceTokens(0, (1,), N_CELLS - n)])
    backend.memory.cells.release(held)
    backend.decode([SequenceTokens(0, (1,), N_CELLS - n)])


def test_an_evaluation_that_is_stopped_leaves_held_rows(open_model: Callable[..., Loaded]) -> None:
    backend = open_model("tiny-hybrid", n_ctx=N_CELLS, n_ubatch=BATCH).backend
    n = 2 * BATCH
    run(backend, tokens_of(1, n))
    held = backend.memory.cells.hold_rows(0, 0, n)
    block = saved_block(backend, 0, 0, n)
    backend.memory.clear(0)
    backend.control.interrupt()
    with pytest.raises(UnavailableError):
        backend.evaluate(0, tokens_of(2, BATCH), 0)
    assert (held_block(backend, held, 0, n) == block).all()
    assert backend.memory.cells.n_free == N_CELLS - n


@one_hybrid
def test_rows_that_are_not_there_cannot_be_held(backend: LlamaBackend) -> None:
    run(backend, tokens_of(1, BATCH))
    for first, last in ((0, BATCH + 1), (BATCH, BATCH + 1), (5, 5), (6, 5), (-1, 3)):
        with pytest.raises(StateError):
            backend.memory.cells.hold_rows(0, first, last)
    held = backend.memory.cells.hold_rows(0, 10, 20)
    for first, last in ((9, 12), (12, 21), (15, 15)):
        with pytest.raises(StateError):
            backend.memory.cells.fetch(held, first, last)
        with pytest.raises(StateError):
            backend.memory.restore(1, first, [(Rows(held), first, last)])
    backend.memory.cells.release(held)
    assert backend.memory.cells.n_exclusive_cells(held, 10, 20) == 0


@dataclass
class Model:
    """The expected content: a row is a number, and its bytes are those of the first time it was
    saved.
    """

    rows: int = 0
    seqs: list[list[int]] = field(default_factory=lambda: [[] for _ in range(N_SEQS)])
    held: dict[DeviceRows, tuple[int, list[int]]] = field(default_factory=dict)
    bytes: dict[int, bytes] = field(default_factory=dict)

    def new(self, n: int) -> list[int]:
        self.rows += n
        return list(range(self.rows - n, self.rows))

    @property
    def live(self) -> set[int]:
        return {row for rows in self.seqs for row in rows}

    @property
    def kept(self) -> set[int]:
        return {row for _, rows in self.held.values() for row in rows}

    @property
    def n_free(self) -> int:
        return N_CELLS - len(self.live | self.kept)

    def load(self, seq: int, rows: list[int]) -> None:
        """Load ``rows`` into ``seq``. Rows of other sequences are copied, and held rows refer to
        the copies.
        """
        copies = {row: self.new(1)[0] for row in rows if row in self.live}
        for row, copy in copies.items():
            self.bytes[copy] = self.bytes[row]
        self.held = {
            held: (p0, [copies.get(row, row) for row in was])
            for held, (p0, was) in self.held.items()
        }
        self.seqs[seq] += [copies.get(row, row) for row in rows]


HEADER = 64


def each_row(backend: LlamaBackend, block: Block, n: int) -> list[bytes]:
    """Return the bytes of each of the ``n`` rows of a block: a slice of each plane."""
    parts = [np.frombuffer(b"", np.uint8).reshape(n, 0)] if n == 0 else []
    at = HEADER
    layout = backend.memory.layout
    if "ext=1" in layout:
        parts.append(block[at : at + 12 * n].reshape(n, 12))
        at += 12 * n
    for tensors in (
        re.findall(r" k=(\S*)", layout),
        re.findall(r" v=(\S*)", layout),
    ):  # of all caches
        for row, count in re.findall(r":(\d+)x(\d+)", "".join(tensors)):
            for _ in range(int(count)):
                parts.append(block[at : at + int(row) * n].reshape(n, int(row)))
                at += int(row) * n
    assert at == block.size
    return [row.tobytes() for row in np.concatenate(parts, axis=1)]


class Machine:
    """Random calls to a backend, each checked against `Model`."""

    def __init__(self, backend: LlamaBackend) -> None:
        self.backend = backend
        self.model = Model()

    def remember(self, seq: int, first: int) -> None:
        """Note the bytes of rows that were just evaluated."""
        rows = self.model.seqs[seq][first:]
        if rows:
            block = saved_block(self.backend, seq, first, first + len(rows))
            for row, data in zip(rows, each_row(self.backend, block, len(rows)), strict=True):
                self.model.bytes[row] = data

    def evaluate(self, seq: int, n: int, seed: int) -> None:
        held = self.model.seqs[seq]
        if self.model.n_free < n:
            with pytest.raises(OutOfCellsError):
                self.backend.evaluate(seq, tokens_of(seed, n), len(held))
            return
        self.backend.evaluate(seq, tokens_of(seed, n), len(held))
        first = len(held)
        held += self.model.new(n)
        self.remember(seq, first)

    def decode(self, sizes: dict[int, int], seed: int) -> None:
        items = [
            SequenceTokens(
                seq, tuple(tokens_of(seed + seq, n).tolist()), len(self.model.seqs[seq]), n
            )
            for seq, n in sizes.items()
        ]
        n = sum(sizes.values())
        try:
            self.backend.decode(items)
        except OutOfCellsError:
            assert self.model.n_free < 2 * n
            return
        for seq, count in sizes.items():
            first = len(self.model.seqs[seq])
            self.model.seqs[seq] += self.model.new(count)
            self.remember(seq, first)

    def hold_rows(self, seq: int, first: int, last: int) -> None:
        if first < last:
            held = self.backend.memory.cells.hold_rows(seq, first, last)
            self.model.held[held] = (first, self.model.seqs[seq][first:last])

    def release(self, held: DeviceRows) -> None:
        first, rows = self.model.held.pop(held)
        others = self.model.kept | self.model.live
        assert self.backend.memory.cells.n_exclusive_cells(held, first, first + len(rows)) == sum(
            row not in others for row in rows
        )
        self.backend.memory.cells.release(held)

    def load(self, seq: int, held: DeviceRows, last: int, from_ram: bool) -> None:
        """Append what ``held`` has, up to ``last``, where ``seq`` ends within it or at its
        beginning.
        """
        first, rows = self.model.held[held]
        start = len(self.model.seqs[seq])
        if not first <= start < last:
            return
        wanted = rows[start - first : last - first]
        if from_ram:
            source: Block | DeviceRows = held_block(self.backend, held, start, last)
            n_needed = len(wanted)
        else:
            source = held
            n_needed = sum(row in self.model.live for row in wanted)
        if n_needed > self.model.n_free:
            with pytest.raises(OutOfCellsError):
                self.backend.memory.restore(seq, start, [(Rows(source), start, last)])
            return
        self.backend.memory.restore(seq, start, [(Rows(source), start, last)])
        if from_ram:
            copies = self.model.new(len(wanted))
            self.model.bytes.update(
                zip(copies, (self.model.bytes[row] for row in wanted), strict=True)
            )
            self.model.seqs[seq] += copies
        else:
            self.model.load(seq, wanted)

    def rewind(self, seq: int, n: int) -> None:
        self.backend.memory.rewind(seq, n)
        del self.model.seqs[seq][n:]

    def check(self) -> None:
        backend = self.backend
        model = self.model
        assert backend.memory.cells.n_free == model.n_free
        for held, (first, rows) in model.held.items():
            block = held_block(backend, held, first, first + len(rows))
            assert each_row(backend, block, len(rows)) == [model.bytes[row] for row in rows]
        for seq, rows in enumerate(model.seqs):
            if rows:
                block = saved_block(backend, seq, 0, len(rows))
                assert each_row(backend, block, len(rows)) == [model.bytes[row] for row in rows]


def block_of(backend: LlamaBackend, first: int, last: int, seed: int) -> Block:
    """Return a block of these rows of sequence 0, which has one at least, with any bytes
    (csrc/core/block.h).
    """
    header = saved_block(backend, 0, 0, 1)[:HEADER].copy()
    header[16:32].view(np.int64)[:] = first, last
    rest = np.random.default_rng(seed).integers(
        0, 256, backend.memory.shape.sizes.rows(first, last) - HEADER, np.uint8
    )
    return np.concatenate([header, rest])


def test_rows_from_ram_find_the_cells_that_later_rows_leave(
    open_model: Callable[..., Loaded],
) -> None:
    """Many rows take their cells in several steps. The cells of the first steps have held rows,
    which move to the only free place, the one of the rest; the rest is on the device and leaves it.
    """
    n = 8192
    backend = open_model(
        "tiny-dense", n_ctx=3 * n, n_seqs=1, n_ubatch=BATCH, flash_attn="on"
    ).backend
    backend.evaluate(0, tokens_of(1, 1), 0)
    others, rest, between, wanted = (
        block_of(backend, first, first + n, seed) for seed, first in enumerate((0, n, n, 0))
    )
    backend.memory.clear(0)
    backend.memory.restore(0, 0, [(Rows(others), 0, n), (Rows(rest), n, 2 * n)])
    held_rest = backend.memory.cells.hold_rows(0, n, 2 * n)
    backend.memory.rewind(0, n)
    backend.memory.restore(
        0, n, [(Rows(between), n, 2 * n)]
    )  # in the cells of what is held, which moves up
    held_others = backend.memory.cells.hold_rows(0, 0, n)
    backend.memory.rewind(0, 0)
    assert backend.memory.cells.n_free == n
    backend.memory.restore(0, 0, [(Rows(wanted), 0, n), (Rows(held_rest), n, 2 * n)])
    assert backend.memory.cells.n_free == 0
    assert (saved_block(backend, 0, 0, n) == wanted).all()
    assert (saved_block(backend, 0, n, 2 * n) == rest).all()
    assert (held_block(backend, held_others, 0, n) == others).all()
    for held in (held_others, held_rest):
        backend.memory.cells.release(held)


TWO_CACHES = pytest.param(("tiny-minimax-m3", {"flash_attn": "on"}), id="tiny-minimax-m3")


@pytest.mark.parametrize("backend", [LAYOUTS[0], LAYOUTS[4], LAYOUTS[5], TWO_CACHES], indirect=True)
@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_order_of_calls_keeps_all_rows(backend: LlamaBackend, data: st.DataObject) -> None:
    """Through any order of evaluations, holds, loads, releases and rewinds, each row in a sequence
    or held has the bytes of a model that merely remembers them, and the free cells add up.
    """
    machine = Machine(backend)
    model = machine.model
    n_seqs = min(N_SEQS, backend.facts.n_seqs)
    seqs = st.integers(0, n_seqs - 1)
    for seq in range(n_seqs):
        backend.memory.clear(seq)
    try:
        for step in range(data.draw(st.integers(5, 40), label="steps")):
            seq = data.draw(seqs, label="seq")
            n = len(model.seqs[seq])
            # A hybrid's rows can be cut anywhere, but what is evaluated after them needs a state;
            # bytes are all we ask.
            what = data.draw(
                st.sampled_from(
                    [
                        *(
                            "evaluate",
                            "evaluate",
                            "fill",
                            "decode",
                            "hold",
                            "hold",
                            "load",
                            "load",
                            "release",
                        ),
                        *("rewind", "clear"),
                    ]
                ),
                label="what",
            )
            if what == "evaluate":
                machine.evaluate(seq, data.draw(st.integers(1, BATCH)), step)
            elif what == "fill":
                for i in range(data.draw(st.integers(1, 5))):
                    machine.evaluate(seq, BATCH, step + 100 * i)
            elif what == "decode":
                machine.decode(
                    data.draw(st.dictionaries(seqs, st.integers(1, 4), min_size=1)), step
                )
            elif what == "hold":
                first = data.draw(st.integers(0, n))
                machine.hold_rows(seq, first, data.draw(st.integers(first, n)))
            elif what == "load" and model.held:
                held = data.draw(st.sampled_from(list(model.held)))
                first, rows = model.held[held]
                if n > first + len(rows) or n < first:
                    backend.memory.clear(seq)
                    model.seqs[seq].clear()
                machine.load(
                    seq,
                    held,
                    first + data.draw(st.integers(0, len(rows))),
                    data.draw(st.booleans()),
                )
            elif what == "release" and model.held:
                machine.release(data.draw(st.sampled_from(list(model.held))))
            elif what == "rewind" and n:
                machine.rewind(seq, data.draw(st.integers(0, n)))
            elif what == "clear":
                machine.rewind(seq, 0)
            machine.check()
    finally:
        for held in model.held:
            backend.memory.cells.release(held)
        for seq in range(n_seqs):
            backend.memory.clear(seq)
        assert backend.memory.cells.n_free == N_CELLS

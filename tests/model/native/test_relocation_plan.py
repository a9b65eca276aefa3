"""Plans that move held rows, executed on lists of numbers: no row is lost or in the way."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.effort import examples

ROOT = Path(__file__).resolve().parents[3]
AHEAD = 4096
"""The cells above an evaluation that are vacated with its own."""

CELLS_TO_CELLS, CELLS_TO_SCRATCH, SCRATCH_TO_CELLS = range(3)

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Step:
    """Copies of a plan whose order does not matter: runs of (from, to, count)."""

    kind: int
    runs: Numbers

    def moves(self) -> Numbers:
        """Return the rows that it copies, one by one: (from, to)."""
        return np.concatenate(
            [np.arange(count)[:, None] + [first, to] for first, to, count in self.runs]
        )


class Planner:
    """The functions of relocation_plan.cpp with arrays of numpy."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.n_scratch = int(library.scratch_rows())

    def out_of(self, empty: Flags, held: Flags, taken: Numbers) -> Numbers:
        """Return moves (from, to) after which no held row is in the cells ``taken``."""
        out = np.empty((empty.size, 2), np.int64)
        n = self._call("out_of", empty.size, empty, held, taken.size, taken, out)
        return out[:n]

    def into(
        self, empty: Flags, held: Flags, runs: Numbers, target_runs: Numbers
    ) -> Numbers | None:
        """Return moves (from, to) of held rows, runs of (cell, row, count), to their targets; None
        if there are too few cells.
        """
        out = np.empty((empty.size, 2), np.int64)
        sizes = len(runs), len(target_runs)
        n = self._call("into", empty.size, empty, held, sizes[0], runs, sizes[1], target_runs, out)
        return out[:n] if n >= 0 else None

    def plan(self, moves: Numbers, n_cells: int) -> list[Step]:
        """Return the steps of ``moves`` (from, to)."""
        out = np.empty((2 * len(moves) + 2, 5), np.int64)
        n = self._call("plan", len(moves), moves, n_cells, out)
        steps = groupby(out[:n], key=lambda run: (int(run[0]), int(run[1])))
        return [Step(kind, np.array([run[2:] for run in runs])) for (_, kind), runs in steps]

    def _call(self, name: str, *arguments: int | NDArray[np.generic]) -> int:
        converted = [
            ctypes.c_int64(each) if isinstance(each, int) else each.ctypes.data_as(ctypes.c_void_p)
            for each in arguments
        ]
        function = getattr(self._library, name)
        function.restype = ctypes.c_int64
        return int(function(*converted))


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    """Compiled with the headers of csrc and no other."""
    path = tmp_path_factory.mktemp("plan") / "relocation_plan.so"
    sources = [
        Path(__file__).with_name("relocation_plan.cpp"),
        ROOT / "csrc" / "device" / "relocation_plan.cpp",
    ]
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1"]
    command = ["c++", *options, f"-I{ROOT / 'csrc'}", *map(str, sources), "-o", str(path)]
    subprocess.run(command, check=True)
    return Planner(ctypes.CDLL(str(path)))


def execute(planner: Planner, moves: Numbers, n_cells: int) -> Numbers:
    """Execute the plan of ``moves`` on cells that hold their own numbers; return what they hold.

    Checks each step: a row is read before its cell is overwritten, copies of a step do not depend
    on their order, and scratch memory is bounded.
    """
    cells = np.arange(n_cells)
    scratch = np.full(planner.n_scratch + 1, -1)
    is_unread = np.zeros(n_cells, bool)
    is_unread[moves[:, 0]] = True
    n_copied = 0
    for step in planner.plan(moves, n_cells):
        sources, targets = step.moves().T
        assert np.unique(sources).size == np.unique(targets).size == sources.size
        n_copied += sources.size
        if step.kind == CELLS_TO_CELLS:
            assert not np.intersect1d(sources, targets).size
        if step.kind != SCRATCH_TO_CELLS:
            assert is_unread[sources].all(), "a row is read once"
            is_unread[sources] = False
        if step.kind != CELLS_TO_SCRATCH:
            assert not is_unread[targets].any(), "a row is overwritten before it was read"
        into = scratch if step.kind == CELLS_TO_SCRATCH else cells
        into[targets] = (scratch if step.kind == SCRATCH_TO_CELLS else cells)[sources]
    assert n_copied <= 2 * len(moves)
    return cells


def check(planner: Planner, moves: Numbers, n_cells: int) -> None:
    """Check that the plan of ``moves`` makes them, and leaves all other cells as they are."""
    wanted = np.arange(n_cells)
    wanted[moves[:, 1]] = moves[:, 0]
    assert (execute(planner, moves, n_cells) == wanted).all()


def pairs(sources: Sequence[int] | Numbers, targets: Sequence[int] | Numbers) -> Numbers:
    """Return moves of each of ``sources`` to one of ``targets``."""
    return np.stack([np.asarray(sources, np.int64), np.asarray(targets, np.int64)], axis=1)


def runs_of(cells: Numbers, first_row: int) -> Numbers:
    """Return runs (cell, row, count) of ``cells``, which have rows from ``first_row`` on."""
    rows = np.arange(first_row, first_row + cells.size)
    return np.stack([cells, rows, np.ones_like(rows)], axis=1)


# -- plans of moves


def test_rows_that_no_other_waits_for_are_copied_at_once(planner: Planner) -> None:
    plan = planner.plan(pairs([5, 3, 4], [15, 13, 14]), 20)
    assert [(step.kind, step.runs.tolist()) for step in plan] == [(CELLS_TO_CELLS, [[3, 13, 3]])]


def test_two_rows_change_places_by_way_of_scratch_memory(planner: Planner) -> None:
    plan = planner.plan(pairs([1, 7], [7, 1]), 8)
    assert [step.kind for step in plan] == [CELLS_TO_SCRATCH, SCRATCH_TO_CELLS]
    check(planner, pairs([1, 7], [7, 1]), 8)


def test_no_moves_need_no_copies(planner: Planner) -> None:
    assert planner.plan(np.empty((0, 2), np.int64), 8) == []


@pytest.mark.parametrize("shift", [1, 2, 63, 255, 256, 257, 600])
def test_a_block_that_shifts_by_less_than_its_size(planner: Planner, shift: int) -> None:
    """``shift`` chains, whose moves one by one would be 2,000 / ``shift`` copies."""
    moves = pairs(np.arange(2000), np.arange(shift, 2000 + shift))
    check(planner, moves, 2000 + shift)
    steps = planner.plan(moves, 2000 + shift)
    n_turns = sum(step.kind == CELLS_TO_CELLS for step in steps)
    n_large = 2000 // planner.n_scratch
    assert n_turns <= max(4, n_large)
    assert len(steps) - n_turns <= 2 * (n_large + 1)


@pytest.mark.parametrize("size", [2, 255, 256, 257, 258, 512, 513, 1000])
def test_a_ring_of_any_size(planner: Planner, size: int) -> None:
    ring = np.random.default_rng(size).permutation(1000)[:size]
    check(planner, pairs(ring, np.roll(ring, 1)), 1000)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(2, 1500), st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1))
def test_any_moves_end_where_they_should(
    planner: Planner, n_cells: int, seed: int, share: float, part_shuffled: float
) -> None:
    """Every pair of a plan reaches its target, from rotated ranges, whose rows follow each other,
    to random moves.
    """
    random = np.random.default_rng(seed)
    sources = np.arange(n_cells)[: int(share * n_cells)]
    targets = np.roll(np.arange(n_cells), random.integers(n_cells))[: sources.size]
    chosen = np.flatnonzero(random.random(sources.size) < part_shuffled)
    targets[chosen] = targets[random.permutation(chosen)]
    order = random.permutation(np.flatnonzero(sources != targets))
    check(planner, pairs(sources, targets)[order], n_cells)


# -- moves of held rows


@dataclass(frozen=True)
class Cells:
    """Cells of which sequences have the ``live`` ones and handles the ``held`` ones."""

    live: Flags
    held: Flags

    @classmethod
    def random(cls, n_cells: int, seed: int, mean_run: int) -> Cells:
        """Return runs of live, held, shared and free cells."""
        random = np.random.default_rng(seed)
        lengths = random.geometric(1 / mean_run, n_cells)
        kinds = np.repeat(random.integers(0, 4, n_cells), lengths)[:n_cells]
        return cls((kinds & 1).astype(bool), (kinds & 2).astype(bool))

    @property
    def empty(self) -> Flags:
        """The cells that llama.cpp takes for free ones."""
        return ~self.live

    @property
    def n_free(self) -> int:
        return int((~self.live & ~self.held).sum())


some_cells = st.builds(
    Cells.random, st.integers(2, 6000), st.integers(0, 2**32 - 1), st.sampled_from([1, 8, 64, 700])
)


@settings(max_examples=examples(200), deadline=None)
@given(some_cells, st.floats(0, 1), st.floats(0, 1))
def test_cells_that_are_taken_next_hold_no_rows(
    planner: Planner, cells: Cells, start: float, share: float
) -> None:
    """Held rows leave the cells that llama.cpp takes next, and none is lost, doubled or moved onto
    a row that lives; a run of cells ahead is cleared too, unless no place is left.
    """
    n_cells = cells.live.size
    empty = np.flatnonzero(cells.empty)
    n_next = min(1 + int(share * empty.size), cells.n_free)
    taken = empty[empty >= int(start * n_cells)][:n_next]
    if not taken.size:
        return
    moves = planner.out_of(cells.empty, cells.held, taken)

    sources, targets = moves.T
    assert cells.held[sources].all()
    assert cells.empty[sources].all(), "rows that a sequence also has stay"
    assert not (cells.live | cells.held)[targets].any()
    assert not np.isin(targets, taken).any()
    check(planner, moves, n_cells)

    held = cells.held.copy()
    held[sources] = False
    held[targets] = True
    assert held.sum() == cells.held.sum()
    assert not held[taken].any()
    ahead, above = np.split(np.arange(taken[-1] + 1, n_cells), [AHEAD])
    is_ready = not (held & cells.empty)[ahead].any()
    assert is_ready or (held | cells.live)[above].all()


@settings(max_examples=examples(300), deadline=None)
@given(some_cells, st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9))
def test_held_rows_come_to_the_cells_that_were_taken_for_them(
    planner: Planner, cells: Cells, seed: int, share: float, part_held: float, first_row: int
) -> None:
    """Held rows and rows from RAM are loaded into the lowest cells that llama.cpp has."""
    n_cells = cells.live.size
    random = np.random.default_rng(seed)
    taken = np.flatnonzero(cells.empty)
    taken = taken[: 1 + int(share * taken.size)]
    held = np.roll(np.flatnonzero(cells.held), random.integers(n_cells))
    n_loaded = min(held.size, int(part_held * taken.size))
    loaded = held[:n_loaded]
    if seed % 3 == 0:
        loaded = random.permutation(loaded)
    if not taken.size:
        return
    offset = int(random.integers(taken.size - n_loaded + 1))
    wanted = taken[offset : offset + n_loaded]
    n_needed = taken.size - int(cells.empty[loaded].sum())

    is_empty = cells.empty.copy()
    is_empty[taken] = False
    moves = planner.into(
        is_empty, cells.held, runs_of(loaded, first_row + offset), runs_of(taken, first_row)
    )
    assert (moves is None) == (n_needed > cells.n_free)
    if moves is None:
        return
    sources, targets = moves.T
    assert not cells.live[targets].any()
    check(planner, moves, n_cells)

    place = np.arange(n_cells)
    place[sources] = targets
    assert (place[loaded] == wanted).all()
    others = np.setdiff1d(np.flatnonzero(cells.held), loaded)
    assert not np.isin(place[others], taken).any(), "the rows of these cells are overwritten next"
    is_kept = np.concatenate([place[loaded], place[others]])
    assert np.unique(is_kept).size == is_kept.size

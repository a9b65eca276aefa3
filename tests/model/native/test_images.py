"""Rows of images: more rows than positions; every restore, rewind and move keeps the logits.

What an encoder would make is random here: the model reads it as it reads anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pyctl.cache.snapshot import Rows
from pyctl.engine.backend import SequenceTokens
from pyctl.errors import StateError
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import as_tokens
from tests.effort import examples
from tests.model.native.stores import assert_same
from tests.model.native.test_kv_state import library_state, put_state

WIDTH = 64
STEP = 48
N_CELLS = 1024
HEADER = 64
EXT = 12
LAYOUTS = [
    pytest.param(
        (name, {"type_k": kv, "type_v": kv, "flash_attn": flash}), id=f"{name}-{kv}-flash-{flash}"
    )
    for name, kv, flash in (
        *(
            ("tiny-hybrid", "f16", "on"),
            ("tiny-hybrid", "q8_0", "on"),
            ("tiny-hybrid", "f16", "off"),
        ),
        *(("tiny-moe", "f16", "on"), ("tiny-moe", "q8_0", "on")),
    )
]
each_layout = pytest.mark.parametrize("backend", LAYOUTS, indirect=True)
one_hybrid = pytest.mark.parametrize("backend", LAYOUTS[:1], indirect=True)


@pytest.fixture
def backend(open_model: Callable[..., Loaded], request: pytest.FixtureRequest) -> LlamaBackend:
    name, options = request.param
    return open_model(name, n_ctx=N_CELLS, n_seqs=3, **options).backend


@dataclass(frozen=True)
class Part:
    """Text, or an image of so many columns."""

    start: int
    values: NDArray[np.int32] | NDArray[np.float32]
    columns: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.values)


class MixedText:
    """Text with images in it: numbers are tokens of text, pairs (columns, lines) images."""

    def __init__(self, seed: int, *sizes: int | tuple[int, int]) -> None:
        random = np.random.default_rng(seed)
        self.parts = []
        self.n = 0
        for size in sizes:
            if isinstance(size, int):
                part = Part(self.n, random.integers(0, 250, size).astype(np.int32))
            else:
                rows = random.standard_normal((size[0] * size[1], WIDTH)).astype(np.float32)
                part = Part(self.n, rows, size[0])
            self.parts.append(part)
            self.n = part.end

    def ends(self, cuts: list[int] | tuple[int, ...] = ()) -> list[int]:
        """Return batch ends: at both edges of each part, at ``cuts``, and every STEP rows."""
        ends = []
        last = 0
        for stop in sorted({*cuts, *(part.end for part in self.parts)}):
            while last + STEP < stop:
                last += STEP
                ends.append(last)
            last = stop
            ends.append(last)
        return ends

    def is_inside(self, n: int) -> bool:
        return any(part.columns and part.start < n < part.end for part in self.parts)

    def run(
        self, backend: LlamaBackend, ends: list[int], start: int = 0, seq: int = 0
    ) -> dict[int, NDArray[np.float32]]:
        """Evaluate from ``start`` on; the logits at every batch end behind text."""
        found = {}
        for end in ends:
            if end <= start:
                continue
            part = next(part for part in self.parts if part.start <= start < part.end)
            values = part.values[start - part.start : end - part.start]
            if part.columns:
                backend.evaluate_image(seq, values, part.start, start - part.start, part.columns)
            else:
                backend.evaluate(seq, as_tokens(values), start)
                found[end] = backend.logits(0)
            start = end
        return found


def talk_of(seed: int) -> MixedText:
    """Return two images with text between, a third right behind the second, one of a single line,
    and one of a single row.
    """
    return MixedText(seed, 40, (11, 9), 13, (4, 3), (1, 9), 5, (8, 1), 9, (1, 1), 30)


@each_layout
@settings(
    max_examples=examples(8),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_continued_rewound_and_restored_equal_cold(
    backend: LlamaBackend, data: st.DataObject
) -> None:
    """A sequence with images that is continued, rewound or restored at any cut has the logits and
    the bytes of a cold run; a rewind into an image is refused.
    """
    talk = talk_of(data.draw(st.integers(0, 99), label="talk"))
    edges = [part.end for part in talk.parts[:-1]]
    places = st.one_of(st.sampled_from(edges), st.integers(1, talk.n - 1))
    cuts = sorted(data.draw(st.sets(places, min_size=1, max_size=6), label="cuts"))
    ends = talk.ends(cuts)
    backend.memory.clear(0)
    cold = talk.run(backend, ends)

    backend.memory.clear(0)
    chain = []
    states = {}
    whole = {}
    start = 0
    for cut in cuts:
        talk.run(backend, [end for end in ends if end <= cut], start)
        assert backend.memory.kv.n_tokens(0) == cut
        chain.append((backend.memory.save_rows(0, start, cut).block, start, cut))
        states[cut] = backend.memory.save_state(0, cut)
        whole[cut] = library_state(backend)
        start = cut
    assert_same(talk.run(backend, ends, start), cold)

    n = data.draw(st.sampled_from(cuts), label="rewound to")
    if talk.is_inside(n):
        with pytest.raises(StateError, match="inside an image"):
            backend.memory.rewind(0, n)
        assert backend.memory.kv.n_tokens(0) == talk.n
    else:
        backend.memory.rewind(0, n)
        put_state(backend, n, states)
        assert_same(talk.run(backend, ends, n), cold)

    n = data.draw(st.sampled_from(cuts), label="restored to")
    keep = data.draw(
        st.sampled_from([0, *(each for each in [*edges, *cuts] if each <= n)]), label="kept"
    )
    backend.memory.rewind(0, 0 if talk.is_inside(keep) else keep)
    keep = 0 if talk.is_inside(keep) else keep
    backend.memory.restore(
        0, keep, [(Rows(rows), max(a, keep), b) for rows, a, b in chain if keep < b <= n]
    )
    put_state(backend, n, states)
    assert (library_state(backend) == whole[n]).all()
    assert_same(talk.run(backend, ends, n), cold)


@one_hybrid
def test_rows_taken_a_few_at_a_time_equal_one_whole(backend: LlamaBackend) -> None:
    """Blocks begin and end inside images, and so does what is loaded at a time."""
    talk = talk_of(1)
    talk.run(backend, talk.ends())
    whole = library_state(backend)
    pieces = [
        (backend.memory.save_rows(0, a, min(a + 7, talk.n)), a, min(a + 7, talk.n))
        for a in range(0, talk.n, 7)
    ]
    state = backend.memory.save_state(0, talk.n)
    backend.memory.clear(0)
    for piece in pieces:
        backend.memory.restore(0, piece[1], [piece])
    backend.memory.restore(0, talk.n, (), state)
    assert (library_state(backend) == whole).all()


@each_layout
def test_images_change_what_is_said(backend: LlamaBackend) -> None:
    """The comparisons above would be worth little if the model did not look."""
    found = [MixedText(0, 20, (5, 4), 10)]
    rows = found[0].parts[1].values.copy()
    rows[7] += 0.25
    other = MixedText(0, 20, (5, 4), 10)
    other.parts[1] = Part(20, rows, 5)
    tall = MixedText(0, 20, (5, 4), 10)
    tall.parts[1] = Part(20, found[0].parts[1].values, 4)
    logits = []
    for talk in (*found, other, tall):
        backend.memory.clear(0)
        logits.append(talk.run(backend, talk.ends())[talk.n])
    assert np.abs(logits[0] - logits[1]).max() > 0
    assert np.abs(logits[0] - logits[2]).max() > 0


@each_layout
def test_held_rows_come_back_beside_others(backend: LlamaBackend) -> None:
    """Two conversations take each other's cells in turn, with a third between, and a copy is what
    was saved.
    """
    talks = [talk_of(seed) for seed in (1, 2)]
    colds = []
    helds = []
    states = []
    n = talks[0].parts[-1].start
    for talk in talks:
        backend.memory.clear(0)
        colds.append(talk.run(backend, talk.ends()))
    for talk in talks:
        backend.memory.clear(0)
        talk.run(backend, [end for end in talk.ends() if end <= n])
        helds.append(backend.memory.cells.hold_rows(0, 0, n))
        states.append(backend.memory.save_state(0, n))
        saved = backend.memory.save_rows(0, 0, n).block
        fetched = backend.memory.cells.fetch(helds[-1], 0, n)
        part = backend.memory.cells.fetch(helds[-1], 50, 60)
        backend.memory.synchronize()
        assert (saved == fetched).all()
        assert (
            part[HEADER : HEADER + 10 * EXT] == saved[HEADER + 50 * EXT : HEADER + 60 * EXT]
        ).all()
    backend.memory.clear(0)
    for turn in (0, 1, 1, 0):
        other = MixedText(7, 30, (6, 5), 30)
        other.run(backend, other.ends(), seq=1)
        backend.memory.restore(0, 0, [(Rows(helds[turn]), 0, n)])
        backend.memory.restore(0, n, (), states[turn])
        warm = talks[turn].run(backend, talks[turn].ends(), n)
        backend.memory.clear(1)
        # Beside another conversation, cells and so the order of sums differ.
        assert np.abs(warm[talks[turn].n] - colds[turn][talks[turn].n]).max() < 1e-2
        backend.memory.clear(0)
        backend.memory.restore(0, 0, [(Rows(helds[turn]), 0, n)])
        backend.memory.restore(0, n, (), states[turn])
        assert_same(talks[turn].run(backend, talks[turn].ends(), n), colds[turn])
        backend.memory.clear(0)


@one_hybrid
def test_two_sequences_in_cells_of_each_others(backend: LlamaBackend) -> None:
    """They grow in turn, so that no image's cells lie together, and each is moved to the other's
    place.
    """
    talks = [talk_of(3), MixedText(4, 30, (7, 9), 12, (3, 3), 30)]
    ends = [talk.ends(list(range(0, talk.n, 16))[1:]) for talk in talks]
    alone = []
    for talk, stops in zip(talks, ends, strict=True):
        backend.memory.clear(0)
        alone.append(talk.run(backend, stops))
    backend.memory.clear(0)
    done = [0, 0]
    while done != [talk.n for talk in talks]:
        for seq, talk in enumerate(talks):
            stops = [end for end in ends[seq] if end > done[seq]][:2]
            talk.run(backend, stops, done[seq], seq)
            done[seq] = stops[-1] if stops else done[seq]
    saved = [
        (backend.memory.save_rows(i, 0, talk.n), backend.memory.save_state(i, talk.n))
        for i, talk in enumerate(talks)
    ]
    backend.memory.synchronize()
    for seq in (0, 1):
        backend.memory.clear(seq)
    for seq, talk in enumerate(talks):
        backend.memory.restore(0, 0, [(saved[seq][0], 0, talk.n)])
        backend.memory.restore(0, talk.n, (), saved[seq][1])
        rows = backend.memory.save_rows(0, 0, talk.n).block
        assert (rows == saved[seq][0].block).all()
        backend.memory.clear(0)
        talk.run(backend, ends[seq])
        cold = backend.memory.save_rows(0, 0, talk.n).block
        backend.memory.synchronize()
        assert (cold[HEADER : HEADER + talk.n * EXT] == rows[HEADER : HEADER + talk.n * EXT]).all()
        backend.memory.clear(0)


@each_layout
def test_cells_of_what_was_dropped_are_taken_over(backend: LlamaBackend) -> None:
    """Rows loaded into a sequence that was just emptied get the cells that they would have had
    otherwise.
    """
    before = talk_of(5)
    talk = MixedText(6, 60, (5, 5), 40)
    talk.run(backend, talk.ends())
    saved = backend.memory.save_rows(0, 0, talk.n).block
    state = backend.memory.save_state(0, talk.n)
    whole = library_state(backend)
    for old in (before, talk, MixedText(7, 200)):
        backend.memory.clear(0)
        library_state(backend)
        old.run(backend, old.ends())
        backend.memory.clear(0)  # llama.cpp does not know of it yet
        backend.memory.restore(0, 0, [(Rows(saved), 0, talk.n)])
        backend.memory.restore(0, talk.n, (), state)
        assert (library_state(backend) == whole).all()


@pytest.fixture(scope="module")
def drafting(model_path: Callable[[str], Path]) -> Iterator[LlamaBackend]:
    settings = ModelSettings(
        path=str(model_path("tiny-hybrid-nextn")), n_ctx=N_CELLS, n_ubatch=64, n_threads=1
    )
    backend = load(settings, drafts=DraftSettings(draft_types=("ngram-mod", "draft-mtp"))).backend
    yield backend
    backend.unload()


def test_drafts_behind_an_image_are_taken_back(drafting: LlamaBackend) -> None:
    """A wrong draft leaves nothing, with planes and with marks, and positions go on behind the
    image.
    """
    backend = drafting
    talk = MixedText(8, 20, (6, 4), 10)
    n = talk.n
    n_state_history = backend.facts.n_rollback
    assert n_state_history >= 2
    found = []
    for n_drafts, is_marked in ((n_state_history, False), (n_state_history + 2, True)):
        for wrong in (7, 8):
            backend.memory.clear(0)
            talk.run(backend, talk.ends())
            drafts = (2, *[wrong] * (n_drafts - 1))
            backend.decode([SequenceTokens(0, (1, *drafts), n)])
            held = backend.memory.rollback(0, n + 2)
            assert held == (n if is_marked else n + 2)
            assert backend.memory.kv.n_tokens(0) == held
            assert backend.memory.kv.position(0, held) == held - 24 + 6
            backend.decode(
                [
                    SequenceTokens(
                        0, ((1, 2) if is_marked else ()) + (3, 4), held, 4 if is_marked else 2
                    )
                ]
            )
            found.append(backend.logits(0))
        assert (found[-1] == found[-2]).all()
    assert np.abs(found[0] - found[2]).max() < 0.1, "the two ways differ by rounding alone"
    backend.memory.clear(0)


@one_hybrid
def test_blocks_that_cannot_follow_are_refused(backend: LlamaBackend) -> None:
    """Rows whose image positions cannot follow one another are refused as a whole and change
    nothing; blocks cut inside an image load if the rest of it follows.
    """
    talk = MixedText(9, 20, (5, 4), 20)
    talk.run(backend, talk.ends())
    rows = backend.memory.save_rows(0, 0, talk.n).block
    backend.memory.synchronize()
    exts = rows[HEADER : HEADER + talk.n * EXT].view(np.int32).reshape(talk.n, 3)
    backend.memory.clear(0)
    changes: list[tuple[int, int, int]] = [
        (5, 0, 6),  # text at another column
        (20, 1, 21),  # an image that begins on another line
        (23, 0, 22),  # a column twice
        (26, 1, 22),  # a line left out
        (39, 2, 7),  # the last row is text, so the image is not whole
        (40, 0, 24),  # text inside the image's positions
    ]
    for row, field, value in changes:
        before = exts[row].copy()
        exts[row, field] = value
        with pytest.raises(StateError, match="cannot follow"):
            backend.memory.restore(0, 0, [(Rows(rows), 0, talk.n)])
        assert backend.memory.kv.n_tokens(0) == 0
        exts[row] = before
    # Text that says it is of an image is no such change: --image-min-tokens 1 makes images of one
    # row, which have the position of text. What is loaded is what was saved.
    before = exts[5, 2]
    exts[5, 2] = -1
    backend.memory.restore(0, 0, [(Rows(rows), 0, talk.n)])
    again = backend.memory.save_rows(0, 0, talk.n).block
    backend.memory.synchronize()
    assert (again == rows).all()
    assert [backend.memory.kv.position(0, n) for n in (5, 6, 20, 40)] == [5, 6, 20, 25]
    backend.memory.clear(0)
    exts[5, 2] = before
    backend.memory.restore(0, 0, [(Rows(rows), 0, 30)])
    other = MixedText(10, 60)
    other.run(backend, other.ends(), seq=1)
    text = backend.memory.save_rows(1, 0, 60).block
    backend.memory.synchronize()
    with pytest.raises(StateError, match="cannot follow"):  # inside the image
        backend.memory.restore(0, 30, [(Rows(text), 30, 60)])
    backend.memory.restore(0, 30, [(Rows(rows), 30, talk.n)])
    assert backend.memory.kv.n_tokens(0) == talk.n


@one_hybrid
def test_images_are_told_where_there_are_some_alone(
    backend: LlamaBackend, open_model: Callable[..., Loaded]
) -> None:
    backend.evaluate(0, as_tokens(range(20)), 0)
    for columns, count in ((0, 4), (4, 0), (4, -1)):
        with pytest.raises(ValueError, match="no image"):
            backend.memory.kv.add_image(0, columns, count)
    dense = open_model("tiny-dense", n_ctx=256).backend
    dense.evaluate(0, as_tokens(range(20)), 0)
    with pytest.raises(ValueError, match="no image"):
        dense.memory.kv.add_image(0, 4, 4)
    dense.memory.clear(0)

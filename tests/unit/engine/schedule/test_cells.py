"""The cells of the context: the sequences that are parked for room, and the one that a prompt
takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyctl.cache.snapshot import PromptFacts
from pyctl.engine.engine import Engine
from pyctl.engine.schedule.cells import MIN_FREE, CellPool
from pyctl.prompt import Prompt, as_tokens
from tests.fake import FakeBackend
from tests.unit.engine.drive import ask, engine_of


def engine_with(n_cells: int, *prompts: Sequence[int]) -> Engine:
    """Return an engine of ``n_cells`` cells whose sequences have evaluated these ``prompts``."""
    n_seqs = max(len(prompts), 1)
    engine = engine_of(FakeBackend(n_seqs=n_seqs, n_ctx=n_cells, can_hold=False))
    for number, tokens in enumerate(prompts):
        ask(engine, Prompt.from_ids(tokens), 0, seq=number)
    engine.scheduler.occupancy.named.clear()
    return engine


def text(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 60, n).tolist()


def lengths(engine: Engine) -> list[int]:
    return [seq.n for seq in engine.sequences]


def test_used_cells_are_those_of_all_sequences_and_of_restores_under_way() -> None:
    engine = engine_with(2000, text(1, 300), text(2, 200))
    assert engine.cells.n_used == 500
    engine.sequences[1].n_expected = 700
    assert engine.cells.n_used == 1000


def test_no_sequence_is_parked_where_there_is_room() -> None:
    engine = engine_with(2000, text(1, 300), text(2, 200))
    assert engine.cells.make_room(2000 - 500 - MIN_FREE)
    assert lengths(engine) == [300, 200]


def test_the_sequence_of_least_worth_that_is_large_enough_is_parked() -> None:
    engine = engine_with(1000, text(1, 400), text(2, 300), text(3, 100))
    assert engine.cells.make_room(450)
    assert lengths(engine) == [400, 0, 100], "100 cells would not be enough, 400 are worth more"


def test_several_are_parked_if_none_is_large_enough() -> None:
    engine = engine_with(1000, text(1, 400), text(2, 300), text(3, 100))
    assert engine.cells.make_room(900)
    assert sum(lengths(engine)) <= 100


def test_more_than_the_context_finds_no_room() -> None:
    engine = engine_with(1000, text(1, 400))
    assert not engine.cells.make_room(1001)
    assert engine.cells.n_used == 0


def test_a_parked_sequence_is_in_the_cache() -> None:
    engine = engine_with(1000, text(1, 400))
    assert engine.cells.clear_idle()
    assert lengths(engine) == [0]
    assert ask(engine, Prompt.from_ids(text(1, 400)), 1).done.stats.source == "ram"
    assert engine.cells.clear_idle()
    assert not engine.cells.clear_idle(), "nothing is left"


def test_sequences_that_clients_named_may_stay() -> None:
    engine = engine_with(1000, text(1, 400), text(2, 300))
    engine.scheduler.occupancy.named.add(1)
    assert engine.cells.clear_idle(named=False)
    assert lengths(engine) == [0, 300]


def test_a_prompt_takes_the_sequence_that_it_continues() -> None:
    engine = engine_with(2000, text(1, 300), text(2, 300))
    worth = engine.cells.values
    for number, seed in ((0, 1), (1, 2)):
        prompt = Prompt.from_ids([*text(seed, 300), *text(9, 50)])
        assert worth.best(engine.sequences, prompt, clears=False) is engine.sequences[number]


def test_a_prompt_without_a_beginning_here_takes_the_emptiest() -> None:
    engine = engine_with(2000, text(1, 900), [])
    best = engine.cells.values.best(engine.sequences, Prompt.from_ids(text(5, 50)), clears=False)
    assert best is engine.sequences[1]


def test_in_blocks_a_few_shared_tokens_do_not_count() -> None:
    """The number of the sequence would give a client single tokens of another's text."""
    shared = text(1, 10)
    engine = engine_with(2000, [*shared, *text(2, 300)], text(3, 310))
    for seq in engine.sequences:
        seq.facts = PromptFacts()
    engine.scheduler.occupancy.last[0].id = 7
    engine.scheduler.occupancy.last[1].id = 3
    prompt = Prompt.from_ids([*shared, *text(4, 300)])
    worth = engine.cells.values
    assert worth.best(engine.sequences, prompt, clears=False) is engine.sequences[0]
    in_blocks = worth.best(engine.sequences, prompt, clears=False, in_blocks=True)
    assert in_blocks is engine.sequences[1], "the least recently used"


@pytest.mark.parametrize("n", [0, 100, 299])
def test_a_shorter_rest_loses_more(n: int) -> None:
    engine = engine_with(2000, text(1, 300))
    worth = engine.cells.values
    (seq,) = engine.sequences
    assert worth.loss_if_truncated(seq, n) > 0
    assert worth.loss_if_truncated(seq, 300) == 0
    assert worth.loss_if_truncated(seq) >= worth.loss_if_truncated(seq, n)


class Pool:
    """A device whose rows have a certain cell for each position."""

    is_pool = True
    n_cells = 0

    def __init__(self) -> None:
        self.vacated: list[tuple[int, int]] = []

    def vacate(self, first: int, last: int) -> None:
        self.vacated.append((first, last))


def test_in_a_pool_the_next_cells_are_vacated_and_no_sequence_is_parked() -> None:
    engine = engine_with(1000, text(1, 400))
    device = Pool()
    cache: Any = SimpleNamespace(
        memory=engine.prefix_cache.memory,
        cache=engine.prefix_cache.cache,
        park=engine.prefix_cache.park,
        device=device,
    )
    cells = CellPool(engine.scheduler.occupancy, 1000, cache)
    assert cells.make_room(600)
    assert not cells.make_room(601)
    assert device.vacated == [(400, 1000), (400, 1001)]
    assert engine.sequences[0].tokens.tolist() == as_tokens(text(1, 400)).tolist()

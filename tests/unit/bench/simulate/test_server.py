"""A simulated server: the real parts give the model's replies, over stops and kills."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.simulate.model import Weights, cold_reply
from bench.simulate.server import Setup
from pyctl.prompt import Prompt
from tests.unit.bench.simulate.machine import SETUP, Machine, ask

PROMPT = Prompt.from_ids(np.arange(300) + 2_000, range(20, 300, 20))
COLD = cold_reply(SETUP.weights, PROMPT.tokens, [300], 4)


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_reply_after_a_restart_is_that_without_a_cache(tmp_path: Path, is_killed: bool) -> None:
    machine = Machine(tmp_path)
    with machine.running():
        first = machine.server()
        assert ask(first, PROMPT) == COLD
        assert machine.stored
        end = first.kill if is_killed else first.close
        end()
        second = machine.server()
        n_before = second.model.n_evaluated
        assert ask(second, PROMPT) == COLD
        assert second.model.n_evaluated - n_before < 50
        second.close()


def test_two_servers_share_a_directory(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with machine.running():
        first = machine.server()
        second = machine.server()
        ask(first, PROMPT)
        machine.clock.advance(60)
        assert ask(second, Prompt.from_ids([5])) is not None  # the look at the directory
        assert ask(second, PROMPT) == COLD
        assert second.disk is not None
        assert second.disk.n_hits == 1
        first.close()
        second.close()


def test_other_models_have_other_folders() -> None:
    names = {
        replace(SETUP, weights=Weights(seed, is_hybrid, rounds)).fingerprint
        for seed in (0, 1)
        for is_hybrid in (True, False)
        for rounds in (True, False)
    }
    assert len(names) == 8


def test_setups_are_drawn_from_the_seed() -> None:
    assert Setup.draw(random.Random(1)) == Setup.draw(random.Random(1))
    assert len({Setup.draw(random.Random(seed)) for seed in range(20)}) > 10

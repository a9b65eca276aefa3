"""Drafts that are right by chance: llama-server's rates, its refusals and, for a seed, its very numbers."""

from __future__ import annotations

import json

import pytest

from pyctl.engine.draft.draft_settings import SyntheticSettings, rates
from pyctl.engine.draft.synthetic import SyntheticAcceptance, acceptance_rates
from pyctl.engine.sampling import RANDOM_SEED
from pyctl.errors import ConfigError
from tests.unit.engine.draft.record_synthetic import SYNTHETIC

LENGTHS = [(1.0, 3), (1.5, 3), (2.0, 3), (2.5, 3), (3.0, 3), (4.0, 3), (2.0, 1), (7.3, 64), (65.0, 64)]


@pytest.mark.parametrize(("length", "n_max"), LENGTHS)
def test_rates_have_the_mean_length_that_was_asked_for(length: float, n_max: int) -> None:
    found = acceptance_rates(SyntheticSettings(synth_length=length), n_max)
    assert len(found) == n_max
    assert sum(found) == pytest.approx(length - 1.0, abs=1e-6)
    assert list(found) == sorted(found, reverse=True)


@pytest.mark.parametrize(("length", "n_max"), LENGTHS)
def test_so_many_drafts_are_right_on_average(length: float, n_max: int) -> None:
    acceptance = SyntheticAcceptance(acceptance_rates(SyntheticSettings(synth_length=length), n_max))
    acceptance.begin(1, 4)
    n = 4000
    drawn = [acceptance.draw(1, n_max) for _ in range(n)]
    assert 1 + sum(drawn) / n == pytest.approx(length, rel=0.05)
    assert all(0 <= each <= min(2, n_max) for each in (acceptance.draw(1, 2) for _ in range(50)))


def test_given_rates_are_those_of_all_drafts_up_to_one() -> None:
    acceptance = SyntheticAcceptance(acceptance_rates(SyntheticSettings(synth_rates=rates("0.9, 0.5,0.5, 0")), 4))
    acceptance.begin(1, 4)
    drawn = [acceptance.draw(1, 4) for _ in range(4000)]
    for i, rate in enumerate((0.9, 0.5, 0.5, 0.0)):
        assert sum(each > i for each in drawn) / 4000 == pytest.approx(rate, abs=0.03)


@pytest.mark.parametrize(
    ("settings", "n_max", "words"),
    [
        (SyntheticSettings(2.0, (0.5,)), 1, "mutually exclusive"),
        (SyntheticSettings(2.0), 0, "at least one speculative token"),
        (SyntheticSettings(4.5), 3, r"within \[1, 4\]"),
        (SyntheticSettings(0.5), 3, r"within \[1, 4\]"),
        (SyntheticSettings(synth_rates=(0.5, 0.4)), 3, "must contain 3 values, got 2"),
        (SyntheticSettings(synth_rates=(1.5, 0.4)), 2, r"within \[0, 1\]"),
        (SyntheticSettings(synth_rates=(0.4, 0.5)), 2, "monotonically non-increasing"),
    ],
)
def test_what_cannot_be_is_refused_in_the_words_of_llama_server(
    settings: SyntheticSettings, n_max: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        acceptance_rates(settings, n_max)


def test_nothing_is_by_chance_unless_somebody_asks() -> None:
    assert acceptance_rates(SyntheticSettings(), 3) == ()


@pytest.mark.parametrize("text", ["", "0.5,", "0.5;0.4", "nan", "a"])
def test_rates_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        rates(text)


def test_a_seed_gives_the_draws_of_llama_server() -> None:
    recorded = json.loads(SYNTHETIC.read_text(encoding="utf-8"))
    for case in recorded:
        acceptance = SyntheticAcceptance(acceptance_rates(SyntheticSettings(case["length"]), case["n_max"]))
        acceptance.begin(1, case["seed"])
        assert [acceptance.draw(1, n) for n, _ in case["steps"]] == [accepted for _, accepted in case["steps"]]
        assert len(case["steps"]) > 30


def test_without_a_seed_the_draws_differ() -> None:
    acceptance = SyntheticAcceptance(acceptance_rates(SyntheticSettings(2.5), 3))
    for key in (1, 2):
        acceptance.begin(key, RANDOM_SEED)
    assert [acceptance.draw(1, 3) for _ in range(60)] != [acceptance.draw(2, 3) for _ in range(60)]
    acceptance.end(1)
    acceptance.end(1)
    assert list(acceptance._draws) == [2]

"""The account of texts beside other replies, and by simulated costs of steps: texts never cost
more than a small part of the speed that the head alone has.
"""

from __future__ import annotations

import pytest

from bench.draft_length import MACHINES, TEXTS, Machine, Simulation, Text
from pyctl.engine.draft.company_account import CREDIT, MAX_BALANCE, CompanyAccount

N_SEQS = 4
PLAIN_MS = 10.0


def opened() -> CompanyAccount:
    """Return an account that has the speed of steps without texts: a token of each reply in
    PLAIN_MS.
    """
    account = CompanyAccount()
    account.record(N_SEQS, N_SEQS, PLAIN_MS, has_text=False)
    return account


def test_without_a_speed_a_step_with_texts_is_a_loss() -> None:
    account = CompanyAccount()
    account.record(N_SEQS, 50, PLAIN_MS, has_text=True)
    assert account.limit == pytest.approx(CREDIT - 1, abs=0.01)


def test_a_loss_is_the_time_beyond_that_of_the_tokens() -> None:
    account = opened()
    before = account.balance
    account.record(N_SEQS, N_SEQS + 2, 3 * PLAIN_MS, has_text=True)
    assert account.balance == pytest.approx(before + 1.5 - 3, abs=0.01)


def test_after_losses_texts_stop_and_are_tried_again_much_later() -> None:
    account = opened()
    account.record(N_SEQS, N_SEQS, 5 * PLAIN_MS, has_text=True)
    assert account.limit == 0.0
    for _ in range(500):
        account.record(N_SEQS, N_SEQS, PLAIN_MS, has_text=False)
    assert account.limit == 0.0
    for _ in range(5000):
        account.record(N_SEQS, N_SEQS, PLAIN_MS, has_text=False)
    assert account.limit > 1.0


def test_gains_are_kept_up_to_a_maximum() -> None:
    account = opened()
    for _ in range(10):
        account.record(N_SEQS, 50 * N_SEQS, PLAIN_MS, has_text=True)
    assert account.balance == MAX_BALANCE


def test_replies_share_what_a_step_may_cost() -> None:
    account = opened()
    before = account.limit
    account.reserve(2.0)
    assert account.limit == before - 2.0
    account.end_step()
    assert account.limit == before


FORMERLY_SLOW = ("head 70%, copies of 40", "head 70%, copies of 12")
BOTH = [text for text in TEXTS if text.n_seqs > 1 and text.name.startswith(FORMERLY_SLOW)]


@pytest.mark.parametrize("text", BOTH, ids=lambda text: text.name)
@pytest.mark.parametrize("machine", MACHINES[1:3], ids=lambda machine: machine.name)
def test_beside_others_texts_never_cost_more_than_a_hundredth(machine: Machine, text: Text) -> None:
    """Over two runs, as in one the disturbed steps of the simulation differ by as much."""
    head = 0.0
    both = 0.0
    for seed in range(2):
        head += Simulation(machine, text, seed, None, 1).ms()
        both += Simulation(machine, text, seed, None, 2).ms()
    assert both <= 1.01 * head

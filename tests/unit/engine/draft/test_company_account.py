"""The account of texts while several replies are decoded: by simulated costs of steps, texts
never cost more than a hundredth of the speed of the head alone.
"""

from __future__ import annotations

import pytest

from bench.draft_length import MACHINES, TEXTS, Machine, Simulation, Text
from pyctl.engine.draft.company_account import CREDIT, MAX_BALANCE, CompanyAccount
from pyctl.engine.draft.draft_length import DraftLengthController
from pyctl.engine.draft.step_costs import GRAPH_MS

N_SEQS = 4
PLAIN_MS = 10.0


def with_text(account: CompanyAccount, n_tokens: int, ms: float) -> float:
    """Enter a step with a text; return its gain, in plain steps."""
    before = account.balance
    account.record(N_SEQS, n_tokens, ms, has_text=True, plain_ms=PLAIN_MS)
    return account.balance - before


def test_without_a_plain_step_a_step_with_texts_is_a_loss() -> None:
    account = CompanyAccount()
    account.record(N_SEQS, 50, PLAIN_MS, has_text=True)
    assert account.limit == pytest.approx(CREDIT - 1, abs=0.01)


def test_a_loss_is_the_time_beyond_that_of_the_tokens() -> None:
    assert with_text(CompanyAccount(), N_SEQS + 2, 3 * PLAIN_MS) == pytest.approx(1.5 - 3, abs=0.01)


def test_after_losses_texts_stop_and_are_tried_again_much_later() -> None:
    account = CompanyAccount()
    with_text(account, N_SEQS, 5 * PLAIN_MS)
    assert account.limit == 0.0
    for _ in range(500):
        account.record(N_SEQS, N_SEQS, PLAIN_MS, has_text=False)
    assert account.limit == 0.0
    for _ in range(5000):
        account.record(N_SEQS, N_SEQS, PLAIN_MS, has_text=False)
    assert account.limit > 1.0


def test_gains_are_kept_up_to_a_maximum() -> None:
    account = CompanyAccount()
    for _ in range(10):
        with_text(account, 50 * N_SEQS, PLAIN_MS)
    assert account.balance == MAX_BALANCE


def test_replies_share_what_a_step_may_cost() -> None:
    account = CompanyAccount()
    before = account.limit
    account.take(2.0)
    assert account.limit == before - 2.0
    account.end_step()
    assert account.limit == before


@pytest.mark.parametrize(
    ("ms_of_model", "gain"),
    [
        (1.5 * PLAIN_MS, 3 * 0.75 - 4),  # two tokens of each reply in 1.5 plain steps
        (4 * PLAIN_MS, 3 - 4),  # slower than plain steps: without texts the model would pause
    ],
)
def test_texts_are_compared_with_the_model_or_plain_steps_whichever_are_faster(
    ms_of_model: float, gain: float
) -> None:
    account = CompanyAccount()
    for _ in range(20):
        account.record(N_SEQS, 2 * N_SEQS, ms_of_model, has_text=False)
    assert with_text(account, 3 * N_SEQS, 4 * PLAIN_MS) == pytest.approx(gain, abs=0.01)


def with_graphs() -> DraftLengthController:
    """Return a controller of `N_SEQS` requests on a GPU, with plain steps of PLAIN_MS and a text
    behind them.
    """
    controller = DraftLengthController(n_free=3, graph_ms=GRAPH_MS, has_state_history=True)
    for _ in range(8):
        step(controller, N_SEQS, PLAIN_MS)
    step(controller, N_SEQS + 16, 1.5 * PLAIN_MS, has_text=True)
    return controller


def step(
    controller: DraftLengthController, n_tokens: int, ms: float, *, has_text: bool = False
) -> None:
    """Record a step that accepts no drafts."""
    controller.record_batches([], has_text=has_text)
    controller.record(dict.fromkeys(range(N_SEQS), 0), n_tokens, ms)


def test_the_graphs_that_texts_require_are_their_loss() -> None:
    """The two steps after one of a text take as long as four: nothing is left of the credit."""
    controller = with_graphs()
    assert controller.may_copy(N_SEQS)
    for _ in range(2):
        step(controller, N_SEQS, 2 * PLAIN_MS)
    assert not controller.may_copy(N_SEQS)
    assert controller.may_copy(1)


def test_later_plain_steps_are_no_loss() -> None:
    controller = with_graphs()
    for _ in range(2):
        step(controller, N_SEQS, PLAIN_MS)
    for _ in range(8):
        step(controller, N_SEQS, 2 * PLAIN_MS)
    assert controller.may_copy(N_SEQS)


FORMERLY_SLOW = ("head 70%, copies of 40", "head 70%, copies of 12")
BOTH = [text for text in TEXTS if text.n_seqs > 1 and text.name.startswith(FORMERLY_SLOW)]

EXPERTS_AND_LINE = (*MACHINES[1:3], *MACHINES[4:])


@pytest.mark.parametrize("text", BOTH, ids=lambda text: text.name)
@pytest.mark.parametrize("machine", EXPERTS_AND_LINE, ids=lambda machine: machine.name)
def test_with_several_replies_texts_never_cost_more_than_a_hundredth(
    machine: Machine, text: Text
) -> None:
    """Over two runs, as in one the disturbed steps of the simulation differ by as much."""
    head = 0.0
    both = 0.0
    for seed in range(2):
        head += Simulation(machine, text, seed, None, 1).ms()
        both += Simulation(machine, text, seed, None, 2).ms()
    assert both <= 1.01 * head

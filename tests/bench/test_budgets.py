"""The simulation behind the benchmark of budgets evaluates what a server would."""

from __future__ import annotations

import pytest

from bench.budgets import is_late, simulated
from bench.oracle import least_evaluated
from bench.sessions import AGENTS, BUDGETED, WORKLOADS, text
from bench.simulated import Simulation, SizedBackend
from pyctl.cache.plan import GPU_BATCH_COST
from pyctl.chat.format_settings import CHATML
from pyctl.chat.template import Template
from pyctl.prompt import as_tokens
from tools.generator import QWEN36_27B, TINY_FAT


def ratio(name: str, gib: float | None) -> float:
    turns = simulated(name, gib).turns
    return sum(turn.n_evaluated for turn in turns) / sum(turn.floor for turn in turns)


def test_without_a_cache_conversations_that_alternate_are_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.budgets.N_SEQS", 1)
    turns = simulated("alternating", 0).turns
    assert sum(turn.n_evaluated for turn in turns) == sum(turn.n for turn in turns)


@pytest.mark.parametrize("name", ["growing", "shortened", "fan_out", "regenerate", "tool_loop"])
def test_with_room_for_everything_hardly_more_than_the_floor_is_evaluated(name: str) -> None:
    # The floor has a token of each request, though a prompt that is asked again evaluates none.
    assert 0.998 <= ratio(name, None) <= 1.02
    assert not any(map(is_late, simulated(name, None).turns))


@pytest.mark.parametrize(("name", "most"), [("short_requests", 1.01), ("open_webui", 1.02), ("sillytavern", 1.03)])
def test_prompts_part_at_seams_of_their_texts(name: str, most: float) -> None:
    """Tasks around a chat, the last lines of a chat in a raw prompt, and the same prompt for another reply."""
    assert 1.0 <= ratio(name, None) <= most
    assert not any(map(is_late, simulated(name, None).turns))


@pytest.mark.parametrize("gib", [8.0, 4.0])
def test_a_message_is_resumed_where_its_instructions_end(gib: float) -> None:
    assert 1.0 <= ratio("dynamic_tail", gib) <= 1.02


@pytest.mark.parametrize(("gib", "most"), [(8.0, 1.03), (4.0, 1.06)])
def test_tasks_around_a_chat_keep_the_place_at_which_it_grows(gib: float, most: float) -> None:
    assert ratio("open_webui", gib) <= most


@pytest.mark.parametrize(("name", "gib", "most"), [("codex", 8, 1.03), ("opencode", 4, 1.06), ("qwen_code", 4, 1.05)])
def test_new_sessions_resume_late_in_the_opening_of_others(name: str, gib: float, most: float) -> None:
    assert ratio(name, gib) <= most


@pytest.mark.parametrize("name", ["opencode", "qwen_code"])
def test_nobody_waits_for_an_opening_that_there_is_much_room_for(name: str) -> None:
    assert not any(map(is_late, simulated(name, 16.0).turns))


@pytest.mark.parametrize("cost", [0, GPU_BATCH_COST])
@pytest.mark.parametrize("exact", [False, True])
def test_behind_text_that_grows_what_was_typed_is_evaluated_and_what_follows(cost: int, exact: bool) -> None:
    backend = SizedBackend(16_384, 1, 16, 4096, n_ubatch=1024, batch_cost=cost)
    simulation = Simulation(Template(CHATML), backend, None, 0, exact=exact)
    code, behind = text("code", 1700), text("behind", 700)
    for n in range(1500, 1700, 25):
        simulation.complete(f"<|fim_prefix|>{code[:n]}<|fim_suffix|>{behind}<|fim_middle|>")
    above = sum(turn.n_evaluated - turn.floor for turn in simulation.turns[1:])
    if exact:
        assert above > 100, "only where a cold run comes by"
    else:
        assert above <= 32, "once or twice a batch has just ended where the gap begins"


def test_the_bound_is_the_floor_with_room_for_all_and_everything_without_any() -> None:
    tokens = [as_tokens([*range(100), *range(1000 * i, 1000 * i + 50)]) for i in (1, 2, 1, 2)]
    prompts = [120] * 4
    assert least_evaluated(prompts, tokens, 1e9, 1, 100) == pytest.approx(120 + 20 + 1 + 1)
    assert least_evaluated(prompts, tokens, 0, 1, 100) == pytest.approx(4 * 120)
    assert least_evaluated(prompts, tokens, 200, 1, 100) == pytest.approx(120 + 3 * 20), "one state on the stem"
    assert least_evaluated(prompts, tokens, 340, 1, 100) == pytest.approx(120 + 20 + 1 + 1), "then both ends instead"


def test_all_workloads_have_names_of_their_own() -> None:
    assert len({*WORKLOADS, *BUDGETED, *AGENTS}) == len(WORKLOADS) + len(BUDGETED) + len(AGENTS)


def test_the_fat_model_has_a_state_of_as_many_rows_as_the_large_one() -> None:
    rows = [shape.state_bytes / shape.row_bytes() for shape in (TINY_FAT, QWEN36_27B)]
    assert rows[0] == pytest.approx(rows[1], rel=0.03)

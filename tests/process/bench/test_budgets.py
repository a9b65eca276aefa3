"""The simulation behind the benchmark of budgets evaluates the same tokens as a server."""

from __future__ import annotations

import pytest

from bench.budgets import is_late, simulated
from bench.gpu_seconds import DEVICES
from bench.oracle import min_evaluated
from bench.sessions import AGENTS, BUDGETED, WORKLOADS
from pyctl.prompt import as_tokens
from tools.generator import QWEN36_27B, TINY_FAT


def ratio(name: str, gib: float | None) -> float:
    turns = simulated(name, gib).turns
    return sum(turn.n_evaluated for turn in turns) / sum(turn.floor for turn in turns)


def test_alternating_conversations_without_cache_are_reevaluated() -> None:
    assert len({*WORKLOADS, *BUDGETED, *AGENTS}) == len(WORKLOADS) + len(BUDGETED) + len(AGENTS), (
        "by their names"
    )
    turns = simulated("alternating", 0, n_seqs=1).turns
    assert sum(turn.n_evaluated for turn in turns) == sum(turn.n for turn in turns)


@pytest.mark.parametrize("name", ["growing", "shortened", "fan_out", "regenerate", "tool_loop"])
def test_with_room_for_everything_hardly_more_than_the_floor_is_evaluated(name: str) -> None:
    # The floor has a token of each request, though a prompt that is asked again evaluates none.
    assert 0.998 <= ratio(name, None) <= 1.02
    assert not any(map(is_late, simulated(name, None).turns))


@pytest.mark.parametrize(
    ("name", "gib", "maximum"),
    [
        ("aider", 8, 1.01),
        ("claude_code", 8, 1.11),
        ("codex", 8, 1.02),
        ("dynamic_tail", 4, 1.32),
        ("open_webui", 4, 1.31),
        ("opencode", 4, 1.05),
        ("qwen_code", 4, 1.03),
        ("sillytavern", 8, 1.10),
        ("three_agents", 4, 1.45),
        ("three_agents", 16, 1.02),
    ],
)
def test_budgets_cost_what_they_did(name: str, gib: float, maximum: float) -> None:
    assert ratio(name, gib) <= maximum


def test_seconds_are_those_of_batches_and_copies() -> None:
    first, again = simulated("regenerate", None).turns[:2]
    for device in DEVICES:
        assert device.batch(512, 0) < device.batch(512, 32_768) < device.batch(1024, 32_768)
        assert device.batch(4096, 0) > 2 * device.batch(2048, 0), (
            "attention grows within a batch, too"
        )
        assert first.seconds[device.name] > device.batch(first.n, 0)
        assert 0 <= again.seconds[device.name] < first.seconds[device.name] / 5


def test_the_bound_is_the_floor_with_room_for_all_and_everything_without_any() -> None:
    tokens = [as_tokens([*range(100), *range(1000 * i, 1000 * i + 50)]) for i in (1, 2, 1, 2)]
    prompts = [120] * 4
    assert min_evaluated(prompts, tokens, 1e9, 1, 100) == pytest.approx(120 + 20 + 1 + 1)
    assert min_evaluated(prompts, tokens, 0, 1, 100) == pytest.approx(4 * 120)
    assert min_evaluated(prompts, tokens, 200, 1, 100) == pytest.approx(120 + 3 * 20), (
        "one state on the stem"
    )
    assert min_evaluated(prompts, tokens, 340, 1, 100) == pytest.approx(120 + 20 + 1 + 1), (
        "then both ends instead"
    )


def test_the_fat_model_has_a_state_of_as_many_rows_as_the_large_one() -> None:
    rows = [shape.state_bytes / shape.row_bytes() for shape in (TINY_FAT, QWEN36_27B)]
    assert rows[0] == pytest.approx(rows[1], rel=0.03)

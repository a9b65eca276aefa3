"""Costs of single steps: a page for a tiny model with a head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu import step_costs
from bench.gpu.step_costs import ALL_STATES, IDLE, NO_HEAD, Samples, medians

ModelPath = Callable[[str], Path]


def test_medians_are_of_one_way_and_each_number() -> None:
    samples = Samples(list)
    samples[IDLE, 1] += [3.0, 1.0, 2.0]
    samples[IDLE, 2] += [5.0]
    samples[NO_HEAD, 1] += [9.0]
    assert medians(samples, IDLE, (1, 2)) == ["2.00", "5.00"]


def test_a_page_has_each_way_and_whether_bits_are_equal(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts run on a model with a recurrent state and a head, and its logits do not depend on
    earlier states that are kept.
    """
    monkeypatch.setattr(step_costs, "SETTLED", 5)
    printed: list[str] = []
    model = f"tiny-hybrid-nextn={model_path('tiny-hybrid-nextn')}"
    sizes = ["--prompt", "80", "--steps", "30", "--rounds", "1", "--changes", "1"]
    step_costs.main(["--models", model, *sizes, "--results", str(tmp_path)], printed.append)
    page = (tmp_path / "gpu-step-costs.md").read_text(encoding="utf-8")
    assert printed == [page]
    for way in (NO_HEAD, IDLE, ALL_STATES):
        assert f"| {way} |" in page
    assert "Logits with and without earlier states: equal in 30 steps." in page

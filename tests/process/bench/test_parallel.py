"""Households of recorded sessions side by side, each on a pyctl process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import common
from bench.traces.parallel import main
from pyctl.model_files import builtin_model

SESSIONS = ("24", "21")
"""Two short sessions: three and seven requests."""


def test_two_households_write_a_page_of_all_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    households = ["--only", *SESSIONS, "--at-once", "1", "--servers", "pyctl", "--keep"]
    events = ["--events", "restart", "second-client"]
    main([*households, *events, "--scale", "0.015625", "-m", str(builtin_model())])
    page = (tmp_path / "traces-households.md").read_text(encoding="utf-8")
    assert "# 2 recorded sessions in households of 1" in page
    assert "A restart: all servers answered 10 of 10 requests, and every one of 2 of 2" in page
    assert "## With a restart\n" in page
    assert "## With a second client: the worst" in page
    sums = [line for line in page.splitlines() if line.startswith("| a restart | pyctl | 2 | 10 |")]
    assert len(sums) == 1

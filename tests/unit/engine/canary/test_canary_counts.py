"""Results are counted by place and reason, and only the latest reports are kept."""

from __future__ import annotations

from pyctl.engine.canary.canary_counts import MAX_REPORTS, CanaryCounts


def test_a_view_is_a_copy() -> None:
    counts = CanaryCounts()
    counts.verified["ram"] += 2
    counts.differing["disk"] += 1
    counts.skipped["image"] += 3
    view = counts.view(3600, 1.5)
    counts.verified["ram"] += 1
    assert view.verified == {"ram": 2}
    assert view.differing == {"disk": 1}
    assert view.skipped == {"image": 3}
    assert view.interval == 3600
    assert view.seconds == 1.5
    assert counts.n_results == 7


def test_reports_are_bounded() -> None:
    counts = CanaryCounts()
    for number in range(MAX_REPORTS + 2):
        counts.reports.append({"n": number})
    reports = counts.view(0, 0).reports
    assert [report["n"] for report in reports] == list(range(2, MAX_REPORTS + 2))

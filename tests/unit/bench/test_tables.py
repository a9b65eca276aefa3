"""Tables of served requests: sums by kind, reasons, and the worst first."""

from __future__ import annotations

from dataclasses import replace

from bench.traces.household import Served
from bench.traces.recording import RecordedRequest
from bench.traces.tables import rows_by_kind, rows_by_reason, rows_by_source, worst_rows
from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.request_kind import RequestKind


def served(n_known: int, n_evaluated: int, kind: RequestKind = RequestKind.APPEND) -> Served:
    request = RecordedRequest(3, 0, 0.0, 10_000, 10, 2, n_known, kind)
    stats = RequestStats(10_000, n_cached=10_000 - n_evaluated, n_evaluated=n_evaluated)
    return Served(1, request, n_known, stats, 1.5)


def test_tables_have_a_row_per_kind_and_reason_and_the_worst_first() -> None:
    group = [
        served(9_900, 100),
        served(9_900, 400),
        served(9_900, 5_000),
        served(5_000, 10_000, RequestKind.REWRITE),
    ]
    assert [row[0] for row in rows_by_kind(group)] == ["append", "rewrite", "all"]
    assert rows_by_kind(group)[-1][1:6] == ["4", "40,000", "5,300", "15,500", "2.925"]
    assert rows_by_reason(group) == [
        ["evicted, all of it", "1", "5,000"],
        ["evicted, in part", "1", "4,900"],
        ["less than a batch", "1", "300"],
    ]
    assert [row[5] for row in worst_rows(group)] == ["10,000", "5,000", "400"]


def test_kinds_have_the_names_and_the_order_of_the_server() -> None:
    group = [served(0, 10_000, kind) for kind in reversed(RequestKind)]
    names = ["first", "sub-agent", "side request", "append", "rewrite", "all"]
    assert [row[0] for row in rows_by_kind(group)] == names


def test_sources_are_told_apart_by_the_rows_that_stayed_on_the_device() -> None:
    group = [served(9_900, 100) for _ in range(3)]
    for each in group:
        each.stats.source = "ram"
    group[1] = replace(group[1], n_from_device=9_000)
    group[2].stats.source = "disk"
    assert [row for row in rows_by_source(group) if row[1] != "0"] == [
        ["GPU, held rows", "1", "9,900"],
        ["RAM", "1", "9,900"],
        ["disk", "1", "9,900"],
    ]

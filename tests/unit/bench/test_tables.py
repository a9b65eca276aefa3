"""Tables of served requests: sums by kind, reasons, and the worst first."""

from __future__ import annotations

from bench.traces.household import Served
from bench.traces.recording import Kind, RecordedRequest
from bench.traces.tables import rows_by_kind, rows_by_reason, worst_rows
from pyctl.cache.cache_stats import RequestStats


def served(n_known: int, n_evaluated: int, kind: Kind = Kind.APPEND) -> Served:
    request = RecordedRequest(3, 0, 0.0, 10_000, 10, 2, n_known, kind)
    stats = RequestStats(10_000, n_cached=10_000 - n_evaluated, n_evaluated=n_evaluated)
    return Served(1, request, n_known, stats, 1.5)


def test_tables_have_a_row_per_kind_and_reason_and_the_worst_first() -> None:
    group = [
        served(9_900, 100),
        served(9_900, 400),
        served(9_900, 5_000),
        served(5_000, 10_000, Kind.REWRITE),
    ]
    assert [row[0] for row in rows_by_kind(group)] == ["append", "rewrite", "all"]
    assert rows_by_kind(group)[-1][1:6] == ["4", "40,000", "5,300", "15,500", "2.925"]
    assert rows_by_reason(group) == [
        ["evicted, all of it", "1", "5,000"],
        ["evicted, in part", "1", "4,900"],
        ["less than a batch", "1", "300"],
    ]
    assert [row[5] for row in worst_rows(group)] == ["10,000", "5,000", "400"]

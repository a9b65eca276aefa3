"""Tables of served requests: by kind, source and reason; the worst."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from bench.traces.household import Served
from bench.traces.simulated_server import N_UBATCH
from pyctl.cache.request_kind import RequestKind

WAITS = (1.0, 2.0, 5.0)
"""Seconds to the first token; the tables count the requests below each."""

N_WORST = 10
"""Requests that the table of the worst shows."""

SOURCES = {
    "none": "nothing",
    "live": "live sequence",
    "device": "GPU, held rows",
    "ram": "RAM",
    "disk": "disk",
}
"""Places that a restored prefix came from, with their names in the tables."""


def rows_by_kind(served: Sequence[Served]) -> list[list[object]]:
    """Return a row per kind of request, and one of all."""
    groups: dict[str, list[Served]] = {kind.value: [] for kind in RequestKind}
    for each in served:
        groups[each.request.kind.value].append(each)
    groups["all"] = list(served)
    return [[name, *_sums(group)] for name, group in groups.items() if group]


def _sums(group: Sequence[Served]) -> list[object]:
    floor = sum(each.floor for each in group)
    evaluated = sum(each.stats.n_evaluated for each in group)
    prompt = sum(each.request.n_prompt for each in group)
    shares = [sum(each.seconds < limit for each in group) / len(group) for limit in WAITS]
    counts = [f"{n:,}" for n in (len(group), prompt, floor, evaluated)]
    return [*counts, f"{evaluated / floor:.3f}", *(f"{100 * share:.1f}" for share in shares)]


def rows_by_source(served: Sequence[Served]) -> list[list[object]]:
    """Return a row per place that a prefix was restored from: requests, and tokens restored."""
    tokens: dict[str, list[int]] = {source: [] for source in SOURCES}
    for each in served:
        tokens[source_of(each)].append(each.stats.n_cached)
    return [
        [SOURCES[source], f"{len(restored):,}", f"{sum(restored):,}"]
        for source, restored in tokens.items()
    ]


def source_of(served: Served) -> str:
    """Return the place that most rows of the restored prefix came from: a key of SOURCES."""
    stats = served.stats
    is_held = stats.source == "ram" and 2 * served.n_from_device > stats.n_cached
    return "device" if is_held else stats.source


def rows_by_reason(served: Sequence[Served]) -> list[list[object]]:
    """Return a row per reason, the largest first, with the tokens above the floor."""
    tokens: dict[str, list[int]] = defaultdict(list)
    for each in served:
        if each.n_above > 0:
            tokens[reason(each)].append(each.n_above)
    ordered = sorted(tokens.items(), key=lambda item: -sum(item[1]))
    return [[name, f"{len(above):,}", f"{sum(above):,}"] for name, above in ordered]


def worst_rows(served: Sequence[Served]) -> list[list[object]]:
    """Return a row for each of the N_WORST requests with the most tokens above their floor."""
    worst = sorted(served, key=lambda each: -each.n_above)[:N_WORST]
    return [
        [
            each.session,
            each.request.row,
            each.request.kind.value,
            f"{each.request.n_prompt:,}",
            f"{each.floor:,}",
            f"{each.stats.n_evaluated:,}",
            SOURCES[source_of(each)],
            reason(each),
        ]
        for each in worst
        if each.n_above > 0
    ]


def reason(served: Served) -> str:
    """Return why a request evaluated more than its floor, in the words of the tables."""
    stats = served.stats
    if served.n_above <= 0:
        return ""
    if served.n_above <= N_UBATCH:
        return "less than a batch"
    if stats.n_cached == 0:
        return "evicted, all of it"
    if served.request.kind is RequestKind.APPEND:
        return "evicted, in part"
    return "no snapshot where it leaves"

"""Tables of chats that servers answered: by kind, by reason, the worst, and all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from bench.traces.served_chats import ServedChat
from pyctl.cache.request_kind import RequestKind

__all__ = [
    "KIND_COLUMNS",
    "REASON_COLUMNS",
    "WORST_COLUMNS",
    "reason",
    "rows_by_kind",
    "rows_by_reason",
    "rows_of_all",
    "worst_rows",
]

KINDS = (
    *(kind.value for kind in RequestKind),
    "second client",
    "other model",
)
"""Kinds of requests, in the order of the table."""

KIND_COLUMNS = ("kind", "requests", "prompt tokens", "floor", "evaluated", "ratio", "seconds")

REASON_COLUMNS = ("why above the floor", "requests", "tokens above")

WORST_COLUMNS = (
    "session",
    "row",
    "kind",
    "prompt tokens",
    "floor",
    "evaluated",
    "source",
    "why",
)

N_WORST = 10
"""Requests that the table of the worst shows."""

FEW_TOKENS = 32
"""Tokens around a reply: its header, the end of its message, and a short message before it."""


def rows_by_kind(served: Sequence[ServedChat]) -> list[list[object]]:
    """Return a row per kind of request, and one of all."""
    groups: dict[str, list[ServedChat]] = {kind: [] for kind in KINDS}
    for each in served:
        groups[each.turn.kind].append(each)
    groups["all"] = list(served)
    return [[name, *_sums(group)] for name, group in groups.items() if group]


def _sums(group: Sequence[ServedChat]) -> list[object]:
    prompt = sum(each.answer.n_prompt for each in group)
    floor = sum(each.floor for each in group)
    evaluated = sum(each.answer.n_evaluated for each in group)
    seconds = sum(each.answer.seconds for each in group)
    counts = [f"{n:,}" for n in (len(group), prompt, floor, evaluated)]
    return [*counts, f"{evaluated / floor:.3f}", f"{seconds:,.1f}"]


def rows_by_reason(served: Sequence[ServedChat]) -> list[list[object]]:
    """Return a row per reason, the largest first, with the tokens above the floor."""
    tokens: dict[str, list[int]] = defaultdict(list)
    for each in served:
        if each.n_above > 0:
            tokens[reason(each)].append(each.n_above)
    ordered = sorted(tokens.items(), key=lambda item: -sum(item[1]))
    return [[name, f"{len(above):,}", f"{sum(above):,}"] for name, above in ordered]


def reason(served: ServedChat) -> str:
    """Return why a request evaluated more than its floor; empty if it did not."""
    if served.n_above <= 0:
        return ""
    if served.n_above <= FEW_TOKENS:
        return "a few tokens at the end"
    if served.happened:
        return f"after a {served.happened}"
    if served.answer.n_evaluated == served.answer.n_prompt:
        return "nothing was restored"
    if served.n_above <= served.n_earlier_reply + FEW_TOKENS:
        return "the last reply is evaluated again"
    return "resumed before the place where it leaves"


def worst_rows(served: Sequence[ServedChat]) -> list[list[object]]:
    """Return a row for each of the N_WORST requests with the most tokens above their floor."""
    worst = sorted(served, key=lambda each: -each.n_above)[:N_WORST]
    return [_row(each) for each in worst if each.n_above > 0]


def rows_of_all(served: Sequence[ServedChat]) -> list[list[object]]:
    """Return a row per request, in their order, with the columns of the worst and the seconds."""
    return [[*_row(each), f"{each.answer.seconds:.3f}"] for each in served]


def _row(served: ServedChat) -> list[object]:
    answer = served.answer
    why = reason(served)
    if why and answer.left_at is not None:
        why += f": left a prompt at {answer.left_at:,}, resumed at {answer.resumed_at:,}"
    return [
        served.turn.session.number,
        served.turn.request.row,
        served.turn.kind,
        f"{answer.n_prompt:,}",
        f"{served.floor:,}",
        f"{answer.n_evaluated:,}",
        answer.source,
        why,
    ]

"""The rows of the tables about the sessions of programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.clients.fields import field_places, has_effect, reason_of
from bench.clients.programs import PROGRAMS
from bench.clients.recording_proxy import Recorded
from bench.clients.session import Taken

__all__ = ["beta_line", "field_rows", "refusals", "session_rows"]


def session_rows(name: str, taken: Sequence[Taken]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each request that generates, and one for the counts of a turn."""
    version = PROGRAMS[name].version()
    for turn in taken:
        for request in turn.requests:
            if request.n_cached is None or request.n_evaluated is None:
                continue
            n_prompt = request.n_cached + request.n_evaluated
            counts = (f"{n:,}" for n in (n_prompt, request.n_cached, request.n_evaluated))
            yield (name, version, turn.name, *counts)
        n_counted = sum(request.path.endswith("count_tokens") for request in turn.requests)
        if n_counted:
            yield (name, version, turn.name, f"{n_counted} x `count_tokens`", "", "")


def beta_line(sessions: Mapping[str, Sequence[Taken]]) -> list[str]:
    """Return a line with the names in the header ``anthropic-beta``, if a program sends any."""
    names: set[str] = set()
    for request in _generations(sessions):
        names |= set(filter(None, request.headers.get("anthropic-beta", "").split(",")))
    shown = ", ".join(f"`{name}`" for name in sorted(names))
    return [f"`anthropic-beta` of Claude Code: {shown}"] if names else []


def _generations(sessions: Mapping[str, Sequence[Taken]]) -> Iterator[Recorded]:
    """Yield the requests to the endpoints of the programs."""
    for name, taken in sessions.items():
        for turn in taken:
            yield from (each for each in turn.requests if each.path == PROGRAMS[name].endpoint)


def field_rows(
    sessions: Mapping[str, Sequence[Taken]],
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return a row for each object of the requests, and a line for each field that is dropped
    without a reason.
    """
    rows: list[tuple[str, ...]] = []
    unknown: list[str] = []
    for name, taken in sessions.items():
        endpoint = PROGRAMS[name].endpoint
        read: dict[str, list[str]] = defaultdict(list)
        without: dict[str, list[str]] = defaultdict(list)
        for field, (body, place) in _first_places(_generations({name: taken})).items():
            holder, _, member = field.rpartition(".")
            if has_effect(endpoint, body, place):
                read[holder].append(f"`{member}`")
                continue
            reason = reason_of(endpoint, field)
            without[holder].append(f"`{member}`: {reason}")
            if not reason:
                unknown.append(f"{name}: {field} is dropped without a reason")
        for holder in sorted({*read, *without}):
            shown = ", ".join(sorted(read[holder]))
            dropped = "; ".join(sorted(without[holder]))
            rows.append((name, f"`{holder}`" if holder else "the body", shown, dropped))
    return rows, unknown


def _first_places(requests: Iterator[Recorded]) -> dict[str, tuple[dict[str, Any], Any]]:
    """Return each field of the requests, with the first body that has it, and its place there."""
    found: dict[str, tuple[dict[str, Any], Any]] = {}
    for request in requests:
        body = request.body or {}
        for field, place in field_places(body).items():
            found.setdefault(field, (body, place))
    return found


def refusals(taken: Sequence[Taken]) -> Iterator[str]:
    """Yield a line for each request that was not answered with 200."""
    for turn in taken:
        for request in turn.requests:
            if request.status != 200:
                yield f"{turn.name}: {request.path} was answered with {request.status}"

"""Bounds, declared where they are enforced; docs/limits.md is made from it (`python -m tools.limits`).

    MAX_STOPS = limit(256, "stop strings of a request", "400", "request")

A limit that users can set is a setting that says so: ``SERVER.flag(64, "--queue", ..., limit=SetLimit(...))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

__all__ = ["LIMITS", "Limit", "LimitKind", "SetLimit", "limit"]

N = TypeVar("N", int, float)

LimitKind = Literal["request", "reply", "connection", "memory", "disk", "process"]
"""The kinds of bounds: a request, a reply, connections, what stays in memory, what lies on disk, the process itself."""


@dataclass(frozen=True)
class Limit:
    """``what`` is bounded by ``value`` (in ``unit``); beyond it happens ``effect``, for a client mostly a status."""

    what: str
    value: float
    unit: str
    effect: str
    kind: LimitKind


@dataclass(frozen=True)
class SetLimit:
    """The same of a limit that a flag sets; flag and default are the setting's."""

    what: str
    effect: str
    kind: LimitKind
    unit: str = ""


LIMITS: list[Limit] = []
"""All limits of the modules that are imported so far."""


def limit(value: N, what: str, effect: str, kind: LimitKind, unit: str = "") -> N:
    """``value``, noted as the bound of ``what``. ``unit`` "bytes" is shown as KiB and MiB."""
    LIMITS.append(Limit(what, value, unit, effect, kind))
    return value

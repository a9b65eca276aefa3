"""Limits, declared where they are enforced; `python -m tools.limits` generates docs/limits.md from
them.

    MAX_STOPS = limit(256, "stop strings of a request", "400", "request")

A limit that users can set is declared with its flag: ``SERVER.flag(64, "--queue", ...,
limit=SetLimit(...))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

__all__ = ["LIMITS", "Limit", "LimitKind", "LimitUnit", "SetLimit", "limit"]

N = TypeVar("N", int, float)

LimitKind = Literal["request", "reply", "connection", "memory", "disk", "process"]
"""The bounded resource: a request, a reply, connections, RAM, disk, or the process itself."""

LimitUnit = Literal[
    "", "bytes", "MiB", "s", "tokens", "characters", "levels", "pixels", "bytes a second"
]
"""The spelling of each unit. "bytes" is shown as KiB, MiB or GiB; "" counts the subject of the
limit.
"""


@dataclass(frozen=True)
class Limit:
    """A bound ``value`` (in ``unit``) of ``what``; ``effect`` of exceeding it, for a client usually
    an HTTP status.
    """

    what: str
    value: float
    unit: LimitUnit
    effect: str
    kind: LimitKind


@dataclass(frozen=True)
class SetLimit:
    """A limit that a flag sets; value and flag are the setting's."""

    what: str
    effect: str
    kind: LimitKind
    unit: LimitUnit = ""


LIMITS: list[Limit] = []
"""Limits of all imported modules."""


def limit(value: N, what: str, effect: str, kind: LimitKind, unit: LimitUnit = "") -> N:
    """Register ``value`` as the bound of ``what`` and return it."""
    LIMITS.append(Limit(what, value, unit, effect, kind))
    return value

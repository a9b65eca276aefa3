"""A request on its way through the engine, and errands that wait between requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pyctl.cache.report import Report
from pyctl.engine.live import LiveSeq
from pyctl.engine.ticket import Ticket
from pyctl.errors import PyctlError

__all__ = ["Errand", "Job", "NextToken", "Steps"]


class NextToken(NamedTuple):
    """A job waits for its ``token`` to be evaluated at ``position``; it is resumed with the output's index."""

    token: int
    position: int


Steps: TypeAlias = Generator[NextToken | None, int, None]
"""None after a prefill batch, NextToken while decoding."""


@dataclass(eq=False)
class Job:
    """A request on its way, the sequence that serves it, and the generator that does.

    ``id`` counts up; ``report`` is there as soon as the work has begun.
    """

    ticket: Ticket
    id: int = -1
    report: Report | None = None
    submitted: float = field(default_factory=time.perf_counter)
    seq: LiveSeq | None = None
    steps: Steps | None = None
    wants: NextToken | None = None
    first_token: float = 0.0


@dataclass(eq=False)
class Errand:
    """Something to do with sequence ``seq`` as soon as no job owns it; ``fail`` is called if that never comes."""

    seq: int
    run: Callable[[], None]
    fail: Callable[[PyctlError], None]

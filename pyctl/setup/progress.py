"""The progress of a compilation and its remaining time, by the kind of its files.

A count of files would mislead: a few kernels take a minute each, most C++ files a few seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["BuildProgress", "Step", "cpu_seconds", "duration", "steps_of"]

WEIGHTS = (
    (r"template-instances/fattn-mma", 33.0),
    (r"template-instances/mmq", 34.0),
    (r"template-instances/fattn-tile", 26.0),
    (r"template-instances/mmf", 17.0),
    (r"template-instances/fattn-vec", 15.0),
    (r"\.cu\b", 9.0),
)
"""CPU seconds to compile a CUDA file for one architecture, the first pattern that matches."""

CPP_SECONDS, LINK_SECONDS = 4.0, 0.5

LEAST_SHARE, LEAST_SECONDS = 0.05, 120.0
"""Part of the work, or time, after which this machine's own speed replaces the table."""

STEP = re.compile(r"^\[\d+/\d+\] (Building (C|CXX|CUDA) object (\S+)|.*)$")


@dataclass(frozen=True)
class Step:
    """One step of ninja: the file of a compilation, empty for others, and its CPU seconds."""

    file: str
    seconds: float


def steps_of(text: str, n_architectures: int = 1) -> list[Step]:
    """The steps in ninja's output; other lines are none."""
    found = (STEP.match(line) for line in text.splitlines())
    return [_step(match, n_architectures) for match in found if match is not None]


def _step(match: re.Match[str], n_architectures: int) -> Step:
    language, file = match[2], match[3] or ""
    if not language:
        return Step("", LINK_SECONDS)
    if language != "CUDA":
        return Step(file, CPP_SECONDS)
    seconds = next(weight for pattern, weight in WEIGHTS if re.search(pattern, file))
    return Step(file, seconds * n_architectures)


def cpu_seconds(steps: Sequence[Step]) -> float:
    """CPU seconds of all steps."""
    return sum(step.seconds for step in steps)


class BuildProgress:
    """Follows one run of ninja. ``pending`` are its steps, ``now`` a clock in seconds."""

    def __init__(self, pending: Sequence[Step], n_jobs: int, now: Callable[[], float]) -> None:
        self._left = cpu_seconds(pending)
        self._total = self._left
        self._n_jobs = n_jobs
        self._now = now
        self._began = now()
        self.n_files = sum(bool(step.file) for step in pending)
        self.n_done = 0

    def finish(self, step: Step) -> None:
        """Note that ``step`` is done."""
        self._left = max(self._left - step.seconds, 0.0)
        self.n_done += bool(step.file)

    @property
    def share(self) -> float:
        """The finished part of the work, 0 to 1."""
        return 1.0 - self._left / self._total if self._total else 1.0

    @property
    def seconds_left(self) -> float:
        """The estimate: by the table at first, then by the speed so far."""
        elapsed = self._now() - self._began
        if not self.share or (self.share < LEAST_SHARE and elapsed < LEAST_SECONDS):
            return self._left / self._n_jobs
        return elapsed * (1.0 - self.share) / self.share

    def line(self) -> str:
        """Such as ``41 %, file 57 of 186, about 11 minutes left``."""
        return f"{self.share:.0%}, file {self.n_done} of {self.n_files}, about {duration(self.seconds_left)} left"


def duration(seconds: float) -> str:
    """Seconds below two minutes, else minutes, or hours and minutes."""
    if seconds < 120:
        return f"{max(round(seconds), 1)} seconds"
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{minutes // 60} hours {minutes % 60} minutes"

"""The plan of a check: the position to resume at in a snapshot, and the batches to evaluate."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from pyctl.cache.positions import last_end
from pyctl.cache.prefix_cache import PrefixCache
from pyctl.cache.reads import Reads
from pyctl.cache.snapshot import PromptMatch, Snapshot, State
from pyctl.engine.canary.canary_schedule import CanarySchedule
from pyctl.engine.canary.recheck import RecheckPlan
from pyctl.engine.canary.skipped import SkippedError
from pyctl.engine.canary.targets import TargetChoice

__all__ = ["RecheckPlanner"]


class RecheckPlanner:
    """The plans of checks: batches whose bits a server with --exact defines to be equal."""

    def __init__(
        self, prefix_cache: PrefixCache, choice: TargetChoice, schedule: CanarySchedule
    ) -> None:
        self._cache = prefix_cache.cache
        self._disk = prefix_cache.disk
        self._memory = prefix_cache.memory
        self._choice = choice
        self._schedule = schedule

    def plan(self, snapshot: Snapshot) -> Generator[Reads | None, None, RecheckPlan]:
        """Return where to resume in ``snapshot``, and the batches from there. Raises SkippedError
        if there are none whose bits are defined, or within the limits.

        These are the batches in which a cold run evaluates it. With --exact no other sequence had
        cells then, or the cache would not have it.
        """
        ends = snapshot.batch_ends
        if not self._is_on_the_way(snapshot, ends):
            raise SkippedError("not_exact")
        if self._memory.shape.cut_anywhere:
            plan = self._one_batch(snapshot, ends)
        else:
            plan = yield from self._from_state(snapshot, ends)
        end = plan.ends[-1]
        tokens = snapshot.last_tokens(snapshot.n)
        if (tokens[plan.start : end] < 0).any():
            raise SkippedError("image")
        if not self._schedule.may_take(self._cache.costs.evaluate(plan.start, end)):
            raise SkippedError("too_long")
        return plan

    def _one_batch(self, snapshot: Snapshot, ends: Sequence[int]) -> RecheckPlan:
        """Return a random batch of the rows that ``snapshot`` adds to its parent. Where rows are
        enough, no other batch has to be evaluated, and in time all are checked.
        """
        own_ends = [end for end in ends if end > snapshot.segment.start]
        end = self._choice.one_of(own_ends)
        return RecheckPlan(last_end(ends, end - 1), None, (end,))

    def _from_state(
        self, snapshot: Snapshot, ends: Sequence[int]
    ) -> Generator[Reads | None, None, RecheckPlan]:
        """Return all batches after the last state before the end of ``snapshot``."""
        start, before = yield from self._deepest_state(snapshot, ends)
        after = tuple(end for end in ends if end > start)
        return RecheckPlan(start, before, after)

    def _deepest_state(
        self, snapshot: Snapshot, ends: Sequence[int]
    ) -> Generator[Reads | None, None, tuple[int, State | None]]:
        """Return the last position before the end of ``snapshot`` that has a state from the same
        batches, and that state: in RAM, else on disk; without one the start.
        """
        match = PromptMatch(snapshot.last_tokens(snapshot.n))
        limit = snapshot.n - 1
        n_ram = 0
        before: State | None = None
        for in_ram in self._cache.lookup(match, limit):
            if self._is_on_the_way(in_ram, ends):
                n_ram = in_ram.n
                before = in_ram.state
                break
        if self._disk is None:
            return n_ram, before
        for prefix in self._disk.find(match, limit):
            if prefix.n <= n_ram:
                break
            source = yield from self._disk.checks.source(prefix)
            if source is not None and self._is_on_the_way(source.snapshot, ends):
                before = yield from source.state()
                return prefix.n, before
        return n_ram, before

    def _is_on_the_way(self, snapshot: Snapshot, ends: Sequence[int]) -> bool:
        """Return whether a cold run whose batches end at ``ends`` has the bits of ``snapshot`` at
        its end, also after a restore there.
        """
        if not (snapshot.exact and self._memory.shape.resume_points.contains(snapshot.n)):
            return False
        own_ends = snapshot.batch_ends
        return own_ends[-1:] == [snapshot.n] and own_ends == list(ends[: len(own_ends)])

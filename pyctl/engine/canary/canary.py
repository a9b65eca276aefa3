"""The canary: checks one snapshot at a time, in steps between which a request may come."""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from itertools import islice

from pyctl.cache.condemned import Condemned
from pyctl.cache.ports import AGAIN_SECONDS, SnapshotSource
from pyctl.cache.prefix_cache import PrefixCache
from pyctl.cache.reads import Reads
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import Segment, Snapshot
from pyctl.engine.backend import Backend
from pyctl.engine.canary.canary_counts import CanaryCounts, CanaryView
from pyctl.engine.canary.canary_schedule import CanarySchedule
from pyctl.engine.canary.recheck import CheckSteps, Recheck, RecheckPlan
from pyctl.engine.canary.recheck_planner import RecheckPlanner
from pyctl.engine.canary.removal import Removal
from pyctl.engine.canary.set_aside import SetAside
from pyctl.engine.canary.skipped import SkippedError, SkipReason
from pyctl.engine.canary.sources import MemorySource
from pyctl.engine.canary.targets import Target, TargetChoice, find_targets, has_all_in_ram
from pyctl.engine.engine_settings import Clock, EngineSettings
from pyctl.engine.jobs import StateReads
from pyctl.engine.schedule.admission import Occupancy
from pyctl.errors import (
    DamagedError,
    OutOfCellsError,
    PreemptedError,
    StateError,
    UnavailableError,
)

__all__ = ["Canary"]

log = logging.getLogger(__name__)

MAX_TRIES = 32
"""Snapshots that a check tries until one can be checked; each may read the headers of its files."""

LASTING: Collection[SkipReason] = ("no_room", "unstable")
"""Reasons that most likely hold for all other snapshots now."""


class Canary:
    """Evaluates the end of a cached snapshot again once in a while, and compares all bits.

    The engine calls `step` while it is idle, and `stop` before any other work: sequences are as
    before the check then. A false alarm is worse than no check, so only bits are compared that
    --exact defines to be equal, and a difference counts if a second check has the same one. Then
    the snapshot is quarantined with everything that shares rows with it.

    Attributes:
        schedule: The due times.
        counts: The results.
        reads: The reads that the next step waits for, None for none.
    """

    def __init__(
        self,
        backend: Backend,
        prefix_cache: PrefixCache,
        occupancy: Occupancy,
        state_reads: StateReads,
        settings: EngineSettings,
        clock: Clock,
    ) -> None:
        """Start the first interval. ``occupancy`` has the sequences that a check sets aside."""
        self.schedule = CanarySchedule(settings.canary_interval, settings.canary, clock)
        self.counts = CanaryCounts()
        self._backend = backend
        self._prefix_cache = prefix_cache
        self._cache = prefix_cache.cache
        disk = prefix_cache.disk
        self._stored = disk.checks if disk is not None else None
        self._occupancy = occupancy
        self._state_reads = state_reads
        self._settings = settings
        self._clock = clock
        self._choice = TargetChoice(settings.canary.seed)
        self._planner = RecheckPlanner(prefix_cache, self._choice, self.schedule)
        self._removal = Removal(prefix_cache, self.counts)
        self._set_aside = SetAside(occupancy, prefix_cache)
        self._steps: CheckSteps | None = None
        self.reads: Reads | None = None
        self._condemned = Condemned()

    # -- for the engine
    # ----------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """True between the first and the last step of a check."""
        return self._steps is not None

    @property
    def seconds(self) -> float | None:
        """The seconds until the next step is due; None for never."""
        if self._steps is None:
            return self.schedule.seconds
        is_waiting = self.reads is not None and not self.reads.ready()
        return AGAIN_SECONDS if is_waiting else 0.0

    def step(self) -> None:
        """Run one step of a check: at most one batch. Raises nothing: an error ends the check."""
        began = self._clock()
        if self._steps is None:
            self._steps = self._run()
        try:
            self.reads = next(self._steps)
        except StopIteration:
            self._end()
        except (PreemptedError, UnavailableError):  # a request has come, or the server stops
            self._backend.control.preempt(False)
            self.counts.interrupted += 1
            self._end(is_over=False)
        except Exception:
            log.exception("a check of the canary failed")
            self.counts.skipped["failed"] += 1
            self._end()
        self.schedule.spend(self._clock() - began)

    def stop(self) -> None:
        """End the check that runs, if any. It starts again when the engine is idle."""
        if self._steps is not None:
            self.counts.interrupted += 1
            self._end(is_over=False)

    def view(self) -> CanaryView:
        """Return the results since the start."""
        return self.counts.view(self._settings.canary_interval, self.schedule.spent)

    def _end(self, *, is_over: bool = True) -> None:
        """Forget the check, whose generator has ended or is closed here."""
        steps = self._steps
        self._steps = None
        self.reads = None
        if steps is not None:
            steps.close()
        if is_over:
            self.schedule.finish()

    # -- one check
    # ----------------------------------------------------------------------------------

    def _run(self) -> CheckSteps:
        """Check the first of the chosen snapshots that can be checked, of MAX_TRIES at most."""
        for target in islice(self._choice.in_order(self._targets()), MAX_TRIES):
            try:
                yield from self._check(target)
            except SkippedError as skipped:
                self._choice.record(target)
                self.counts.skipped[skipped.reason] += 1
                if skipped.reason in LASTING:
                    return
                yield None
            else:
                self._choice.record(target)
                return

    def _targets(self) -> list[Target]:
        """Return the kinds of checks that are possible: without --exact only the checksums of
        files.
        """
        has_rows = self._backend.memory.shape.has_rows
        targets = find_targets(self._cache, self._stored, has_rows=has_rows)
        if self._settings.exact:
            return targets
        stored = [target for target in targets if target.place == "disk"]
        if targets and not stored:
            self.counts.skipped["not_exact"] += 1
        return stored

    def _check(self, target: Target) -> CheckSteps:
        """Check ``target``. Raises SkippedError if that is impossible, or shows nothing."""
        try:
            source = yield from self._open(target)
            if self._settings.exact:
                yield from self._evaluate(target, source)
            else:
                yield from _read_all(source)
                self.counts.skipped["not_exact"] += 1
        except DamagedError as error:
            self._removal.remove_file(target, error)
        except OutOfCellsError:
            raise SkippedError("no_room") from None
        except FileNotFoundError:
            raise SkippedError("gone") from None
        except (StateError, OSError, MemoryError) as error:
            log.info("canary: cannot read a snapshot at %d tokens: %s", target.prefix.n, error)
            raise SkippedError("unreadable") from None

    def _evaluate(self, target: Target, source: SnapshotSource) -> CheckSteps:
        """Compare the end of ``source`` with an evaluation, in a sequence that has all cells."""
        with self._cache.locked(source.snapshot):
            plan = yield from self._planner.plan(source.snapshot)
            with self._alone(source.snapshot, target) as seq:
                yield from self._measure(target, source, plan, seq)

    def _open(self, target: Target) -> Generator[Reads | None, None, SnapshotSource]:
        """Return the bytes of ``target``."""
        if target.place == "disk":
            stored = None
            if self._stored is not None:
                stored = yield from self._stored.source(target.prefix)
            if stored is None:
                raise SkippedError("gone")
            return stored
        snapshot = self._cache.get(target.prefix)
        if snapshot is None:
            raise SkippedError("gone")
        if target.place == "ram":
            return MemorySource(snapshot)
        held = [segment for segment in snapshot.chain if segment.held is not None]
        return MemorySource(snapshot, held)

    @contextmanager
    def _alone(self, snapshot: Snapshot, target: Target) -> Iterator[LiveSequence]:
        """Give all cells to one sequence for the block. Afterwards all are as before."""
        self._condemned = Condemned()
        if not self._set_aside.move_all():
            raise SkippedError("no_room")
        seq = self._occupancy.sequences[0]
        try:
            self._free_cells(snapshot, target)
            seq.n_expected = snapshot.n  # its cells count as taken
            yield seq
        finally:
            seq.n_expected = 0
            self._backend.memory.clear(seq.id)
            self._set_aside.bring_back(self._condemned)

    def _free_cells(self, snapshot: Snapshot, target: Target) -> None:
        """Make room for ``snapshot`` without the loss of a row: only rows that RAM also has leave
        the device.
        """
        device = self._prefix_cache.device
        n_ready = 0
        staying: Collection[Segment] = ()
        if target.place == "device":
            n_ready = device.n_ready(snapshot, 0, snapshot.n)
            staying = snapshot.chain
        n_left = self._backend.facts.n_cells - (snapshot.n - n_ready)
        if not device.release_copies(n_left, staying):
            raise SkippedError("no_room")
        needs_rows = target.place == "ram" and self._backend.memory.shape.has_rows
        if needs_rows and not has_all_in_ram(snapshot):
            raise SkippedError("no_room")  # its copies in RAM have paid for the sequences

    def _measure(
        self, target: Target, source: SnapshotSource, plan: RecheckPlan, seq: LiveSequence
    ) -> CheckSteps:
        """Measure once; if bits differ, measure again, and condemn the snapshot if they differ both
        times.
        """
        recheck = Recheck(self._backend, self._state_reads, seq.id, source, plan)
        first = yield from recheck.measure()
        if first.is_equal:
            self._verified(target, plan)
            return
        second = yield from recheck.measure()
        if second != first:
            log.warning(
                "canary: two checks of a snapshot at %d tokens have different results, so neither "
                "counts",
                target.prefix.n,
            )
            raise SkippedError("unstable")
        self._condemned = self._removal.remove_snapshot(target, source.snapshot, plan, first)

    def _verified(self, target: Target, plan: RecheckPlan) -> None:
        self.counts.verified[target.place] += 1
        log.info(
            "canary       %7s tokens  %7s evaluated again, equal to the bit  %s",
            f"{target.prefix.n:,}",
            f"{plan.ends[-1] - plan.start:,}",
            target.place,
        )


def _read_all(source: SnapshotSource) -> CheckSteps:
    """Read all bytes of ``source``, which has their checksums verified, and keep none."""
    for segment in source.snapshot.chain:
        yield from source.rows(segment)
        yield None
    yield from source.state()

"""The removal of snapshots that a check found wrong: from RAM and disk, with a report."""

from __future__ import annotations

import logging
import time

from pyctl.cache.condemned import Condemned
from pyctl.cache.prefix_cache import PrefixCache
from pyctl.cache.snapshot import PromptMatch, Snapshot
from pyctl.engine.canary.canary_counts import CanaryCounts
from pyctl.engine.canary.recheck import Measurement, RecheckPlan
from pyctl.engine.canary.targets import Target
from pyctl.errors import DamagedError

__all__ = ["Removal"]

log = logging.getLogger(__name__)


class Removal:
    """The removal of snapshots from ``prefix_cache``, which ``counts`` counts and reports.

    After a wrong evaluation all rows of the chain are in doubt: either the end of the snapshot is
    wrong, or one of the bytes from which it was evaluated. So every snapshot goes that shares one
    of its segments, pinned or not: a prompt that is evaluated once more is better than a wrong
    reply. A wrong checksum is different, since it names the file.
    """

    def __init__(self, prefix_cache: PrefixCache, counts: CanaryCounts) -> None:
        self._cache = prefix_cache.cache
        self._disk = prefix_cache.disk
        self._counts = counts

    def remove_snapshot(
        self, target: Target, snapshot: Snapshot, plan: RecheckPlan, measured: Measurement
    ) -> Condemned:
        """Remove ``snapshot``, whose end differs as ``measured``; return all that is condemned."""
        index = measured.first_difference()
        batches = plan.batches
        is_state = index == len(batches)
        batch = batches[-1] if is_state else batches[index]
        part = "state" if is_state else "rows"
        report: dict[str, str | int | float] = {
            **_report(target),
            "differs": part,
            "first": batch.first,
            "last": batch.last,
            "resumed_at": plan.start,
            "restored_digest": measured.restored[index].hex(),
            "evaluated_digest": measured.evaluated[index].hex(),
        }
        prefixes = [snapshot.prefix]
        if plan.before is not None:
            prefixes.append(PromptMatch(snapshot.last_tokens(snapshot.n)).prefix(plan.start))
        condemned = Condemned(tuple(prefixes), tuple(snapshot.chain), report=report)
        n_dropped = self._drop(condemned)
        report["snapshots_dropped"] = n_dropped
        self._quarantine(target, condemned)
        log.error(
            "canary: the snapshot at %d tokens (%s) differs from its evaluation in the %s of "
            "tokens %d to %d: it is quarantined, and %d snapshots in RAM that share its rows are "
            "dropped",
            snapshot.n,
            target.place,
            part,
            batch.first,
            batch.last,
            n_dropped,
        )
        return condemned

    def remove_file(self, target: Target, error: DamagedError) -> None:
        """Remove the file of ``error``, whose checksum is wrong, and the files that need it."""
        report = {**_report(target), "differs": "file", "file": error.file, "error": str(error)}
        self._quarantine(target, Condemned(file=error.file, report=report))
        log.error("canary: a file of the disk cache is damaged and quarantined: %s", error)

    def _drop(self, condemned: Condemned) -> int:
        """Drop all ``condemned`` snapshots from RAM; return their number."""
        every = (*self._cache.snapshots(), *self._cache.prompt_ends)
        dropped = [snapshot for snapshot in every if condemned.includes(snapshot)]
        for snapshot in dropped:
            self._cache.drop(snapshot)
        return len(dropped)

    def _quarantine(self, target: Target, condemned: Condemned) -> None:
        """Count the difference, keep its report, and have the disk quarantine its files."""
        self._counts.differing[target.place] += 1
        self._counts.reports.append(condemned.report)
        if self._disk is not None:
            self._disk.checks.condemn(condemned)


def _report(target: Target) -> dict[str, str | int | float]:
    """Return the facts of every report: the snapshot, and the seconds since the epoch."""
    prefix = target.prefix
    return {
        "snapshot": prefix.name,
        "n": prefix.n,
        "place": target.place,
        "time": time.time(),
    }

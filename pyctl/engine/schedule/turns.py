"""Turns: with --exact one request runs at a time, as on an idle server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pyctl.engine.engine_settings import Clock
from pyctl.engine.schedule.admission import MAX_PASSED, ActiveRequest, Admission, Occupancy

__all__ = ["TURN_SECONDS", "TurnQueue"]

TURN_SECONDS = 3.0
"""Shortest turn of a request for which others wait. To park it copies its state; its rows stay on
the device. No shorter turn was measured.
"""


class TurnQueue(Admission):
    """Admits one request at a time.

    The bits of a reply depend on the requests that share its batches, and on the cells that other
    sequences take. A request that runs has the context for itself instead.

    Each request gets a first turn in order of arrival, so that a short one never waits for the end
    of a long one. Requests that need more than one turn continue in order of arrival, each to its
    end, between the first turns of others: after MAX_PASSED of these it gets another turn itself.
    At most ``n_active`` requests have started and not ended: parked ones take memory.
    """

    def __init__(self, n_cells: int, n_ctx: int, n_active: int, clock: Clock) -> None:
        super().__init__(n_cells, n_ctx)
        self._n_active = n_active
        self._clock = clock

    def expected_order(self) -> Iterable[ActiveRequest]:
        """Return the waiting requests in the order in which they are expected to run."""
        next_one = self._next()
        first = [next_one] if next_one is not None else []
        others = (active for active in (*self.queue, *self.suspended) if active is not next_one)
        return [*first, *others]

    def take_next(self, occupancy: Occupancy) -> ActiveRequest | None:
        """Remove and return the request whose turn starts, None if one runs or none is ready."""
        if occupancy.running:
            return None
        chosen = self._next()
        if chosen is None:
            return None
        if chosen.suspended_snapshot is None:
            for parked in self.suspended:
                parked.turn.n_overtakes += 1
        chosen.turn.n_overtakes = 0
        chosen.turn.started = self._clock()
        self._take(chosen)
        return chosen

    def replies_to_suspend(self, occupancy: Occupancy) -> list[ActiveRequest]:
        """Return none: turns decide, see `must_yield`."""
        return []

    def must_yield(self, running: Sequence[ActiveRequest]) -> ActiveRequest | None:
        """Return the running request if its turn is over and another one comes before it."""
        active = running[0] if running else None
        if active is None or not active.can_yield:
            return None
        if self._clock() - active.turn.started < TURN_SECONDS:
            return None
        is_older_parked = any(parked.arrived < active.arrived for parked in self.suspended)
        has_room = len(self.suspended) + 1 < self._n_active
        is_new_waiting = has_room and self._first_ready() is not None
        return active if is_older_parked or is_new_waiting else None

    def _next(self) -> ActiveRequest | None:
        """Return the request of the next turn: a new one, unless a parked one was passed often."""
        parked = self.suspended[0] if self.suspended else None
        if parked is None:
            return self._first_ready()
        if parked.turn.n_overtakes >= MAX_PASSED or len(self.suspended) >= self._n_active:
            return parked
        return self._first_ready() or parked

    def _first_ready(self) -> ActiveRequest | None:
        """Return the first new request that waits for no fetch from an object store."""
        return next(
            (active for active in self.queue if active.reads is None or active.reads.ready()), None
        )

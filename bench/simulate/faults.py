"""The faults of a simulation: a seed decides at each call that can fail whether it does."""

from __future__ import annotations

import errno
import hashlib
import random
from collections import Counter
from collections.abc import Callable

SHORT = -1
"""A call that reads or writes fewer bytes than it was asked for."""

FAULTS: dict[str, tuple[int, ...]] = {
    "open": (errno.EIO, errno.EMFILE, errno.EACCES),
    "create": (errno.EIO, errno.ENOSPC, errno.EMFILE),
    "write": (errno.EIO, errno.ENOSPC, SHORT, SHORT),
    "read": (errno.EIO, errno.EIO, SHORT, SHORT),
    "sync": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO, errno.ENOSPC),
    "remove": (errno.EIO, errno.EACCES),
    "index": (errno.EIO, errno.ENOSPC, errno.EBUSY),
}
"""The errors of each kind of call, by their numbers."""

WRITES = frozenset({"create", "write", "sync", "rename", "index"})
"""Calls that a full disk refuses."""

CHANGES = WRITES | {"remove"}
"""Calls at which a process may be killed."""

NAMES = {SHORT: "short"}


class KilledError(BaseException):
    """The process of a server was killed. No Exception, so that no server catches it."""


class StepReachedError(BaseException):
    """The simulation has come to the step at which it has to end."""


class EventLog:
    """The events of a simulation in order: a digest, counts by kind, and the last lines.

    ``step`` numbers the events.
    """

    N_LAST = 30

    def __init__(self, until: int = 0) -> None:
        """Start an empty log, which ends at step ``until``; 0 for never."""
        self.step = 0
        self.counts: Counter[str] = Counter()
        self.last: list[str] = []
        self._until = until
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, kind: str, detail: str = "") -> None:
        """Record an event. Raises StepReachedError if it is the last one to come."""
        self.step += 1
        self.counts[kind] += 1
        line = f"{self.step} {kind} {detail}".rstrip()
        self._digest.update(line.encode() + b"\n")
        self.last.append(line)
        del self.last[: -self.N_LAST]
        if self.step == self._until:
            raise StepReachedError

    @property
    def is_over(self) -> bool:
        """True once the last step is reached."""
        return self.step == self._until

    @property
    def digest(self) -> str:
        """A digest of all events so far: equal for two runs of the same seed."""
        return self._digest.hexdigest()


class Faults:
    """The decisions for each call of the servers, from ``rng``.

    Attributes:
        rate: The probability with which a call fails.
        is_disk_full: Whether all writes fail.
        is_active: Whether calls may fail at all; the simulation's own never do.
        on_kill: The function to call when a process is killed, before its call raises.
    """

    def __init__(self, rng: random.Random, log: EventLog) -> None:
        self.rate = 0.0
        self.memory_rate = 0.0
        self.is_disk_full = False
        self.is_active = False
        self.on_kill: Callable[[], None] = lambda: None
        self.n_calls: Counter[str] = Counter()
        self._rng = rng
        self._log = log
        self._n_until_kill = 0

    def kill_after(self, n_changes: int) -> None:
        """Kill the process that makes the ``n_changes``-th change from now on; 0 for never."""
        self._n_until_kill = n_changes

    def decide(self, kind: str) -> int:
        """Return the number of the error with which a call fails, SHORT, or 0 if it succeeds.
        Raises KilledError if its process is killed before the call.
        """
        if not self.is_active:
            return 0
        self.n_calls[kind] += 1
        if kind in CHANGES and self._n_until_kill:
            self._n_until_kill -= 1
            if not self._n_until_kill:
                self._log.add("killed", kind)
                self.on_kill()
                raise KilledError(kind)
        if self.is_disk_full and kind in WRITES:
            return errno.ENOSPC
        if self._rng.random() >= self.rate:
            return 0
        number = self._rng.choice(FAULTS[kind])
        self._log.add("I/O fault", f"{kind}: {NAMES.get(number) or errno.errorcode[number]}")
        return number

    def allocate(self) -> None:
        """Raise MemoryError for some allocations."""
        if self.is_active and self.memory_rate and self._rng.random() < self.memory_rate:
            self._log.add("no memory")
            raise MemoryError("made to fail")

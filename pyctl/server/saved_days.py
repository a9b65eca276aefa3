"""The time that the cache saved all clients of a process, by day, kept in a file."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from pyctl.cache.saved_time import Saved, SavedTime
from pyctl.engine.engine_settings import Clock
from pyctl.files.atomic_file import (
    files_in,
    is_abandoned,
    make_private,
    open_regular,
    read_regular,
    write_atomic,
)
from pyctl.settings.limit import limit

__all__ = ["FILE", "MAX_DAYS", "SavedDays", "start_timer"]

log = logging.getLogger("pyctl")

FILE = "saved.json"
"""The file in the cache directory."""

WRITE_SECONDS = 60.0
"""Longest time between a request and the write of its saving: a killed process loses as much."""

MAX_DAYS = limit(
    366, "days of time saved that the cache directory keeps", "the oldest are forgotten", "disk"
)

MAX_SPEEDS = limit(
    64,
    "models whose speed the cache directory keeps for the time saved",
    "the oldest are forgotten",
    "disk",
)

MAX_BYTES = 2**18
"""A larger file is damaged: a day takes about 80 bytes, a speed about 60."""

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")

Later: TypeAlias = Callable[[float, Callable[[], None]], Callable[[], None]]
"""Calls a function after a number of seconds, on another thread; returns a function that cancels
it.
"""


class _File(msgspec.Struct, forbid_unknown_fields=False):
    """The content of the file: sums of all days and of each, and tokens per second by fingerprint,
    newest last.
    """

    total: Saved = Saved()
    days: dict[str, Saved] = msgspec.field(default_factory=dict)
    speeds: dict[str, float] = msgspec.field(default_factory=dict)

    def is_sound(self) -> bool:
        """Return whether the numbers can be sums."""
        sums = (self.total, *self.days.values())
        numbers = [day_sum.seconds for day_sum in sums]
        numbers += [*self.speeds.values()]
        numbers += [day_sum.tokens for day_sum in sums]
        numbers += [day_sum.requests for day_sum in sums]
        return all(math.isfinite(n) and n >= 0 for n in numbers) and all(
            map(_DAY.fullmatch, self.days)
        )

    def __add__(self, other: _File) -> _File:
        """Return the sums of both, within the limits, with the speeds of ``other``, which are
        newer.
        """
        days = dict(self.days)
        for day, saved in other.days.items():
            days[day] = days.get(day, Saved()) + saved
        older = {name: speed for name, speed in self.speeds.items() if name not in other.speeds}
        speeds = {**older, **other.speeds}
        return _File(
            self.total + other.total,
            dict(sorted(days.items())[-MAX_DAYS:]),
            dict([*speeds.items()][-MAX_SPEEDS:]),
        )


def start_timer(seconds: float, function: Callable[[], None]) -> Callable[[], None]:
    """Call ``function`` after ``seconds`` on a thread that does not keep the process alive; return
    what cancels that.
    """
    timer = threading.Timer(seconds, function)
    timer.name = "pyctl-saved"
    timer.daemon = True
    timer.start()
    return timer.cancel


class SavedDays:
    """The sums of `Saved` of all models of a process, for each local day and in total.

    With a ``directory`` they are kept in its `FILE`, at most `WRITE_SECONDS` late, together with
    the sums of other processes that use the directory. A damaged file is replaced; a failed write
    is tried again. ``clock`` shows seconds of UNIX time. Safe from any thread; `add` never waits
    for the disk.
    """

    def __init__(self, clock: Clock = time.time, later: Later = start_timer) -> None:
        self._clock = clock
        self._later = later
        self._directory: Path | None = None
        self._writing = threading.Lock()  # held while the file is read and replaced
        self._lock = threading.Lock()  # guards the members below
        self._kept = _File()  # as the file was last
        self._leaving = _File()  # is being written
        self._pending = _File()
        self._since_start = Saved()
        self._cancel: Callable[[], None] | None = None
        self._has_warned = False

    def keep_in(self, directory: Path) -> None:
        """Read the file in ``directory``, and write to it from now on."""
        with self._writing:
            content = self._read(directory)
            for path in files_in(directory):
                is_abandoned(path, remove=True)  # a process that was killed while it wrote
            with self._lock:
                self._directory = directory
                self._kept = content or _File()

    def account(self, fingerprint: str) -> SavedTime:
        """Return the account of the model with this fingerprint; it starts with the speed of an
        earlier run.
        """
        with self._lock:
            speed = self._measured_speed(fingerprint)
        return SavedTime(speed, partial(self.add, fingerprint))

    def add(self, fingerprint: str, saved: Saved, speed: float) -> None:
        """Count a request of this moment; ``speed`` is its model's in tokens per second, 0 for
        none.
        """
        day = self.today()
        with self._lock:
            self._since_start += saved
            speeds = {fingerprint: speed} if speed > 0 else {}
            self._pending += _File(saved, {day: saved}, speeds)
            if self._directory is not None and self._cancel is None:
                self._cancel = self._later(WRITE_SECONDS, self._write_due)

    def today(self) -> str:
        """Return the local day, such as 2026-11-28."""
        return time.strftime("%Y-%m-%d", time.localtime(self._clock()))

    @property
    def since_start(self) -> Saved:
        """The sum of this process."""
        with self._lock:
            return self._since_start

    def view(self) -> dict[str, Any]:
        """Return ``today`` and ``total``, each with seconds, tokens and requests, as in GET
        /cache.
        """
        shown = self._sums()
        today = shown.days.get(self.today(), Saved())
        return {"today": msgspec.to_builtins(today), "total": msgspec.to_builtins(shown.total)}

    @property
    def so_far_today(self) -> Saved:
        """The sum of the local day, with that of other processes that use the directory."""
        return self._sums().days.get(self.today(), Saved())

    def _sums(self) -> _File:
        """Return the sums of the file and of the requests that it lacks yet."""
        with self._lock:
            return self._kept + self._leaving + self._pending

    def close(self) -> None:
        """Write the rest now. Later requests still count."""
        with self._lock:
            cancel = self._cancel
            self._cancel = None
        if cancel is not None:
            cancel()
        self._write()

    # -- the file --------------------------------------------------------------------------------

    def _write_due(self) -> None:
        with self._lock:
            self._cancel = None
        self._write()

    def _write(self) -> None:
        with self._writing:
            with self._lock:
                directory = self._directory
                if directory is None or not self._pending.days:
                    return
                self._leaving = self._pending
                self._pending = _File()
            try:
                content = self._merge(directory)
            except OSError as error:
                self._postpone(error)
                return
            with self._lock:
                self._kept = content
                self._leaving = _File()

    def _merge(self, directory: Path) -> _File:
        """Add `_leaving` to the file, while no other process does."""
        make_private(directory)
        with _locked(directory / f"{FILE}.lock"):
            content = (self._read(directory) or self._kept) + self._leaving
            write_atomic(directory / FILE, msgspec.json.encode(content))
        return content

    def _postpone(self, error: OSError) -> None:
        with self._lock:
            self._pending = self._leaving + self._pending
            self._leaving = _File()
            if self._cancel is None:
                self._cancel = self._later(WRITE_SECONDS, self._write_due)
        if not self._has_warned:
            self._has_warned = True
            reason = error.strerror or error
            log.warning("time saved: cannot write %s: %s; it is kept in memory", FILE, reason)

    def _read(self, directory: Path) -> _File | None:
        """Return the content of the file; None if there is none or it is damaged."""
        try:
            raw = read_regular(directory / FILE, MAX_BYTES)
        except OSError:
            return None
        with suppress(msgspec.MsgspecError, RecursionError):
            content = msgspec.json.decode(raw, type=_File)
            if content.is_sound():
                return content
        log.warning("time saved: %s is damaged and will be replaced", directory / FILE)
        return None

    def _measured_speed(self, fingerprint: str) -> float:
        parts = (self._pending, self._leaving, self._kept)
        return next((part.speeds[fingerprint] for part in parts if fingerprint in part.speeds), 0.0)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``. Raises OSError."""
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

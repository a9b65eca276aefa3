"""Incidents of a household: servers die, the drive fails, files are damaged."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.simulate.faults import Faults
from bench.simulate.server import Server
from pyctl.disk.file_format import INDEX

if TYPE_CHECKING:
    from bench.simulate.household import Household

INCIDENT_SECONDS = 1_200.0
"""Mean time from one incident to the next."""

EPISODE_SECONDS = (60.0, 1_800.0)
"""Seconds for which a drive stays full, hangs or fails."""

CHANGES_UNTIL_KILL = 60
"""A process is killed at one of its next changes on the drive, at most so many."""

CLOCK_JUMPS = (-86_400, -3600, 60, 3600, 86_400, 30 * 86_400)
"""Seconds by which the time of the day is set."""

MAX_DAMAGED = 40
"""Files that are damaged at once, at most."""

SUFFIXES = (".rows", ".state", ".prompt")
"""Files that are damaged."""


class Incidents:
    """The incidents of ``household`` and their ends, by its clock."""

    def __init__(self, household: Household, faults: Faults, rng: random.Random) -> None:
        """Plan the first incident."""
        self._household = household
        self._faults = faults
        self._rng = rng
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self._at = 0.0
        self._plan()
        weights: dict[Callable[[], None], int] = {
            self._stop: 3,
            self._kill_soon: 4,
            self._fail_power_soon: 4,
            self._fill_disk: 1,
            self._fail_calls: 4,
            self._fail_memory: 2,
            self._fail_evaluations: 1,
            self._hang: 1,
            self._damage_files: 4,
            self._damage_index: 1,
            self._join_server: 2,
            self._jump_clock: 2,
            self._operate: 3,
        }
        self._choices = [cause for cause, weight in weights.items() for _ in range(weight)]

    @property
    def next_at(self) -> float:
        """When something happens or ends next."""
        return min([self._at, *(end for end, _ in self._ends)])

    def run_due(self) -> None:
        """End the episodes that are over, and cause the incident that is due."""
        now = self._household.clock.now
        for item in list(self._ends):
            if item[0] <= now:
                self._ends.remove(item)
                item[1]()
        if self._at <= now:
            self._rng.choice(self._choices)()
            self._plan()

    def _plan(self) -> None:
        pause = self._rng.expovariate(1 / INCIDENT_SECONDS)
        self._at = self._household.clock.now + pause

    def _end_later(self, target: object, name: str, value: object) -> None:
        """Set an attribute of ``target`` to ``value`` when the episode is over."""
        end = self._household.clock.now + self._rng.uniform(*EPISODE_SECONDS)
        self._ends.append((end, partial(setattr, target, name, value)))

    # -- processes and power
    # ----------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Stop all servers as a user does, and start one."""
        self._household.log.add("stop")
        self._household.stop_all()
        self._household.restart()

    def _kill_soon(self) -> None:
        self._faults.kill_after(self._rng.randrange(1, CHANGES_UNTIL_KILL))

    def _fail_power_soon(self) -> None:
        self._household.takes_power = True
        self._kill_soon()

    def _join_server(self) -> None:
        """Start a second server on the directory, or stop it."""
        household = self._household
        if len(household.servers) > 1:
            household.stop_server(household.servers[-1])
        else:
            household.start_server()
        household.log.add("servers", str(len(household.servers)))

    # -- episodes
    # ----------------------------------------------------------------------------------

    def _fill_disk(self) -> None:
        self._household.log.add("disk full")
        self._faults.is_disk_full = True
        self._end_later(self._faults, "is_disk_full", False)

    def _fail_calls(self) -> None:
        self._faults.rate = self._rng.choice((0.002, 0.02, 0.1))
        self._end_later(self._faults, "rate", 0.0)

    def _fail_memory(self) -> None:
        self._faults.memory_rate = 0.1
        self._end_later(self._faults, "memory_rate", 0.0)

    def _fail_evaluations(self) -> None:
        for server in self._household.servers:
            server.evaluation_fault_rate = 0.02
            self._end_later(server, "evaluation_fault_rate", 0.0)

    def _hang(self) -> None:
        """Let no read and no write return for a while."""
        self._household.log.add("drive hangs")
        for server in self._household.servers:
            server.hangs = True
            self._end_later(server, "hangs", False)

    def _jump_clock(self) -> None:
        seconds = self._rng.choice(CLOCK_JUMPS)
        self._household.log.add("clock jump", str(seconds))
        self._household.clock.jump(seconds)

    # -- damage
    # ----------------------------------------------------------------------------------

    def _damage_files(self) -> None:
        """Damage some files."""
        root = self._household.drive.root
        paths = [path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
        n = min(self._rng.randrange(1, MAX_DAMAGED), len(paths))
        for path in self._rng.sample(sorted(paths), n):
            self._damage(path)

    def _damage(self, path: Path) -> None:
        """Flip a bit of a file, cut it, or remove it."""
        root = self._household.drive.root
        damage = self._rng.choice(("bit", "bit", "cut", "removed"))
        self._household.log.add("damaged file", damage)
        self._household.audit.damaged.add(str(path.relative_to(root)))
        data = bytearray(path.read_bytes())
        if damage == "removed":
            path.unlink()
        elif damage == "cut":
            os.truncate(path, self._rng.randrange(max(len(data), 1)))
        elif data:
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
            path.write_bytes(data)

    def _damage_index(self) -> None:
        """Stop the servers, and remove or overwrite the index meanwhile."""
        self._household.log.add("damaged index")
        self._household.stop_all()
        path = self._household.drive.root / INDEX
        if self._rng.random() < 0.5:
            path.unlink(missing_ok=True)
        elif path.exists():
            path.write_bytes(self._rng.randbytes(2000))
        self._household.restart()

    # -- an operator
    # ----------------------------------------------------------------------------------

    def _operate(self) -> None:
        """Act as an operator."""
        server = self._rng.choice(self._household.servers)
        action = self._rng.choice((self._clear, self._remove, self._pin, self._sleep))
        self._household.log.add("operator", action.__name__.strip("_"))
        self._household.run_server(server, action)

    def _clear(self, server: Server) -> None:
        server.engine.prefix_cache.cache.clear(pinned=True)

    def _remove(self, server: Server) -> None:
        snapshots = server.engine.prefix_cache.cache.snapshots()
        if not snapshots or server.disk is None:
            return
        try:
            server.disk.remove(self._rng.choice(snapshots).prefix.name)
        except OSError as error:
            self._household.log.add("operator fails", type(error).__name__)

    def _pin(self, server: Server) -> None:
        cache = server.engine.prefix_cache.cache
        if cache.snapshots():
            name = self._rng.choice(cache.snapshots()).prefix.name
            cache.pin(name, self._rng.random() < 0.3)

    def _sleep(self, server: Server) -> None:
        if not server.engine.scheduler.has_work:
            server.engine.sleep()
            server.engine.wake()

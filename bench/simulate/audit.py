"""Checks of a cache directory from outside: written files are whole, and stay."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from bench.simulate.clock import SimulatedClock
from bench.simulate.drive import Drive
from bench.simulate.faults import EventLog
from bench.simulate.server import InlineReaders, Server
from pyctl.cache.check import find_inconsistencies
from pyctl.disk.chain import open_chain
from pyctl.disk.directory import CacheDirectory
from pyctl.disk.file_format import CorruptFileError, StateName, parse
from pyctl.disk.readers import Job
from pyctl.disk.segment_files import check_jobs, read_header
from pyctl.disk.verify import VerifiedFiles, verify

READ_BACK_RATE = 0.3
"""The share of written snapshots that are read back at once."""

Stored = tuple[str, StateName]
"""A state on disk: the fingerprint and the name."""


class WrongError(BaseException):
    """A server did something that it must never do. No Exception, so that no server catches it."""


class Audit:
    """The checks of the directory of ``drive``. All raise WrongError.

    Attributes:
        damaged: The files that were damaged on purpose, each as ``<fingerprint>/<name>``.
    """

    def __init__(
        self, drive: Drive, log: EventLog, rng: random.Random, clock: SimulatedClock
    ) -> None:
        """Prepare the checks; ``rng`` chooses the snapshots that are read back."""
        self._clock = clock
        self.damaged: set[str] = set()
        self._drive = drive
        self._root = drive.root
        self._log = log
        self._rng = rng
        self._promised: dict[Stored, dict[Path, int]] = {}

    def record_stored(self, server: Server, state: StateName) -> None:
        """Note a snapshot that was just written. Some are read back: raise WrongError if one is not
        whole on disk.
        """
        fingerprint = server.setup.fingerprint
        self._log.add("written", f"{fingerprint} {state.n}")
        if self._rng.random() >= READ_BACK_RATE:
            return
        process = self._drive.process
        self._drive.process = None
        problem = ""
        try:
            self._promised[fingerprint, state] = self._read_back(fingerprint, state)
        except FileNotFoundError as error:  # also if removed on purpose: a write looks for it
            problem = f"{Path(error.filename).name} is missing"
        except CorruptFileError as error:
            if f"{fingerprint}/{error.file}" not in self.damaged:
                problem = str(error)
        self._drive.process = process
        if problem:
            raise WrongError(f"{fingerprint}/{state} was reported as written: {problem}")

    def whole_states(self) -> set[Stored]:
        """Return the states that were read back and whose files are still the same, and whole.

        A file that was removed since and written again is another one, whose name may not be
        durable yet.
        """
        for stored, inodes in list(self._promised.items()):
            if not self._is_whole(stored, inodes):
                del self._promised[stored]
        return set(self._promised)

    def check_survivors(self, before: set[Stored]) -> None:
        """Raise WrongError if a power failure took one of the states that were whole ``before``."""
        for fingerprint, state in sorted(before - self.whole_states()):
            raise WrongError(f"a power failure took {fingerprint}/{state}, which was written")

    def check_bytes(self) -> None:
        """Raise WrongError if a file lacks some of its bytes, which are durable before its name,
        unless it was damaged on purpose.
        """
        broken = set(self._verified(is_deep=True).broken) - self.damaged
        for name in sorted(broken):
            raise WrongError(f"a file without all its bytes: {name}: {self._damage(name)}")

    def check_recovered(self, server: Server) -> None:
        """Raise WrongError unless the recovery of ``server`` left index and files that agree,
        within the budget.
        """
        if server.disk is None:
            raise WrongError("the directory could not be opened although no call failed")
        found = self._verified(is_deep=False)
        for name in ("missing", "unknown", "broken", "useless", "temps"):
            left = getattr(found, name)
            if left:
                raise WrongError(f"after the recovery {left[0]} is {name}")
        n_bytes = server.disk.directory.n_bytes
        if n_bytes > server.setup.disk_bytes:
            raise WrongError(f"{n_bytes} bytes on disk, --kv-cache-budget is less")

    def check_ram(self, server: Server) -> None:
        """Raise WrongError if the cache of ``server`` in RAM contradicts itself."""
        faults = find_inconsistencies(server.engine.prefix_cache.cache)
        if faults:
            raise WrongError(f"the cache in RAM contradicts itself: {faults[0]}")

    def _damage(self, name: str) -> str:
        """Return the fault of the file ``name``, itself or on the chains of states."""
        path = self._root / name
        try:
            for job in check_jobs(path, read_header(path)):
                job()
            for state in map(parse, sorted(each.name for each in path.parent.glob("*.state"))):
                if isinstance(state, StateName):
                    self._check_chain(path.parent, state, path.name)
        except (OSError, CorruptFileError) as error:
            return str(error)
        return "nothing"

    def _check_chain(self, folder: Path, state: StateName, file: str) -> None:
        """Raise CorruptFileError if the chain of ``state`` shows that ``file`` is damaged."""
        try:
            open_chain(folder, state, None, _run)
        except CorruptFileError as error:
            if error.file == file:
                raise
        except FileNotFoundError:
            return

    def _is_whole(self, stored: Stored, inodes: Mapping[Path, int]) -> bool:
        try:
            return self._read_back(*stored) == inodes
        except (FileNotFoundError, CorruptFileError):
            return False

    def _read_back(self, fingerprint: str, state: StateName) -> dict[Path, int]:
        """Read all files of a state, and return their inodes. Raises FileNotFoundError or
        CorruptFileError.
        """
        top, chain, _ = open_chain(self._root / fingerprint, state, None, _run)
        inodes = {}
        for stored in (top, *chain):
            _run(check_jobs(stored.path, stored.header))
            inodes[stored.path] = stored.path.stat().st_ino
        return inodes

    def _verified(self, *, is_deep: bool) -> VerifiedFiles:
        """Compare index and files; ``is_deep`` reads every byte."""
        directory = CacheDirectory(self._root, readers=InlineReaders(self._clock))
        try:
            if is_deep:
                return directory.verify()
            return verify(self._root, directory.reading, None, None)
        finally:
            directory.close()


def _run(jobs: Iterable[Job]) -> None:
    """Run ``jobs`` on this thread."""
    for job in jobs:
        job()

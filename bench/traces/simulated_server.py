"""A simulated server: the real engine, cache, disk tier and policies; no model, and a clock that
stands still unless it is advanced.

Rows and states have 1/SCALE of their bytes, and so have all budgets; files are written to and read
from a temporary directory by the real store. The simulation leaves out:

- the time of writes: the drive has written a snapshot before anything else happens, so the backlog
  of writes is never full;
- the files of recent prompts, which would be SCALE times too large; a restart keeps the prompts;
- the limit of ten seconds for writing when a server ends.
"""

from __future__ import annotations

import tempfile
import time
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from bench.gpu_seconds import Device
from bench.simulated import SizedBackend, serve
from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.costs import Costs
from pyctl.cache.device_limits import MAX_UNWRITTEN_BYTES, PIECE_BYTES, DeviceLimits
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.ports import RowsOf
from pyctl.cache.ram import RamCache
from pyctl.cache.recent import RecentPrompt
from pyctl.cache.snapshot import Snapshot
from pyctl.disk.directory import CacheDirectory
from pyctl.disk.disk import Disk, WriteLimits
from pyctl.disk.model_folder import ModelFolder
from pyctl.disk.reader import StoreReader
from pyctl.disk.writer import StoreWriter
from pyctl.engine.backend import Backend
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.idle import IDLE_SECONDS
from pyctl.errors import UnavailableError
from pyctl.prompt import Prompt, Tokens

SCALE = 256
"""Bytes of the model for each byte here."""

TOKEN_BYTES = 4
"""Bytes of a token id, which the cache counts with its row."""

N_SEQS = 4
"""Sequences of the server, its default."""

N_UBATCH = 512
"""Tokens of a batch, its default."""

DISK_POLICY = "auto:30,spill"
"""The default of --disk-prefix-cache."""

READ_LATENCY = 0.01
"""Seconds until the first byte of a snapshot comes from the drive."""

READ_RATE = 2e9
"""Bytes that an SSD reads in a second: between SATA, 0.5e9, and NVMe, 3.5e9."""

FLUSH_SECONDS = 60.0
"""Longest wait for the thread that writes; it takes milliseconds."""

MIDNIGHT = 86_400.0 * 20_000
"""Seconds since the epoch at which the clock starts, at the start of a day."""

FINGERPRINT = "0" * 32


@dataclass(frozen=True)
class Card:
    """Memory and speed of the simulated machine.

    Attributes:
        device: Seconds for batches and copies.
        n_cells: Tokens of context, shared by all sequences.
        row_bytes: Bytes of KV for a token.
        state_bytes: Bytes of the recurrent state.
        ram_bytes: Limit of the prefix cache in RAM.
        disk_bytes: Limit of the cache directory, 0 for no disk tier.
        daily_bytes: Limit of the bytes written to it in a day, 0 for no limit.
    """

    device: Device
    n_cells: int
    row_bytes: int
    state_bytes: int
    ram_bytes: int
    disk_bytes: int = 0
    daily_bytes: int = 0


class VirtualClock:
    """A clock in seconds since the epoch, which goes on only by `advance_to`."""

    def __init__(self) -> None:
        self.now = MIDNIGHT
        # The virtual time at which each span of real time began.
        self._real: list[float] = [0.0]
        self._virtual: list[float] = [MIDNIGHT]

    def __call__(self) -> float:
        return self.now

    def advance_to(self, seconds: float) -> None:
        """Let the clock show ``seconds`` after its start, unless it is later already."""
        if MIDNIGHT + seconds <= self.now:
            return
        self.now = MIDNIGHT + seconds
        self._real.append(time.monotonic())
        self._virtual.append(self.now)

    def at(self, monotonic: float) -> float:
        """Return what this clock showed at ``monotonic`` seconds of the system's clock."""
        return self._virtual[bisect_right(self._real, monotonic) - 1]


class _CardCosts(Costs):
    """The card's and the drive's seconds, where a server measures its own.

    So the speed of the machine that simulates decides nothing.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._token_seconds = device.batch(N_UBATCH, 0) / N_UBATCH
        self._depth_seconds = device.per_row

    def evaluate(self, first: int, last: int) -> float:
        n = last - first
        return n * (self._token_seconds + self._depth_seconds * (first + last) / 2)

    def load(self, n_bytes: int) -> float:
        return super().load(n_bytes * SCALE)

    def read(self, n_bytes: int) -> float:
        return READ_LATENCY + n_bytes * SCALE / READ_RATE

    def record_evaluated(self, first: int, last: int, seconds: float) -> None:
        """Leave out a measurement of the simulation."""

    def record_read(self, n_bytes: int, seconds: float) -> None:
        """Leave out a measurement of the simulation."""


class _PromptDisk(Disk):
    """A disk that has written everything before the engine goes on, so that equal runs are equal.

    ``virtual`` is the clock of the directory.
    """

    virtual: VirtualClock

    def write(self, snapshot: Snapshot, *, is_last: bool = False) -> None:
        super().write(snapshot, is_last=is_last)
        self.flush(FLUSH_SECONDS)

    def evict(self, snapshot: Snapshot, value: float, rows_of: RowsOf) -> None:
        age = self.virtual.now - self.virtual.at(snapshot.used)
        snapshot.used = time.monotonic() - age
        super().evict(snapshot, value, rows_of)
        self.supply_rows(rows_of)  # copies of rows are complete at once

    def supply_rows(self, rows_of: RowsOf) -> None:
        super().supply_rows(rows_of)
        self.flush(FLUSH_SECONDS)


class _CardBackend(SizedBackend):
    """A backend whose model can be unloaded."""

    def unload(self) -> None:
        """Free the device, from which all rows are gone already."""

    def load(self) -> None:
        """Load the model again."""


@dataclass(frozen=True)
class Answer:
    """An answered request.

    Attributes:
        stats: The engine's account.
        seconds: Seconds of the prompt: reads, copies and batches.
        n_from_device: Rows of the restored prefix that had stayed on the device.
    """

    stats: RequestStats
    seconds: float
    n_from_device: int


class SimulatedServer:
    """A server on ``card``; its files lie in ``directory``. ``clock`` gives the time of day."""

    def __init__(self, card: Card, directory: Path, clock: VirtualClock) -> None:
        self.card = card
        self.clock = clock
        self._directory = directory
        self._n_read = 0
        self.backend, self.cache, self.disk, self.engine = self._start(())

    def answer(self, prompt: Prompt, reply: Tokens) -> Answer:
        """Evaluate ``prompt`` and generate ``reply``."""
        counts = self.engine.prefix_cache.device.counts
        returned_before = counts.returned
        read_before = self._n_read
        stats, seconds = serve(self.engine, self.backend, prompt, reply)
        self._settle()
        waited = seconds[self.card.device.name]
        if stats.source == "disk":
            waited += self.cache.costs.read(self._n_read - read_before)
        return Answer(stats, waited, counts.returned - returned_before)

    def idle(self, seconds: float) -> None:
        """Let no client's request come for ``seconds``: rows that only the device has are copied
        to free RAM, as the server does then.
        """
        if seconds < IDLE_SECONDS:
            return
        while self.engine.prefix_cache.write_back.copy_next():
            pass
        self._settle()

    def switch_model(self) -> None:
        """Unload the model for another one, and load it again: nothing stays on the device."""
        self.engine.sleep()
        self._settle()
        self.engine.wake()

    def restart(self) -> None:
        """End the server and start another one on the same directory."""
        recent = self.disk.recent.newest_first() if self.disk is not None else ()
        self.close()
        self.backend, self.cache, self.disk, self.engine = self._start(recent)

    def close(self) -> None:
        """End the server; the ends of conversations are written."""
        self.engine.close(UnavailableError("the simulated server ends"))

    def _start(
        self, recent: tuple[RecentPrompt, ...]
    ) -> tuple[_CardBackend, RamCache, Disk | None, Engine]:
        """Start with an empty device and RAM, and with the ``recent`` prompts of the server
        before.
        """
        card = self.card
        backend = _CardBackend(
            card.n_cells,
            N_SEQS,
            max(round((card.row_bytes + TOKEN_BYTES) / SCALE) - TOKEN_BYTES, 1),
            card.state_bytes // SCALE,
            n_ubatch=N_UBATCH,
            batch_cost=N_UBATCH // 2,
            scale=SCALE,
        )
        cache = RamCache(0, card.ram_bytes // SCALE, costs=_CardCosts(card.device))
        limits = DeviceLimits(PIECE_BYTES // SCALE, MAX_UNWRITTEN_BYTES // SCALE)
        disk = self._open_disk(backend) if card.disk_bytes else None
        if disk is not None:
            disk.recent.load(recent)
        settings = EngineSettings(device=limits)
        engine = Engine(cast(Backend, backend), cache, settings, disk, clock=self.clock)
        return backend, cache, disk, engine

    def _open_disk(self, backend: SizedBackend) -> Disk:
        card = self.card
        budget = card.disk_bytes // SCALE
        directory = CacheDirectory(self._directory, budget, clock=self.clock)
        folder = ModelFolder(directory, FINGERPRINT, backend.shape.sizes)
        reader = StoreReader(folder)
        disk = _PromptDisk(
            reader,
            StoreWriter(folder, card.daily_bytes // SCALE or None),
            DiskPolicy.from_flag(DISK_POLICY),
            WriteLimits(spilled_bytes=MAX_UNWRITTEN_BYTES // SCALE, recent_bytes=0),
        )
        disk.virtual = self.clock
        reader.record_read = self._count_read
        return disk

    def _count_read(self, n_bytes: int, seconds: float) -> None:
        self._n_read += n_bytes

    def _settle(self) -> None:
        """Write the snapshots that wait for rows of the device."""
        disk = self.disk
        if disk is None:
            return
        disk.flush(FLUSH_SECONDS)
        while disk.awaits_rows:
            self.engine.prefix_cache.write_back.flush_copies()


def temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a directory for the files of a simulated server, which goes when it is closed."""
    return tempfile.TemporaryDirectory(prefix="pyctl-traces-", ignore_cleanup_errors=True)

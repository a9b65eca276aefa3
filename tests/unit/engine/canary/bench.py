"""An engine on the fake backend whose canary a test drives step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Block, Segment, Snapshot
from pyctl.engine.canary.canary_counts import CanaryView
from pyctl.engine.canary.canary_limits import CanaryLimits
from pyctl.engine.canary.targets import Place
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.fake.fake_cells import FakeHeldRows
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ManualClock, Reply, ask, flushed, tier_on
from tests.unit.engine.messages import chat

Kind = Literal["attention", "hybrid", "opaque"]

HOUR = 3600

PROMPT = chat((1, 160), (2, 100), (3, 40))

NEXT = chat((1, 160), (2, 100), (3, 40), (4, 100))


class CanaryBench:
    """An engine with --exact and a canary; its only conversation is PROMPT, then NEXT.

    With a ``directory`` everything is also on disk.
    """

    def __init__(
        self,
        kind: Kind = "hybrid",
        directory: Path | None = None,
        *,
        exact: bool = True,
        can_hold: bool = True,
        budget: int | None = None,
        n_ctx: int = 4096,
        limits: CanaryLimits = CanaryLimits(seed=1),
        interval: int = HOUR,
    ) -> None:
        """Make an engine on the fake backend with a clock that only the test moves, and a disk in
        ``directory`` if there is one.
        """
        self.backend = FakeBackend(kind, can_hold=can_hold, n_ctx=n_ctx)
        self.clock = ManualClock()
        settings = EngineSettings(exact=exact, canary_interval=interval, canary=limits)
        disk = tier_on(directory) if directory is not None else None
        self.engine = Engine(self.backend, RamCache(32, budget), settings, disk, clock=self.clock)
        self.canary = self.engine.canary
        self.cache = self.engine.prefix_cache.cache

    def talk(self) -> None:
        """Ask twice, and have everything in RAM, and on disk if there is one."""
        for prompt in (PROMPT, NEXT):
            assert self.ask(prompt).error is None
        while self.engine.prefix_cache.write_back.copy_next():
            pass
        self.backend.synchronize()
        if self.engine.prefix_cache.disk is not None:
            flushed(self.engine)

    def ask(self, prompt: Prompt) -> Reply:
        return ask(self.engine, prompt, 6)

    def check(self) -> CanaryView:
        """Let the next check become due, and run it to its end."""
        self.clock.advance(HOUR)
        self.canary.step()
        while self.canary.is_running:
            if self.canary.reads is not None:
                self.canary.reads.wait(1.0)
            self.canary.step()
        check_invariants(self.cache)
        return self.canary.view()

    def check_all(self, n: int = 40) -> CanaryView:
        """Run ``n`` checks; those not done yet are likelier."""
        for _ in range(n):
            view = self.check()
        return view

    def check_only(self, place: Place) -> CanaryView:
        """Run checks until one of ``place`` has a result, or there are too many."""
        for _ in range(200):
            view = self.check()
            if place in view.verified or view.differing:
                return view
        raise AssertionError(f"no snapshot in {place} was checked: {view}")

    @property
    def snapshots(self) -> list[Snapshot]:
        """The snapshots in RAM, the shallowest first."""
        return sorted(self.cache.snapshots(), key=lambda snapshot: snapshot.n)


def flip(block: Block, at: int = -1) -> None:
    """Flip one bit of ``block``."""
    block.flags.writeable = True
    block[at] ^= 1


def flip_row(backend: FakeBackend, segment: Segment) -> None:
    """Flip one bit of the last row that the device holds of ``segment``."""
    held = segment.held
    assert isinstance(held, FakeHeldRows)
    rows = backend.seqs[0].memory.rows
    cell = held.cells[-1]
    row = np.frombuffer(rows[cell], np.uint8).copy()
    flip(row)
    rows[cell] = row.tobytes()

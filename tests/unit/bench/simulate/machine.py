"""A machine without faults, unless a test asks for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.simulate.clock import SimulatedClock
from bench.simulate.drive import Drive, Process
from bench.simulate.faults import EventLog, Faults
from bench.simulate.model import Weights
from bench.simulate.server import Server, Setup
from pyctl.disk.file_format import StateName
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Piece, Request
from pyctl.prompt import Prompt

SETUP = Setup(
    Weights(0, is_hybrid=True, rounds=False),
    n_cells=2048,
    batch_cost=0,
    ram_bytes=200_000,
    disk_bytes=600_000,
    daily_bytes=None,
    policy="full",
)


class Machine:
    """A drive in ``directory`` with its clock, faults and events."""

    def __init__(self, directory: Path, seed: int = 1) -> None:
        self.log = EventLog()
        self.faults = Faults(random.Random(seed), self.log)
        self.root = directory / "cache"
        self.root.mkdir()
        self.drive = Drive(self.root, self.faults, random.Random(seed))
        self.clock = SimulatedClock()
        self.stored: list[StateName] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the process use this machine's clock and drive."""
        with self.clock.installed(), self.drive.installed():
            yield

    def process(self) -> Process:
        """Return a process that runs now."""
        self.drive.process = Process("test")
        return self.drive.process

    def server(self, setup: Setup = SETUP) -> Server:
        """Return a server that has recovered the directory."""
        server = Server(
            "test",
            setup,
            self.drive,
            self.faults,
            self.clock,
            self.log,
            random.Random(1),
            lambda server, state: self.stored.append(state),
        )
        server.readers.close()
        return server


def ask(server: Server, prompt: Prompt, n: int = 4) -> list[int]:
    """Return the reply of ``server``, and write what it chose for the disk."""
    handle = RequestHandle(Request(prompt, max_tokens=n))
    server.engine.submit(handle)
    while server.engine.scheduler.has_work:
        server.step()
    server.rest()
    return [token for each in handle.drain() if isinstance(each, Piece) for token in each.tokens]

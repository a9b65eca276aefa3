"""The simulated household: clients, servers that come and go, and the check of each reply."""

from __future__ import annotations

import gc
import heapq
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.simulate.audit import Audit, Stored, WrongError
from bench.simulate.clients import Client, clients
from bench.simulate.clock import SimulatedClock
from bench.simulate.drive import Drive
from bench.simulate.faults import EventLog, Faults, KilledError, StepReachedError
from bench.simulate.incidents import Incidents
from bench.simulate.model import cold_reply
from bench.simulate.server import N_UBATCH, Server, Setup
from bench.traces.recording import Session
from pyctl.cache.plan import batch_ends
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Piece, Request
from pyctl.prompt import Prompt

N_AT_ONCE = 4
"""Sessions at any time: so many send about 10**6 requests in a year."""

REPLY_ROOM = 16
"""Tokens of a context that a prompt leaves to its reply."""

RETRY_SECONDS = 5.0
"""After so long a client sends a request again whose server is gone."""

IDLE_SECONDS = 2.0
"""Seconds without a request after which a server does deferred work."""

SHOWN_REQUESTS = 200
"""After so many requests the caller may end the simulation, and cycles are collected."""

CANCEL_RATE = 0.03
"""The share of requests that are cancelled."""

CHECK_RATE = 0.02
"""The share of requests after which the cache in RAM is checked."""

FAULTY_START_RATE = 0.2
"""The share of starts during which calls may fail."""

CHANGE_RATE = 0.3
"""The share of restarts with other flags or another model."""


@dataclass
class Asked:
    """A request on its way."""

    client: Client
    prompt: Prompt
    n: int
    server: Server
    handle: RequestHandle
    steps_left: int
    tokens: list[int] = field(default_factory=list)


@dataclass(order=True)
class Arrival:
    """The next request of a client; ``order`` decides between two at the same time. ``again`` is a
    request that gets another try.
    """

    at: float
    order: int
    client: Client = field(compare=False)
    again: tuple[Prompt, int] | None = field(compare=False, default=None)


@dataclass
class Totals:
    """Sums over all servers."""

    n_requests: int = 0
    n_refused: int = 0
    n_prompt: int = 0
    n_evaluated: int = 0
    restored: Counter[str] = field(default_factory=Counter)


class _Warnings(logging.Handler):
    """Counts the warnings of the servers, and keeps an error, which no fault excuses."""

    def __init__(self, log: EventLog) -> None:
        super().__init__(logging.WARNING)
        self.error = ""
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        # A read may fail; bytes that were read and verified fit the model.
        is_misfit = message.startswith("cannot restore") and "disk cache:" not in message
        if (record.levelno >= logging.ERROR or is_misfit) and not self.error:
            self.error = f"{message} {record.exc_info and record.exc_info[1]!r}"
        self._log.add("warning", str(record.msg))


class Household:
    """Clients and servers on one machine, all from one seed.

    Attributes:
        log: The events.
        clock: The time of all.
        totals: The requests and tokens so far.
        drive: The machine's drive.
        audit: The checks of the directory.
        servers: The servers that run.
        takes_power: Whether the next death of a process is a power failure.
    """

    def __init__(
        self, sessions: Sequence[Session], seed: int, directory: Path, until: int = 0
    ) -> None:
        """Prepare a machine whose drive is in ``directory``; stop at step ``until``, if any."""
        self.log = EventLog(until)
        self.clock = SimulatedClock()
        self.totals = Totals()
        self._rng = random.Random(seed)
        self._faults = Faults(random.Random(f"{seed} faults"), self.log)
        self._faults.on_kill = self._die
        root = directory / "cache"
        root.mkdir()
        self.drive = Drive(root, self._faults, random.Random(f"{seed} drive"))
        self.audit = Audit(self.drive, self.log, random.Random(f"{seed} audit"), self.clock)
        self.servers: list[Server] = []
        self.takes_power = False
        self._clients = clients(sessions, random.Random(f"{seed} clients"))
        self._arrivals: list[Arrival] = []
        self._n_arrivals = 0
        self._asked: list[Asked] = []
        self._setup = Setup.draw(self._rng)
        self._restarts = True
        self._n_servers = 0
        self._incidents = Incidents(self, self._faults, random.Random(f"{seed} incidents"))
        self._warnings = _Warnings(self.log)

    @property
    def n_calls(self) -> int:
        """The calls of the servers that could have failed."""
        return sum(self._faults.n_calls.values())

    # -- time
    # ----------------------------------------------------------------------------------

    def run(self, hours: float) -> Iterator[float]:
        """Serve the clients for ``hours`` of the clock; yield the hours so far, now and then.
        Raises WrongError.
        """
        logger = logging.getLogger("pyctl")
        level = logger.level
        propagates = logger.propagate
        logger.addHandler(self._warnings)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        # The objects that die when a cycle is collected must not depend on earlier runs.
        gc.collect()
        gc.disable()
        try:
            with self.clock.installed(), self.drive.installed():
                try:
                    yield from self._run(hours)
                except StepReachedError:
                    yield self.clock.now / 3600
                finally:
                    for server in self.servers:
                        server.kill()
        finally:
            gc.enable()
            logger.removeHandler(self._warnings)
            logger.setLevel(level)
            logger.propagate = propagates

    def _run(self, hours: float) -> Iterator[float]:
        """Serve the clients until the hours are over, then stop the servers; yields as `run`."""
        began = self.clock.now
        self.start_server()
        for _ in range(N_AT_ONCE):
            self._arrive(next(self._clients), self._rng.uniform(0, 600))
        n_shown = 0
        while (now := self.clock.now) < began + hours * 3600:
            if self.totals.n_requests >= n_shown + SHOWN_REQUESTS:
                n_shown = self.totals.n_requests
                gc.collect()
                yield (now - began) / 3600
            self._take_arrivals()
            self._incidents.run_due()
            busy = [server for server in self.servers if server.engine.scheduler.has_work]
            if busy:
                self.run_server(self._rng.choice(busy), Server.step)
            else:
                self._idle()
            self._collect()
            if self._warnings.error:
                raise WrongError(f"a server logged an error: {self._warnings.error}")
        hours = (self.clock.now - began) / 3600
        self.stop_all()
        yield hours

    def _idle(self) -> None:
        """Let time pass until something happens; servers do deferred work."""
        next_at = self._incidents.next_at
        if self._arrivals:
            next_at = min(next_at, self._arrivals[0].at)
        pause = next_at - self.clock.now
        if pause > IDLE_SECONDS:
            for server in list(self.servers):
                self.run_server(server, Server.rest)
        self.clock.advance(max(pause, 0.001))

    def run_server(self, server: Server, work: Callable[[Server], object]) -> None:
        """Run some ``work`` of ``server``, with faults; it may be killed meanwhile."""
        self._faults.is_active = True
        try:
            work(server)
        except KilledError:
            self._bury(server)
        finally:
            self._faults.is_active = False
            self.drive.process = None

    # -- clients
    # ----------------------------------------------------------------------------------

    def _arrive(
        self, client: Client, seconds: float, again: tuple[Prompt, int] | None = None
    ) -> None:
        self._n_arrivals += 1
        at = self.clock.now + seconds
        heapq.heappush(self._arrivals, Arrival(at, self._n_arrivals, client, again))

    def _take_arrivals(self) -> None:
        """Send the requests that are due."""
        while self._arrivals and self._arrivals[0].at <= self.clock.now:
            arrival = heapq.heappop(self._arrivals)
            prompt, n = arrival.again or arrival.client.make()
            server = self._rng.choice(self.servers)
            if len(prompt) + n + REPLY_ROOM > server.setup.n_cells:
                self.totals.n_refused += 1
                self._go_on(arrival.client)
                continue
            self._send(arrival.client, prompt, n, server)

    def _send(self, client: Client, prompt: Prompt, n: int, server: Server) -> None:
        is_cancelled = self._rng.random() < CANCEL_RATE
        steps_left = self._rng.randrange(1, 12) if is_cancelled else -1
        handle = RequestHandle(Request(prompt, max_tokens=n), self.clock)
        self._asked.append(Asked(client, prompt, n, server, handle, steps_left))
        self.run_server(server, lambda server: server.engine.submit(handle))

    def _go_on(self, client: Client) -> None:
        """Let ``client`` wait for its next request, or another session start."""
        if client.is_over:
            client = next(self._clients)
        self._arrive(client, client.think)

    def _collect(self) -> None:
        """Check the replies that have ended, and cancel some that have not."""
        for asked in list(self._asked):
            if asked.server not in self.servers:
                self._asked.remove(asked)
                self._arrive(asked.client, RETRY_SECONDS, (asked.prompt, asked.n))
                continue
            asked.steps_left -= 1
            if asked.steps_left == 0:
                asked.handle.cancel()
                self.log.add("cancelled")
            for event in asked.handle.drain():
                self._take_event(asked, event)
            is_open = asked in self._asked and not self._is_served(asked)
            if is_open and asked.handle.cancelled:
                self._asked.remove(asked)
                self._check_reply(asked, is_whole=False)
                self._go_on(asked.client)

    def _is_served(self, asked: Asked) -> bool:
        scheduler = asked.server.engine.scheduler
        active = (*scheduler.running, *scheduler.waiting)
        return any(each.handle is asked.handle for each in active)

    def _take_event(self, asked: Asked, event: object) -> None:
        if isinstance(event, Piece):
            asked.tokens += event.tokens
        elif isinstance(event, Done):
            self._asked.remove(asked)
            self._check_reply(asked, is_whole=True)
            self._count(asked, event)
            self._go_on(asked.client)
        elif isinstance(event, Failed):
            self._asked.remove(asked)
            self._check_reply(asked, is_whole=False)
            if "made to fail" not in str(event.error):
                raise WrongError(f"a request failed: {event.error!r}")
            self._go_on(asked.client)

    def _count(self, asked: Asked, done: Done) -> None:
        stats = done.stats
        totals = self.totals
        totals.n_requests += 1
        totals.n_prompt += stats.n_prompt
        totals.n_evaluated += stats.n_evaluated
        totals.restored[stats.source] += stats.n_cached
        self.log.add("reply", f"{stats.n_prompt} {stats.source} {stats.n_cached} {asked.tokens}")
        if self._rng.random() < CHECK_RATE:
            self.audit.check_ram(asked.server)

    # -- servers
    # ----------------------------------------------------------------------------------

    def start_server(self) -> None:
        """Start a server on a directory whose files are checked before, and its index after."""
        self.audit.check_bytes()
        self._faults.is_active = is_faulty = self._rng.random() < FAULTY_START_RATE
        self._n_servers += 1
        name = f"server {self._n_servers}"
        try:
            server = Server(
                name,
                self._setup,
                self.drive,
                self._faults,
                self.clock,
                self.log,
                self._rng,
                self.audit.record_stored,
            )
            while server.readers.run_next():
                continue
        except KilledError:
            self._bury_unborn()
            return self.start_server()
        self.drive.process = None
        self._faults.is_active = False
        self.servers.append(server)
        self.log.add("start", f"{self._setup.fingerprint} {self._setup.policy}")
        if not is_faulty:
            self.audit.check_recovered(server)

    def _die(self) -> None:
        """Let no further call of the process that runs change anything."""
        process = self.drive.process
        assert process is not None
        process.is_dead = True

    def _bury(self, server: Server) -> None:
        """Remove a killed server; after a power failure also the others, and unsynced bytes."""
        gone = list(self.servers) if self.takes_power else [server]
        before = self.audit.whole_states() if self.takes_power else set()
        for each in gone:
            each.kill()
            self.servers.remove(each)
        gc.collect()
        if self.takes_power:
            self._lose_power(before)
        if not self.servers and self._restarts:
            self.restart()

    def _bury_unborn(self) -> None:
        """Remove a server that was killed at its start, and all others if the power failed."""
        self.log.add("killed", "at its start")
        assert self.drive.process is not None
        self.drive.process.end()
        self.drive.process = None
        self._faults.is_active = False
        if self.takes_power:
            for other in self.servers:
                other.kill()
            self.servers.clear()
            # Its recovery may have evicted some, before it was killed.
            self._lose_power(self.audit.whole_states())

    def _lose_power(self, before: set[Stored]) -> None:
        """Take unsynced bytes; the states that were whole ``before`` have to survive."""
        self.takes_power = False
        self.log.add("power failure")
        self.drive.lose_power()
        self.audit.check_survivors(before)

    def restart(self) -> None:
        """Start a server, sometimes with other flags or another model."""
        if self._rng.random() < CHANGE_RATE:
            self._setup = Setup.draw(self._rng)
        self.start_server()

    def stop_all(self) -> None:
        """Stop all servers; one that is killed meanwhile may have taken the others with it."""
        self._restarts = False
        while self.servers:
            self.stop_server(self.servers[-1])
        self._restarts = True

    def stop_server(self, server: Server) -> None:
        """Stop ``server`` as SIGTERM does; it may be killed meanwhile."""
        self.run_server(server, Server.close)
        if server in self.servers:
            self.servers.remove(server)

    # -- checks
    # ----------------------------------------------------------------------------------

    def _check_reply(self, asked: Asked, *, is_whole: bool) -> None:
        """Compare a reply with the one that the model gives from nothing. Raises WrongError."""
        setup = asked.server.setup
        ends = [len(asked.prompt)]
        if setup.weights.rounds:
            ends = batch_ends(asked.prompt, N_UBATCH, batch_cost=setup.batch_cost)
        n = asked.n if is_whole else len(asked.tokens)
        expected = cold_reply(setup.weights, asked.prompt.tokens, ends, n)
        asked.client.receive(asked.tokens)
        if asked.tokens != expected:
            raise WrongError(
                f"a reply of {setup.fingerprint} to {len(asked.prompt)} tokens is {asked.tokens}, "
                f"without a cache {expected}"
            )

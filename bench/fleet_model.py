"""Many servers, a router and a store, as a model: no engine, so that thousands of sessions take seconds.

A server keeps what it evaluated in RAM, least recently used leaves first. It evaluates one prompt at a time and writes
up to four replies side by side. The store is one link in each direction, first come, first served.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol, TypeAlias

from bench.gpu_seconds import Device
from tools.generator import QWEN36_27B

__all__ = ["ROUTERS", "Fleet", "Places", "Prefix", "RoundRobin", "Router", "Step", "Sticky", "Summary"]

ROW_BYTES, STATE_BYTES = QWEN36_27B.row_bytes(), QWEN36_27B.state_bytes
N_REPLIES = 4
MOST_BEHIND_SECONDS = 60.0
"""Snapshots that would wait longer for the link to the store are not sent."""

FETCH_LATENCY = 0.02

Places: TypeAlias = tuple[tuple[int, Hashable], ...]
"""Of a prompt the token counts at which it may part from others, ascending, and what identifies the tokens before."""


@dataclass(frozen=True)
class Step:
    """A request: its ``places``, the last one at its end, the tokens of its reply, and places ``after`` its beginning.

    ``cuts`` are token counts of places that get a state whatever was there before.
    """

    conversation: Hashable
    places: Places
    n_reply: int
    after: Places = ()
    cuts: frozenset[int] = frozenset()

    @property
    def n(self) -> int:
        """Tokens of the prompt."""
        return self.places[-1][0]


# -- routers -----------------------------------------------------------------------------------------------------------


class Router(Protocol):
    """Chooses a server for each request; ``loads`` are the requests that each has now."""

    def choose(self, step: Step, loads: Sequence[int]) -> int: ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._n = -1

    def choose(self, step: Step, loads: Sequence[int]) -> int:
        self._n += 1
        return self._n % len(loads)


class Sticky:
    """As deploy/haproxy.cfg: a new conversation goes where fewest requests run, and stays there."""

    def __init__(self) -> None:
        self._server: dict[Hashable, int] = {}
        self._last = -1

    def choose(self, step: Step, loads: Sequence[int]) -> int:
        if step.conversation not in self._server:
            after = range(self._last + 1, self._last + 1 + len(loads))
            self._last = min((at % len(loads) for at in after), key=loads.__getitem__)
            self._server[step.conversation] = self._last
        return self._server[step.conversation]


class Prefix:
    """As deploy/sglang-router.sh: the longest beginning that a server was sent, unless it has seven requests more."""

    THRESHOLD, RATIO = 0.3, 1.1
    most_ahead = 6

    def __init__(self) -> None:
        self._servers: dict[Hashable, int] = {}  # a bit for each server
        self._sizes: list[int] = []

    def choose(self, step: Step, loads: Sequence[int]) -> int:
        self._sizes = self._sizes or [0] * len(loads)
        at, n_known = self._best(step, loads)
        for _, key in step.places:
            known = self._servers.get(key, 0)
            self._servers[key] = known | 1 << at
        self._sizes[at] += step.n - n_known
        return at

    def _best(self, step: Step, loads: Sequence[int]) -> tuple[int, int]:
        least = min(range(len(loads)), key=loads.__getitem__)
        if max(loads) - loads[least] > self.most_ahead and max(loads) > self.RATIO * loads[least]:
            return least, 0
        for n, key in reversed(step.places):
            if n < self.THRESHOLD * step.n:
                break
            if mask := self._servers.get(key, 0):
                having = [at for at in range(len(loads)) if mask >> at & 1]
                return min(having, key=loads.__getitem__), n
        return min(range(len(loads)), key=self._sizes.__getitem__), 0


ROUTERS: dict[str, type[Router]] = {"round robin": RoundRobin, "sticky": Sticky, "prefix-aware": Prefix}


# -- servers and a store -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Link:
    """Bytes a second in one direction; ``n_bytes`` went through."""

    rate: float
    free_at: float = 0.0
    n_bytes: int = 0

    def send(self, now: float, n_bytes: int) -> float:
        """When ``n_bytes`` are through."""
        self.free_at = max(now, self.free_at) + n_bytes / self.rate
        self.n_bytes += n_bytes
        return self.free_at


@dataclass(eq=False)
class Server:
    """Snapshots in RAM of ``budget`` bytes by the key of their place, which last ``until`` a time.

    It evaluates until ``free_at``.
    """

    budget: int
    until: float
    kept: OrderedDict[Hashable, tuple[int, bool]] = field(default_factory=OrderedDict)
    n_bytes: int = 0
    free_at: float = 0.0
    ends: list[float] = field(default_factory=list)  # of running replies, a heap

    def load(self, now: float) -> int:
        while self.ends and self.ends[0] <= now:
            heappop(self.ends)
        return len(self.ends)

    def ready(self, step: Step) -> tuple[int, int]:
        """Tokens before the deepest place with a state, all rows before it being there; and with rows alone."""
        found = parted = 0
        for n, key in step.places:
            entry = self.kept.get(key)
            if entry is None:
                break
            found, parted = n if entry[1] else found, n
        return found, parted

    def keep(self, places: Places, states: Set[int]) -> None:
        """All up to the last of ``places``, with states at the token counts ``states``."""
        before = [0, *(n for n, _ in places)]
        for i in reversed(range(len(places))):  # what is deeper leaves sooner
            n, key = places[i]
            rows, had = (n - before[i]) * ROW_BYTES, self.kept.get(key)
            state = n in states or (had is not None and had[1])
            self.n_bytes += (rows if had is None else 0) + STATE_BYTES * (state - (had is not None and had[1]))
            self.kept[key] = rows, state
            self.kept.move_to_end(key)
        while self.n_bytes > self.budget:
            _, (rows, state) = self.kept.popitem(last=False)
            self.n_bytes -= rows + STATE_BYTES * state


@dataclass
class Summary:
    """The results of all requests."""

    n: int = 0
    n_prompt: int = 0
    n_evaluated: int = 0
    n_fetched: int = 0
    evaluating: float = 0.0
    waited: list[float] = field(default_factory=list)
    read: int = 0
    written: int = 0
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that was not evaluated."""
        return 1 - self.n_evaluated / self.n_prompt

    def quantile(self, share: float) -> float:
        """Of the seconds to the first token."""
        return sorted(self.waited)[min(int(share * self.n), self.n - 1)]


class Fleet:
    """``n_servers`` on ``device``, each with ``budget`` bytes of RAM, behind ``router``.

    ``store`` is bytes a second of its link in each direction, 0 for none. Each server loses its RAM after ``lifetime``
    seconds, again and again, one after the other. Sessions are lists of steps.
    """

    def __init__(
        self,
        n_servers: int,
        router: Router,
        device: Device,
        budget: int,
        store: float = 0.0,
        lifetime: float = math.inf,
    ) -> None:
        self._servers = [Server(budget, (1 + at / n_servers) * lifetime) for at in range(n_servers)]
        self._lifetime = lifetime
        self._router, self._device = router, device
        self._reads = Link(store) if store else None
        self._writes = Link(store) if store else None
        self._stored: dict[Hashable, tuple[float, bool]] = {}  # since when, and whether with a state
        self.summary = Summary()

    def run(self, sessions: Sequence[Sequence[Step]], n_active: int, seed: int = 1) -> Summary:
        """All of ``sessions``, of which ``n_active`` run at the same time; tools take 10 s on average."""
        rng = random.Random(seed)
        waiting = list(enumerate(sessions))[::-1]
        events: list[tuple[float, int, int]] = []
        for _ in range(min(n_active, len(sessions))):
            heappush(events, (rng.uniform(0, 60), waiting.pop()[0], 0))
        while events:
            now, at, i = heappop(events)
            end = self._serve(now, sessions[at][i])
            self.summary.seconds = max(self.summary.seconds, end)
            if i + 1 < len(sessions[at]):
                heappush(events, (end + rng.expovariate(0.1), at, i + 1))
            elif waiting:
                heappush(events, (end + rng.expovariate(0.1), waiting.pop()[0], 0))
        if self._reads is not None and self._writes is not None:
            self.summary.read, self.summary.written = self._reads.n_bytes, self._writes.n_bytes
        return self.summary

    def _serve(self, now: float, step: Step) -> float:
        """The end of the reply to ``step``, which comes at ``now``."""
        server = self._servers[self._router.choose(step, [each.load(now) for each in self._servers])]
        if now >= server.until:
            server.until += self._lifetime
            server.kept.clear()
            server.n_bytes = 0
        begin = now
        if len(server.ends) >= N_REPLIES:
            begin = sorted(server.ends)[-N_REPLIES]
        begin = max(begin, server.free_at)
        ready, parted = server.ready(step)
        ready, n_fetched = min(ready, step.n - 1), 0
        seconds = self._device.copy((ready * ROW_BYTES if ready else 0) + STATE_BYTES) if ready else 0.0
        cold = self._device.prompt(ready, step.n)
        evaluated = cold
        if (fetch := self._fetch(begin, step, ready, cold)) is not None:
            n_fetched, arrives = fetch
            seconds += arrives - begin
            evaluated = self._device.prompt(ready + n_fetched, step.n)
        first = begin + seconds + evaluated
        server.free_at = first
        end = first + step.n_reply * self._device.seconds[0]
        heappush(server.ends, end)
        states = {*step.cuts, parted, *(n for n, _ in step.places[-2:] + step.after)}
        server.keep(step.places + step.after, states)
        self._send(end, step.places + step.after, states)
        total = self.summary
        total.n += 1
        total.n_prompt += step.n
        total.n_fetched += n_fetched
        total.n_evaluated += step.n - ready - n_fetched
        total.evaluating += evaluated
        total.waited.append(first - now)
        return end

    def _fetch(self, now: float, step: Step, ready: int, cold: float) -> tuple[int, float] | None:
        """Tokens that come from the store and when, if that is sooner than evaluating them."""
        if self._reads is None:
            return None
        deepest = 0
        for n, key in step.places:
            since, has_state = self._stored.get(key, (now + 1, False))
            if since > now:
                break
            deepest = n if has_state else deepest
        n_more = min(deepest, step.n - 1) - ready
        if n_more <= 0:
            return None
        n_bytes = n_more * ROW_BYTES + STATE_BYTES
        takes = max(self._reads.free_at - now, 0.0) + n_bytes / self._reads.rate + FETCH_LATENCY
        if takes + self._device.prompt(ready + n_more, step.n) >= cold:
            return None
        return n_more, self._reads.send(now, n_bytes) + FETCH_LATENCY

    def _send(self, now: float, places: Places, states: Set[int]) -> None:
        """What the store does not have, if its link is not too far behind."""
        if self._writes is None or self._writes.free_at > now + MOST_BEHIND_SECONDS:
            return
        n_bytes, before, new = 0, 0, []
        for n, key in places:
            known = self._stored.get(key)
            has_state = known is not None and known[1]
            n_bytes += (n - before) * ROW_BYTES * (known is None) + STATE_BYTES * (n in states and not has_state)
            if known is None or (n in states and not has_state):
                new.append((key, n in states or has_state))
            before = n
        if new:
            there = self._writes.send(now, n_bytes)
            self._stored.update({key: (there, has_state) for key, has_state in new})

"""Requests of agents spread over two servers: the effect of routers and of a shared directory.

    python -m bench.fleet             # real engines and caches, without a model: some minutes
    python -m bench.fleet --real      # and two real servers on a tiny model: replies of one token

The shapes are those of bench/sessions.py. People share the heads of their programs and nothing else: folders and all
messages of users and tools are their own. A router knows a conversation by its first message. Hit rate is the share of
prompt tokens that were not evaluated; the floor of a request is its tokens less those that any request before it, at
any server, or its reply, had in the same places. Seconds are those of bench/gpu_seconds.py, without reads of a disk.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import tempfile
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import httpx
import numpy as np

from bench.budgets import N_CELLS, N_SEQS, N_UBATCH, ROW_BYTES, SCALE, STATE_BYTES, TEMPLATE, is_late
from bench.common import parse, parser_of, show
from bench.gpu_seconds import DEVICES
from bench.replay import command_of
from bench.sessions import AGENTS, PLAIN, Message, Reply
from bench.simulated import Known, Scripted, Simulation, SizedBackend, Turn, prompt_of, tokens_of
from bench.spill import NoisyBackend, Spilling
from pyctl.cache.plan import LEAST_SHARED
from pyctl.chat import CHATML
from pyctl.chat.template import Template
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from pyctl.prompt import Prompt, Tokens, as_tokens, common_prefix
from tools.generator import TINY_FAT, cached_model

CARD = DEVICES[-1]

N_ACTIVE = 6
"""Agents of two servers that work at the same time."""

IN_FLIGHT = 4
"""Requests that a router counts as running, where time does not pass."""


# -- what is asked -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Asked:
    """One request of a person, and its reply."""

    conversation: Hashable
    prompt: Prompt
    reply: Tokens

    @property
    def whole(self) -> Tokens:
        """Prompt and reply."""
        return as_tokens(np.concatenate([self.prompt.tokens, self.reply]))


class Recorder(Scripted):
    """Records the requests of one ``person``'s programs."""

    def __init__(self, template: Template, person: str) -> None:
        super().__init__(template)
        self.asked: list[Asked] = []
        self._person = person
        self._conversation: Hashable = person

    def chat(self, messages: Sequence[Message], reply: Reply = PLAIN, tools: Sequence[Message] = ()) -> Message:
        own = [self._own(message) for message in messages]
        self._conversation = next((each["content"] for each in own if each["role"] == "user"), self._person)
        return super().chat(own, reply, tools)

    def complete(self, prompt: str, reply: Reply = PLAIN) -> str:
        self._conversation = self._person
        return super().complete(f"({self._person}) {prompt}", reply)

    def _own(self, message: Message) -> Message:
        content = (message.get("content") or "").replace("/home/someone", f"/home/{self._person}")
        if message["role"] in ("user", "tool"):
            content = f"({self._person}) {content}"
        return {**message, "content": content}

    def _ask(self, rendered: str, out: str) -> None:
        self.asked.append(Asked(self._conversation, prompt_of(rendered), tokens_of(out)))


def recorded(programs: Sequence[str], n_people: int) -> list[list[Asked]]:
    """All requests of each person with each program."""
    template = Template(TEMPLATE.read_text(encoding="utf-8") if TEMPLATE.is_file() else CHATML, eos_token="<|im_end|>")
    found = []
    for program, person in itertools.product(programs, range(n_people)):
        recorder = Recorder(template, f"person{person}")
        AGENTS[program](recorder)
        found.append(recorder.asked)
    return found


def mixed(streams: Sequence[Sequence[Asked]], n_active: int, seed: int = 1) -> Iterator[tuple[int, int]]:
    """Whose next request comes, as index of the stream and in it; ``n_active`` streams run at the same time."""
    rng = random.Random(seed)
    waiting = list(range(len(streams)))
    rng.shuffle(waiting)
    active: list[Iterator[tuple[int, int]]] = []
    while waiting or active:
        while waiting and len(active) < n_active:
            at = waiting.pop()
            active.append(zip(itertools.repeat(at), range(len(streams[at]))))
        which = rng.randrange(len(active))
        if (chosen := next(active[which], None)) is None:
            del active[which]
        else:
            yield chosen


Places: TypeAlias = tuple[tuple[int, Hashable], ...]
"""Of a prompt the token counts at which it may part from others, ascending, and what identifies the tokens before."""


@dataclass(frozen=True)
class Step:
    """A request: its ``places``, the last one at its end."""

    conversation: Hashable
    places: Places

    @property
    def n(self) -> int:
        """Tokens of the prompt."""
        return self.places[-1][0]


def steps_of(streams: Sequence[Sequence[Asked]]) -> list[list[Step]]:
    """The same requests with the places where they part from each other, and without tokens."""
    flat = [asked for stream in streams for asked in stream]
    wholes = [asked.whole for asked in flat]
    marks = [{*asked.prompt.boundaries, len(asked.prompt)} for asked in flat]
    pairs = []
    for i, asked in enumerate(flat):
        shared = [common_prefix(wholes[j], asked.prompt.tokens) for j in range(i)]
        pairs += [(i, j, n) for j, n in enumerate(shared) if n >= LEAST_SHARED]
        if shared and (most := max(shared)) >= LEAST_SHARED:
            marks[i].add(most)
            marks[shared.index(most)].add(most)
    for i, j, n in pairs:  # a place of one is a place of all that have the same tokens before it
        common = {at for at in marks[i] | marks[j] if at <= n}
        marks[i] |= common
        marks[j] |= common
    steps = []
    for asked, whole, positions in zip(flat, wholes, marks, strict=True):
        digest, before, places = hashlib.blake2b(digest_size=8), 0, []
        for n in sorted(at for at in positions if at <= len(asked.prompt)):
            digest.update(whole[before:n].tobytes())
            places.append((n, digest.digest()))
            before = n
        steps.append(Step(asked.conversation, tuple(places)))
    at = iter(steps)
    return [[next(at) for _ in stream] for stream in streams]


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


# -- two servers with real engines -------------------------------------------------------------------------------------


def servers_of(n: int, gib: float, directory: Path | None) -> list[Simulation]:
    """``n`` servers with so much RAM of the 27B, and a cache directory that all share."""
    template, budget = Template(CHATML), int(gib * 2**30 / SCALE)
    sizes, how = (N_CELLS, N_SEQS, ROW_BYTES, STATE_BYTES), {"n_ubatch": N_UBATCH, "batch_cost": N_UBATCH // 2}
    if directory is None:
        return [Simulation(template, SizedBackend(*sizes, **how, scale=SCALE), budget, 0) for _ in range(n)]
    backends = [NoisyBackend(*sizes, **how, scale=SCALE) for _ in range(n)]
    return [Spilling(template, backend, budget, "auto:30", directory, 64.0) for backend in backends]


def routed(streams: Sequence[Sequence[Asked]], n_servers: int, router: str) -> Iterator[tuple[int, Asked]]:
    """Each request in its turn, and the server to which it goes."""
    choice, steps = ROUTERS[router](), steps_of(streams)
    running: deque[int] = deque(maxlen=IN_FLIGHT)
    for at, i in mixed(streams, N_ACTIVE):
        which = choice.choose(steps[at][i], [running.count(server) for server in range(n_servers)])
        running.append(which)
        yield which, streams[at][i]


def spread(streams: Sequence[Sequence[Asked]], servers: Sequence[Simulation], router: str) -> list[Turn]:
    """The tokens of ``streams`` that ``servers`` evaluated."""
    known, turns = Known(), []
    for server in servers:
        server.known = known
    for which, asked in routed(streams, len(servers), router):
        servers[which].answer(asked.prompt, asked.reply)
        turns.append(servers[which].turns[-1])
    return turns


def cells_of(turns: Sequence[Turn]) -> list[object]:
    """Hit rate, evaluated by floor, late requests, tokens from disk, and seconds of prompts on the card."""
    evaluated, floor = sum(turn.n_evaluated for turn in turns), sum(turn.floor for turn in turns)
    from_disk = sum(turn.n - turn.n_evaluated for turn in turns if turn.source == "disk")
    seconds = sum(turn.seconds[CARD.name] for turn in turns)
    hit_rate = 1 - evaluated / sum(turn.n for turn in turns)
    return [f"{hit_rate:.1%}", f"{evaluated / floor:.2f}", sum(map(is_late, turns)), from_disk, f"{seconds:.0f}"]


def routers(programs: Sequence[str], n_people: int, gib: float, keep: str) -> None:
    """The table of routers with and without a directory that two servers share."""
    streams = recorded(programs, n_people)
    rows: list[list[object]] = []
    for n, router, shares in [(1, "sticky", False), *itertools.product([2], ROUTERS, [False, True])]:
        with tempfile.TemporaryDirectory() as name:
            servers = servers_of(n, gib, Path(name) if shares else None)
            turns = spread(streams, servers, router)
            for server in servers:
                if isinstance(server, Spilling):
                    server.tier.close()
        label = router if n > 1 else "one server"
        rows.append([label, "shared" if shares else "none", len(turns), *cells_of(turns)])
        print(*rows[-1], flush=True)
    columns = ["router", "store", "requests", "hit rate", "per new token", "late", "from disk", f"s, {CARD.name}"]
    show(f"Two servers with {gib:g} GiB of the 27B each, {len(streams)} people", columns, rows, keep=keep)


# -- two real servers --------------------------------------------------------------------------------------------------


def asked_of(streams: Sequence[Sequence[Asked]], urls: Sequence[str], router: str) -> float:
    """The hit rate of real servers, asked in the same order."""
    n_prompt = n_evaluated = 0
    with httpx.Client(timeout=300) as client:
        for which, asked in routed(streams, len(urls), router):
            body = {"prompt": asked.prompt.tokens.tolist(), "n_predict": 1, "temperature": 0}
            timings: dict[str, Any] = client.post(f"{urls[which]}/completion", json=body).json()["timings"]
            n_prompt += timings["prompt_n"] + timings["cache_n"]
            n_evaluated += timings["prompt_n"]
    return 1 - n_evaluated / n_prompt


def real(programs: Sequence[str], n_people: int, gib: float, keep: str) -> None:
    """Hit rates of simulated and of real servers."""
    short = as_tokens([ord("a")])
    streams = [[replace(asked, reply=short) for asked in stream] for stream in recorded(programs, n_people)]
    rows: list[list[object]] = []
    for router in ROUTERS:
        turns = spread(streams, servers_of(2, gib, None), router)
        simulated = 1 - sum(turn.n_evaluated for turn in turns) / sum(turn.n for turn in turns)
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            command = command_of(PYCTL_SERVE, cached_model(TINY_FAT, Path(name)), gib, [], counts_all=True)
            started = [stack.enter_context(ServerProcess(command, Path(name) / f"{i}.log")) for i in range(2)]
            measured = asked_of(streams, [server.url for server in started], router)
        rows.append([router, len(turns), f"{measured:.1%}", f"{simulated:.1%}"])
        print(*rows[-1], flush=True)
    columns = ["router", "requests", "two real servers", "real engines, no model"]
    show(f"Hit rates, {', '.join(programs)}, {n_people} people, replies of a token", columns, rows, keep=keep)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--real", action="store_true", help="two real servers on a tiny model, beside the simulation")
    parser.add_argument("--only", nargs="+", default=list(AGENTS), choices=AGENTS, metavar="PROGRAM")
    parser.add_argument("--people", type=int, default=2, help="people for each program")
    parser.add_argument("--gib", type=float, default=8.0, help="RAM of a server, in bytes of the 27B")
    parser.add_argument("--ahead", type=int, default=Prefix.most_ahead, help="requests ahead at which a prefix is left")
    arguments = parse(parser, argv, only=["mini_swe"], people=1)
    keep = "fleet" if arguments.keep else ""
    Prefix.most_ahead = arguments.ahead
    os.fsync = cast(Any, lambda descriptor: None)
    if arguments.real:
        real(arguments.only, arguments.people, arguments.gib, keep and f"{keep}-real")
    else:
        routers(arguments.only, arguments.people, arguments.gib, keep and f"{keep}-routers")


if __name__ == "__main__":
    main()

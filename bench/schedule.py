"""Waits of agents that share one card, by schedule, without a model.

    python -m bench.schedule            # every case on every device, a minute
    python -m bench.schedule --search   # and the best schedules of small cases

Engine, scheduler and cache are the real ones; batches and copies take the seconds of
bench/gpu_seconds.py, on a clock that nothing else advances. bench.gpu.agents makes the agents and
their sizes; the first cases meet what it measured (bench/results/gpu-agents-*.md). An agent sends
its next turn when its reply ends. For each schedule the tables show: seconds from a request to its
first token, in sum and at most; seconds from a request to the end of its reply, in sum; seconds of
the whole case; prompt tokens evaluated; thousands of rows copied between device and RAM; replies
that were suspended.

Two rows are bounds. With *copies at no cost* nothing is left to prefetch from RAM. With *room for
all* each agent has a sequence, and the context holds all of them. --search runs small cases with
every combination of choices: at each prompt without room which replies give way, if any.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TypeAlias, cast

from bench.common import SIMULATED, parse, parser_of, show, words
from bench.gpu.agents import OVER, Agent
from bench.gpu.agents import Case as AgentCase
from bench.gpu_seconds import DEVICES, Device
from bench.simulate.clock import SimulatedClock
from bench.simulated import SizedBackend, prompt_of
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Block, HeldRows, Rows
from pyctl.engine.backend import Backend, SequenceTokens
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Request
from pyctl.engine.schedule.admission import ActiveRequest, Admission, Occupancy
from pyctl.llama.settings.resolved import GPU_UBATCH
from tools.generator import QWEN36_27B

__all__ = ["CASES", "SCHEDULES", "Case", "Outcome", "best_of_all", "simulate"]

SCALE = 256
"""Bytes of the 27B for each byte here."""

RAM_BYTES = 8 * 2**30
LETTER = ord("a")
"""The token of which replies consist: in the next prompt, its text is the same token."""

MAX_RUNS = 3000
"""Combinations of choices that --search tries for a case."""


@dataclass(frozen=True)
class Case:
    """Agents at once on one card.

    Attributes:
        name: The name, from which the agents' texts and sizes follow.
        n_agents: The number of agents.
        n_turns: The requests of each.
        n_seqs: The sequences of the server, 0 for one per agent.
        n_ctx: The tokens of context, 0 for `OVER` of what the agents grow to.
        results: The least and the most tokens of a tool result.
        replies: The least and the most tokens of a reply.
        head: The tokens of the head that all agents share.
    """

    name: str
    n_agents: int
    n_turns: int
    n_seqs: int = 0
    n_ctx: int = 0
    results: tuple[int, int] = (500, 4000)
    replies: tuple[int, int] = (128, 700)
    head: int = 3000

    def agents(self) -> list[Agent]:
        """Return the agents, equal for equal names and sizes."""
        options = Namespace(
            results_of=self.results, replies_of=self.replies, turns=self.n_turns, head=self.head
        )
        case = AgentCase(self.name, self.n_agents)
        return [Agent(case, number, options) for number in range(self.n_agents)]


BIG_RESULTS = (3000, 12_000)
CARD_CTX = 66_816
"""The context of the 27B with a head on a card of 24 GB (docs/24gb.md)."""

OVER_BUDGET = "4 at once, over budget"

CASES = {
    "4 agents, 2 turns, 0.6 of the context": Case(OVER_BUDGET, 4, 2),
    "4 agents, 4 turns, 0.6 of the context": Case(OVER_BUDGET, 4, 4),
    "4 agents, 5 turns, 0.6 of the context": Case(OVER_BUDGET, 4, 5),
    "4 agents, 5 turns, files, 24 GB": Case("4 at once", 4, 5, 0, CARD_CTX, BIG_RESULTS),
    "8 agents on 4 sequences": Case("8 at once", 8, 5, 4, 131_072),
    "8 agents on 4 sequences, 24 GB": Case("8 at once", 8, 4, 4, CARD_CTX, (500, 8000)),
    "4 agents with room": Case("4 at once", 4, 4, 0, CARD_CTX),
}

SMALL = {
    "3 agents, 2 turns, small": Case(OVER_BUDGET, 3, 2, replies=(64, 256), head=1000),
    "4 agents, 1 turn, small": Case(OVER_BUDGET, 4, 1, replies=(64, 400), head=1000),
    "3 agents on 2 sequences, small": Case(OVER_BUDGET, 3, 2, 2, 32_768, replies=(64, 256)),
}


class TimedBackend(SizedBackend):
    """Sequences without content, whose batches and copies take the time of ``device``.

    Attributes:
        n_copied: The rows copied between device and RAM.
        n_prompt: The tokens evaluated in prompts.
    """

    def __init__(self, clock: SimulatedClock, device: Device, n_cells: int, n_seqs: int) -> None:
        row_bytes = QWEN36_27B.row_bytes() // SCALE
        state_bytes = QWEN36_27B.state_bytes // SCALE
        sizes = n_cells, n_seqs, row_bytes, state_bytes
        super().__init__(*sizes, n_ubatch=GPU_UBATCH, batch_cost=GPU_UBATCH // 2, scale=SCALE)
        self.n_copied = 0
        self.n_prompt = 0
        self._clock = clock
        self._device = device

    def _spend(self, seconds: Callable[[Device], float]) -> None:
        self._clock.advance(seconds(self._device))

    def evaluate(self, *args: object, **options: object) -> None:
        before = self.n_evaluated
        super().evaluate(*args, **options)  # type: ignore[arg-type]
        self.n_prompt += self.n_evaluated - before

    def decode(self, items: Sequence[SequenceTokens]) -> None:
        super().decode(items)
        n_before = sum(item.position for item in items)
        self._clock.advance(self._device.batch(len(items), 0) + self._device.per_row * n_before)

    def save_rows(self, seq: int, first: int, last: int, *, hold: bool = False) -> Rows:
        if not hold:
            self._copy_rows(last - first)
        return super().save_rows(seq, first, last, hold=hold)

    def fetch(self, held: HeldRows, first: int, last: int) -> Block:
        self._copy_rows(last - first)
        return super().fetch(held, first, last)

    def _copy_rows(self, n: int) -> None:
        self._copy(n * self.row_bytes)

    def _copy(self, n_bytes: int) -> None:
        self.n_copied += n_bytes // self.row_bytes
        super()._copy(n_bytes)

    def sample(self, index: int) -> int:
        return LETTER


class FirstComeAdmission(Admission):
    """The schedule before replies gave way: in order of arrival, and a prompt waits for the end of
    a reply.
    """

    def expected_order(self) -> Iterator[ActiveRequest]:
        return iter(self)

    def replies_to_suspend(self, occupancy: Occupancy) -> list[ActiveRequest]:
        return []


class WaitsTooLongError(Exception):
    """The waits of a schedule reach the limit."""


class ChosenAdmission(Admission):
    """A schedule whose choices are given: at each prompt without room, which replies give way.

    Attributes:
        n_options: The number of options that each choice had.
    """

    def __init__(self, n_cells: int, n_ctx: int, choices: Sequence[int]) -> None:
        super().__init__(n_cells, n_ctx)
        self.n_options: list[int] = []
        self._choices = choices
        self._seen: set[tuple[int, ...]] = set()

    def replies_to_suspend(self, occupancy: Occupancy) -> list[ActiveRequest]:
        running = occupancy.running
        is_prefill = any(active.pending is None for active in running)
        if not self.queue or len(running) < 2 or is_prefill:
            return []
        point = (self.queue[0].arrived, *sorted(active.arrived for active in running))
        if point in self._seen:
            return []
        self._seen.add(point)
        options = list(self._options(occupancy, self.queue[0]))
        at = len(self.n_options)
        self.n_options.append(len(options))
        return options[self._choices[at] if at < len(self._choices) else 0]

    def _options(
        self, occupancy: Occupancy, prompt: ActiveRequest
    ) -> Iterator[list[ActiveRequest]]:
        """Yield the sets of replies that make room for ``prompt``, first the empty one."""
        yield []
        running = occupancy.running
        n_excess = sum(map(self._claim, running)) + self._claim(prompt) - self._n_cells
        for n in range(1, len(running)):
            for replies in combinations(running, n):
                if sum(map(self._claim, replies)) >= n_excess:
                    yield list(replies)


Install: TypeAlias = Callable[[Engine], None]
"""Gives an engine that has no requests yet its schedule."""


def _first_come(engine: Engine) -> None:
    facts = engine.backend.facts
    _set_admission(engine, FirstComeAdmission(facts.n_cells, facts.n_ctx))


def _set_admission(engine: Engine, admission: Admission) -> None:
    engine.scheduler.waiting = admission
    engine.waiting = admission


def _shortest_prompt(engine: Engine) -> None:
    """Evaluate the prompt with the fewest missing tokens first, on top of the engine's schedule."""
    scheduler = engine.scheduler

    def shortest(ready: Sequence[ActiveRequest]) -> ActiveRequest | None:
        return min(
            ready, key=lambda active: (scheduler.n_missing(active), active.arrived), default=None
        )

    scheduler.next_prefill = shortest  # type: ignore[method-assign]


def _engines_own(engine: Engine) -> None:
    """Leave the engine's schedule."""


SCHEDULES: dict[str, Install] = {
    "replies to their end": _first_come,
    "replies give way": _engines_own,
    "and the shortest prompt first": _shortest_prompt,
}


@dataclass
class Outcome:
    """A case under one schedule.

    Attributes:
        waits: Seconds from each request to its first token.
        ends: Seconds from each request to the end of its reply.
        wall: Seconds of the whole case.
        n_evaluated: Prompt tokens evaluated.
        n_copied: Rows copied between device and RAM.
        n_suspended: Replies suspended.
    """

    waits: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    wall: float = 0.0
    n_evaluated: int = 0
    n_copied: int = 0
    n_suspended: int = 0

    def cells(self) -> list[str]:
        """Return the cells of its row."""
        return [
            f"{sum(self.waits):.1f}",
            f"{max(self.waits):.1f}",
            f"{sum(self.ends):.1f}",
            f"{self.wall:.1f}",
            f"{self.n_evaluated:,}",
            f"{self.n_copied / 1e3:,.0f}",
            f"{self.n_suspended}",
        ]


class _Conversation:
    """An agent's text so far, and its request."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._text = f"<|im_start|>system\n{agent.head}<|im_end|>\n"
        self.n_asked = 0
        self.asked_at = 0.0
        self.handle: RequestHandle | None = None

    def ask(self, engine: Engine, clock: SimulatedClock) -> None:
        """Send the next turn."""
        agent = self._agent
        result = words(f"{agent.name} {self.n_asked}", agent.new[self.n_asked])
        self._text += f"<|im_start|>user\n{result}<|im_end|>\n<|im_start|>assistant\n"
        request = Request(prompt_of(self._text), max_tokens=agent.replies[self.n_asked])
        self.handle = RequestHandle(request, clock)
        self.n_asked += 1
        self.asked_at = clock.now
        engine.submit(self.handle)

    def finished(self) -> Done | None:
        """Return the end of the reply, once; None while it goes on."""
        if self.handle is None or not self.handle.is_over:
            return None
        done = self.handle.drain()[-1]
        assert isinstance(done, Done), done
        self.handle = None
        self._text += chr(LETTER) * done.timings.n_predicted + "<|im_end|>\n"
        return done


def simulate(
    case: Case, device: Device, install: Install = _engines_own, limit: float = float("inf")
) -> Outcome:
    """Run ``case`` on an engine with the schedule that ``install`` gives it. WaitsTooLongError if
    the waits reach ``limit`` seconds in sum.
    """
    agents = case.agents()
    n_ctx = case.n_ctx or int(OVER * sum(agent.size for agent in agents))
    clock = SimulatedClock()
    with clock.installed():
        cells = -(-n_ctx // 256) * 256
        backend = TimedBackend(clock, device, cells, case.n_seqs or case.n_agents)
        cache = RamCache(0, RAM_BYTES // SCALE)
        engine = Engine(cast(Backend, backend), cache, EngineSettings(), clock=clock)
        install(engine)
        outcome = Outcome()
        conversations = [_Conversation(agent) for agent in agents]
        for conversation in conversations:
            conversation.ask(engine, clock)
        while any(each.handle is not None for each in conversations):
            engine.step()
            for each in conversations:
                done = each.finished()
                if done is None:
                    continue
                outcome.ends.append(clock.now - each.asked_at)
                outcome.waits.append(outcome.ends[-1] - done.timings.predicted_ms / 1e3)
                if sum(outcome.waits) >= limit:
                    raise WaitsTooLongError
                if each.n_asked < case.n_turns:
                    each.ask(engine, clock)
        outcome.wall = clock.now
        outcome.n_evaluated = backend.n_prompt
        outcome.n_copied = backend.n_copied
        outcome.n_suspended = engine.counters.n_suspended
    return outcome


def best_of_all(case: Case, device: Device, max_runs: int = MAX_RUNS) -> tuple[Outcome, int, bool]:
    """Return the outcome with the least sum of waits over all choices of replies that give way, the
    number of runs, and whether these were all.

    Choices are tried depth first, and a run ends once it waits as long as the best one.
    """
    choices: list[int] = []
    best: Outcome | None = None
    n_runs = 0
    while n_runs < max_runs:
        n_runs += 1
        limit = sum(best.waits) if best is not None else float("inf")
        outcome, n_options = _run_choices(case, device, choices, limit)
        best = outcome or best
        following = _next_choices(choices, n_options)
        if following is None:
            assert best is not None
            return best, n_runs, True
        choices = following
    assert best is not None
    return best, n_runs, False


def _run_choices(
    case: Case, device: Device, choices: Sequence[int], limit: float
) -> tuple[Outcome | None, list[int]]:
    """Return the outcome of ``choices``, None if its waits reach ``limit``, and the number of
    options that each choice of the run had.
    """
    admissions: list[ChosenAdmission] = []

    def install(engine: Engine) -> None:
        facts = engine.backend.facts
        admissions.append(ChosenAdmission(facts.n_cells, facts.n_ctx, choices))
        _set_admission(engine, admissions[0])

    try:
        outcome = simulate(case, device, install, limit)
    except WaitsTooLongError:
        return None, admissions[0].n_options
    return outcome, admissions[0].n_options


def _next_choices(choices: Sequence[int], n_options: Sequence[int]) -> list[int] | None:
    """Return the choices of the next run, depth first; None after the last one."""
    made = [*choices, *[0] * len(n_options)][: len(n_options)]
    while made and made[-1] + 1 == n_options[len(made) - 1]:
        made.pop()
    if not made:
        return None
    return [*made[:-1], made[-1] + 1]


def rows_of(name: str, case: Case, device: Device) -> Iterator[list[str]]:
    """Yield the rows of a case on a device: one for each schedule, and the bounds."""
    for schedule, install in SCHEDULES.items():
        yield [name, schedule, *simulate(case, device, install).cells()]
    free_copies = replace(device, bandwidth=float("inf"))
    yield [name, "bound: copies at no cost", *simulate(case, free_copies).cells()]
    n_all = 2 * sum(agent.size for agent in case.agents())
    with_room = replace(case, n_seqs=case.n_agents, n_ctx=n_all)
    yield [name, "bound: room for all", *simulate(with_room, device).cells()]


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table for each device, and with --search one of small cases."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--search", action="store_true", help="search the best of small cases")
    options = parse(parser, argv, cases=[*CASES][:1])
    columns = ["case", "schedule", "first tokens, s", "at most", "ends, s", "wall, s"]
    columns += ["evaluated", "rows moved, thousands", "suspended"]
    keep = "schedule" if options.keep else ""
    devices = [device for device in DEVICES if device.name.startswith("27B")]
    for number, device in enumerate(devices):
        rows = [row for name in options.cases for row in rows_of(name, CASES[name], device)]
        title = f"Agents at once on one card, {device.name}"
        show(title, columns, rows, keep=keep, is_first=number == 0, weights=SIMULATED)
    if options.search:
        rows = list(searched_rows(devices[0]))
        title = f"The best of all choices, {devices[0].name}"
        show(title, columns, rows, keep=keep, is_first=False, weights=SIMULATED)


def searched_rows(device: Device) -> Iterator[list[str]]:
    """Yield the rows of the small cases: each schedule, and the best of all choices."""
    for name, case in SMALL.items():
        for schedule, install in SCHEDULES.items():
            yield [name, schedule, *simulate(case, device, install).cells()]
        best, n_runs, is_complete = best_of_all(case, device)
        found = "best" if is_complete else "best found"
        yield [name, f"{found} of {n_runs:,} runs", *best.cells()]


if __name__ == "__main__":
    main()

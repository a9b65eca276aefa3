"""Gains and losses of the choice of draft lengths: a simulation with measured costs of steps.

    python -m bench.draft_length [--keep]
    python -m bench.draft_length --against DIR    # and another checkout's controller

A server decodes replies one after the other, or some at a time until the first of them has ended.
The tokens that a source predicts are drawn once for each text, so that all ways of drafting get the
same ones. Speeds are tokens of all replies a second, as multiples of that without drafts. `fixed`
is the best single length for the text, chosen afterwards; `worst` is the slowest single run. With
two sources the controller chooses between them and composes their drafts: `fixed` is then the head
alone with a controller, and `worst` is the slowest run relative to that.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from bench.common import SIMULATED, parse, parser_of, show, tell
from bench.compare import add_comparison, compare
from pyctl.cache.sequence import LiveSequence
from pyctl.engine.draft.draft_length import LENGTHS, DraftLengthController
from pyctl.engine.draft.ngram_settings import LONGEST
from pyctl.engine.draft.source import DraftJob, Match
from pyctl.engine.draft.speculation import Draft, Speculation
from pyctl.engine.draft.step_costs import GRAPH_MS
from pyctl.prompt import Tokens, as_tokens

SEEDS = range(5)
HEAD = "head"
COPY = "copy"
BOTH = (HEAD, COPY)


@dataclass(frozen=True)
class Machine:
    """Milliseconds of steps by tokens, in line between them, of a draft of a head, and what the
    first two steps of another width take longer: on a GPU one runs without a CUDA graph, and one
    captures it. Where a draft of more than ``n_free`` tokens is not all right, the next step
    evaluates its right tokens again. Each step with a head takes ``head_ms`` longer than without
    one, also where it drafts nothing. A step of several evaluations runs without a CUDA graph:
    ``parts_ms`` are their milliseconds by tokens, those of ``step_ms`` if there are none.
    """

    name: str
    step_ms: Mapping[int, float]
    draft_ms: float
    graph_ms: tuple[float, float] = (0.0, 0.0)
    n_free: int = 1024
    head_ms: float = 0.0
    parts_ms: Mapping[int, float] = field(default_factory=dict)

    @property
    def has_state_history(self) -> bool:
        """True if free rollback needs equal numbers of tokens of all replies."""
        return self.n_free < 1024

    def ms(self, n_tokens: int) -> float:
        return _between(self.step_ms, n_tokens)

    def part_ms(self, n_tokens: int) -> float:
        """Return the milliseconds of one of several evaluations of a step."""
        return _between(self.parts_ms or self.step_ms, n_tokens)

    def controller(self) -> DraftLengthController:
        """Return a controller in the state that it has when a server starts."""
        graph_ms = GRAPH_MS if any(self.graph_ms) else 0.0
        return DraftLengthController(
            n_free=self.n_free, graph_ms=graph_ms, has_state_history=self.has_state_history
        )


def _between(points: Mapping[int, float], n: int) -> float:
    """Return the value at ``n`` of the line through ``points``."""
    return float(np.interp(n, list(points), list(points.values())))


MACHINES = (
    # Widths to 7 by bench.gpu.speculative and the profile of single steps, wider ones as in
    # bench.gpu_seconds.
    Machine(
        "27B, H200",
        {
            1: 12.8,
            2: 13.7,
            3: 15.8,
            4: 19.3,
            5: 20.5,
            6: 22.8,
            7: 25.2,
            32: 30.0,
            64: 41.0,
            128: 67.0,
            512: 205.0,
        },
        1.15,
        (4.5, 12.0),
        n_free=3,
    ),
    Machine(
        "35B-A3B, H200",
        {
            1: 4.75,
            2: 5.45,
            3: 6.15,
            4: 7.4,
            5: 8.0,
            32: 25.0,
            64: 41.0,
            128: 69.0,
            256: 77.0,
            512: 100.0,
        },
        0.7,
        (4.5, 12.0),
        n_free=3,
    ),
    Machine("line of 0.1", {1: 10.0, 513: 522.0}, 0.3),
    Machine("line of 0.5", {1: 10.0, 513: 2570.0}, 0.3),
    # Of bench.gpu.step_costs on a machine with 2 cores, where new graphs take longer; widths from
    # 32 on as above.
    Machine(
        "35B-A3B, H200, 2 cores",
        {1: 4.17, 2: 4.86, 3: 5.74, 4: 6.48, 32: 25.0, 64: 41.0, 128: 69.0, 512: 100.0},
        0.86,
        (10.0, 17.0),
        n_free=3,
        head_ms=0.16,
    ),
    # Steps of one to four replies of 35B-A3B on a machine with 16 cores, traced on 2026-11-29:
    # above 8 tokens llama.cpp multiplies with other kernels.
    Machine(
        "35B-A3B, H200, 16 cores",
        {1: 4.2, 2: 5.2, 3: 6.2, 4: 7.0, 6: 9.0, 8: 11.5, 9: 18.0, 12: 19.5, 16: 21.5, 31: 36.0}
        | {64: 60.0, 128: 78.0, 256: 115.0},
        1.9,
        (4.2, 8.0),
        n_free=3,
        parts_ms={1: 9.5, 4: 10.3, 8: 15.0, 9: 21.0, 17: 27.0, 31: 42.0, 64: 66.0, 128: 84.0},
    ),
)
REWRITING = (
    # Settled steps after 12,000 tokens, with sampling; from 129 tokens on, batches of prompts and
    # outputs apart.
    Machine(
        "27B, H100",
        {
            1: 13.4,
            2: 14.6,
            3: 16.8,
            4: 19.2,
            5: 22.0,
            7: 25.8,
            9: 26.5,
            13: 28.5,
            17: 30.5,
            25: 34.5,
            33: 38.0,
            49: 53.0,
            65: 61.5,
            129: 100.0,
            257: 176.0,
        },
        1.4,
        (5.0, 18.0),
        n_free=3,
    ),
    # A plain step and prompts as its owners published (bench/gpu_seconds.py), between them as on an
    # H100.
    Machine(
        "27B, RTX 3090",
        {
            1: 23.3,
            2: 24.5,
            3: 27.0,
            4: 30.5,
            5: 33.0,
            7: 40.0,
            9: 46.0,
            17: 60.0,
            33: 84.0,
            65: 120.0,
            129: 195.0,
            257: 330.0,
        },
        2.2,
        (5.0, 14.0),
        n_free=3,
    ),
    MACHINES[1],
)


Known = tuple[tuple[bool, bool], ...]
"""Flags of one token, for each source: whether it is predicted, and whether anything is proposed
there.
"""


@dataclass(frozen=True)
class Text:
    """Replies of ``n_tokens``, ``n_seqs`` at a time; ``predicted`` has the guesses of ``sources``
    for each token.
    """

    name: str
    predicted: Callable[[random.Random, int], Iterator[Known]]
    sources: tuple[str, ...] = (HEAD,)
    n_replies: int = 3
    n_tokens: int = 600
    n_seqs: int = 1
    noise: float = 0.05


def steady(*shares: float, stretch: int = 200) -> Callable[[random.Random, int], Iterator[Known]]:
    """Return a function that draws the predictions of a head that is right with these chances, one
    after the other.
    """
    return lambda rng, n: (
        ((rng.random() < shares[i // stretch % len(shares)], True),) for i in range(n)
    )


def copies(n_own: float, n_copied: float) -> Callable[[random.Random, int], Iterator[Known]]:
    """Return a function that draws stretches of so many tokens on average: own ones, where a source
    proposes some wrong tokens, and copied ones.
    """

    def drawn(rng: random.Random, n: int) -> Iterator[Known]:
        copied = False
        for _ in range(n):
            yield ((copied, copied or rng.random() < 0.1),)
            if rng.random() < 1 / (n_copied if copied else n_own):
                copied = not copied

    return drawn


def beside(
    share: float, of_cache: Callable[[random.Random, int], Iterator[Known]], late: int = 0
) -> Callable[[random.Random, int], Iterator[Known]]:
    """Return a function that draws the predictions of a head that is right with this chance, and
    the cache's guesses, of which it proposes the first ``late`` tokens of a stretch only after the
    head's.
    """

    def drawn(rng: random.Random, n: int) -> Iterator[Known]:
        since = 0
        for ((right, proposes),) in of_cache(rng, n):
            since = since + 1 if right else 0
            yield (rng.random() < share, True), (right, proposes and (not right or since > late))

    return drawn


TEXTS = (
    Text("nothing right", steady(0.0), n_tokens=2000),
    Text("nothing right, replies of 64", steady(0.0), n_replies=30, n_tokens=64),
    Text("30 % right", steady(0.3)),
    Text("54 % right", steady(0.54)),
    Text("54 % right, replies of 100", steady(0.54), n_replies=18, n_tokens=100),
    Text("70 % right", steady(0.7)),
    Text("85 % right", steady(0.85)),
    Text("85 % right, steps disturbed", steady(0.85), noise=0.6),
    Text("95 % right", steady(0.95)),
    Text("95 % and 5 %, 200 tokens each", steady(0.95, 0.05), n_tokens=2000),
    Text("95 % and 5 %, 500 tokens each", steady(0.95, 0.05, stretch=500), n_tokens=3000),
    Text("85 % and 15 %, 50 tokens each", steady(0.85, 0.15, stretch=50), n_tokens=1000),
    Text("70 % right, 4 replies", steady(0.7), n_seqs=4),
    Text("nothing right, 4 replies", steady(0.0), n_seqs=4, n_tokens=1000),
    Text("copies of 40, own text of 40", copies(40, 40), (COPY,)),
    Text("copies of 200, own text of 100", copies(100, 200), (COPY,)),
    Text("copies of 10, own text of 30", copies(30, 10), (COPY,)),
    Text("copies of 3, own text of 30", copies(30, 3), (COPY,), n_tokens=1500),
    Text("copies of 40, own text of 40, 4 replies", copies(40, 40), (COPY,), n_seqs=4),
    *(
        Text(f"head {share:.0%}, {name}", beside(share, of_cache, 4), BOTH, **sizes)
        for share in (0.54, 0.7, 0.85, 0.95)
        for name, of_cache, sizes in (
            ("the cache always wrong", copies(1e9, 1), {"n_tokens": 1500}),
            ("copies of 3, own text of 30", copies(30, 3), {"n_tokens": 1500}),
            ("copies of 12, own text of 30", copies(30, 12), {"n_tokens": 1500}),
            ("copies of 40, own text of 40", copies(40, 40), {"n_tokens": 1500}),
            ("copies of 300, own text of 10", copies(10, 300), {"n_tokens": 1500}),
        )
    ),
    Text(
        "head 70%, the cache always wrong, 4 replies", beside(0.7, copies(1e9, 1)), BOTH, n_seqs=4
    ),
    *(
        Text(
            f"head 70%, copies of {n}, own text of {m}, 4 replies",
            beside(0.7, copies(m, n), 4),
            BOTH,
            n_seqs=4,
        )
        for n, m in ((12, 30), (40, 40), (300, 10))
    ),
)
LIMITS = {HEAD: 3, COPY: LONGEST}
MIN_MATCH = 4
"""Tokens that match where a source starts to propose."""
NONE = as_tokens([])


class Source:
    """A source whose drafts are 1 for each right token and 0 for others; the head takes
    ``simulation``'s time.
    """

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.name = name
        self.n_max = LIMITS[name]
        self._simulation, self._place = simulation, simulation.text.sources.index(name)

    def begin(self, key: int, prompt: Tokens) -> None:
        pass

    def propose(self, jobs: Sequence[DraftJob], n: int = 0) -> list[tuple[int, ...]]:
        self._simulation.head_ms += self._simulation.machine.draft_ms * (n or self.n_max)
        return [self._known(job, 0, n or self.n_max) for job in jobs]

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        """Return a match as long as the text that was copied, and `MIN_MATCH` tokens before it."""
        known = self._simulation.known[job.key]
        end = self._simulation.at[job.key] + len(draft)
        first = end
        while first and known[first - 1][self._place][0]:
            first -= 1
        return Match(
            MIN_MATCH + end - first, lambda n: self._known(job, len(draft), min(n, self.n_max))
        )

    def end(self, key: int) -> None:
        pass

    def _known(self, job: DraftJob, n_before: int, n: int) -> tuple[int, ...]:
        known = self._simulation.known[job.key]
        first = self._simulation.at[job.key] + n_before
        proposes = first < len(known) and known[first][self._place][1]
        return (
            tuple(int(each[self._place][0]) for each in known[first : first + n])
            if proposes
            else ()
        )


class Simulation:
    """The replies of one text on one machine; ``fixed`` drafts that many tokens always, None as a
    controller chooses.

    Drafts come from the first ``n_sources`` of the text.
    """

    def __init__(
        self, machine: Machine, text: Text, seed: int, fixed: int | None, n_sources: int = 2
    ) -> None:
        """Prepare ``text`` for ``machine``: with drafts of ``fixed`` tokens, or as the controller
        decides if None; from the first ``n_sources`` of the text's sources. All randomness follows
        from ``seed``.
        """
        self.machine = machine
        self.text = text
        self.fixed = fixed
        self.known: dict[int, list[Known]] = {}
        self.at: dict[int, int] = {}
        self.head_ms = 0.0
        self._n_said = 0
        self._written = random.Random(f"{text.name} {seed}")
        self._noise = random.Random(seed)
        named = text.sources[:n_sources]
        copying: list[Any] = [Source(self, COPY)] if COPY in named else []
        head: Any = Source(self, HEAD) if HEAD in named else None
        lengths = machine.controller() if fixed is None else None
        self._has_head = head is not None and fixed != 0
        self._speculation = Speculation(copying, head, lengths=lengths)
        self._speculation.seconds = lambda: self.head_ms / 1e3

    def ms(self) -> float:
        """Return milliseconds for each token, over all replies."""
        ms = sum(map(self._reply, range(self.text.n_replies)))
        return ms / self._n_said

    def _reply(self, reply: int) -> float:
        """Return milliseconds of reply number ``reply`` of all sequences together. Its tokens are
        only flags of `Known`: the controller's decisions depend on nothing else.
        """
        text = self.text
        machine = self.machine
        all_ms = 0.0
        keys = range(reply * text.n_seqs, (reply + 1) * text.n_seqs)
        self.known = {key: list(text.predicted(self._written, text.n_tokens + 1)) for key in keys}
        self.at = dict.fromkeys(keys, 0)
        seqs = {key: LiveSequence(key, text.n_tokens + 1) for key in keys}
        widths: tuple[int, ...] = ()  # the prompt was of another
        place = 0
        with ExitStack() as opened:
            for key in keys:
                opened.enter_context(self._speculation.following(key, NONE))
            while (n_left := text.n_tokens - max(self.at.values())) > 0:
                self.head_ms = 0.0
                jobs = [self._job(seqs[key], n_left - 1) for key in keys]
                drafts = self._speculation.propose(jobs)
                before = widths
                widths = self._evaluations(jobs, drafts)
                place = place + 1 if widths == before else 0
                ms = self._step_ms(widths, place)
                accepted = {}
                for job, draft in zip(jobs, drafts, strict=True):
                    n = accepted[job.key] = _n_right(draft.tokens)
                    self.at[job.key] += 1 + n
                    if not machine.n_free < len(draft.tokens) > n:  # else all is evaluated again
                        for _ in range(len(job.sure) + n):
                            seqs[job.key].append_one(1)
                self._speculation.record(accepted, sum(widths), ms)
                all_ms += ms + self.head_ms
        self._n_said += sum(self.at.values())
        return all_ms

    def _job(self, seq: LiveSequence, maximum: int) -> DraftJob:
        n_sure = 1 + self.at[seq.id] - seq.n
        maximum = maximum if self.fixed is None else min(maximum, self.fixed)
        return DraftJob(
            seq.id, seq, (1,) * n_sure, min(maximum, self.machine.n_free) if n_sure > 1 else maximum
        )

    def _evaluations(self, jobs: Sequence[DraftJob], drafts: Sequence[Draft]) -> tuple[int, ...]:
        """Return tokens of each evaluation: free rollback needs equal numbers of all replies in it,
        as in `verify_batches`, and llama.cpp splits the others into parts with equal numbers.
        """
        n_each = [len(draft.tokens) for draft in drafts]
        if not self.machine.has_state_history:
            return (sum(len(job.sure) for job in jobs) + sum(n_each),)
        shorts = [
            len(job.sure) == 1 and n <= self.machine.n_free
            for job, n in zip(jobs, n_each, strict=True)
        ]
        shared = max((n for n, short in zip(n_each, shorts, strict=True) if short), default=0)
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for job, n, short in zip(jobs, n_each, shorts, strict=True):
            n_tokens = len(job.sure) + (shared if short else n)
            is_free = 0 < n_tokens - len(job.sure) <= self.machine.n_free
            groups[n_tokens if is_free else 0].append(n_tokens)
        return tuple(chain.from_iterable(_equal_parts(group) for group in groups.values()))

    def _step_ms(self, widths: Sequence[int], place: int) -> float:
        """Return milliseconds of a step that evaluates so many tokens, one evaluation after the
        other.
        """
        machine = self.machine
        text = self.text
        rng = self._noise
        depth = (
            1 + sum(self.at.values()) / text.n_seqs / 5000
        )  # steps take longer with more context
        if len(widths) > 1:
            ms = sum(map(machine.part_ms, widths)) * depth
        else:
            ms = machine.ms(widths[0]) * depth + (machine.graph_ms[place] if place < 2 else 0.0)
        if self._has_head:
            ms += machine.head_ms
        return ms * (3 if rng.random() < text.noise / 5 else 1 + text.noise * rng.random())


def _equal_parts(counts: Sequence[int]) -> Iterator[int]:
    """Yield the tokens of each evaluation of replies with so many tokens: as many of each reply
    that has any left.
    """
    left = list(counts)
    while left:
        least = min(left)
        yield least * len(left)
        left = [n - least for n in left if n > least]


def _n_right(draft: Sequence[int]) -> int:
    return (*draft, 0).index(0)


def record(machine: Machine, text: Text, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the speeds of one text on one machine, from the start of a server on."""
    longest = max(LIMITS[source] for source in text.sources)
    lengths: list[int | None] = (
        [n for n in LENGTHS if n <= longest] if len(text.sources) == 1 else []
    )
    took = {
        n: [Simulation(machine, text, seed, n).ms() for seed in seeds] for n in (0, None, *lengths)
    }
    speeds = {n: [plain / ms for plain, ms in zip(took[0], took[n], strict=True)] for n in took}
    found = speeds[None]
    worst = min(speeds[None])
    fixed = max(statistics.mean(speeds[n]) for n in (0, *lengths))
    if len(text.sources) > 1:
        head = [Simulation(machine, text, seed, None, 1).ms() for seed in seeds]
        fixed = statistics.mean(plain / ms for plain, ms in zip(took[0], head, strict=True))
        worst = min(ms / both for ms, both in zip(head, took[None], strict=True))
    return {
        "machine": machine.name,
        "text": text.name,
        "fixed": fixed,
        "controller": statistics.mean(found),
        "worst": worst,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row per machine and text: the speed with the best fixed length, with the controller,
    and in its worst run, as ratios to the speed without drafts.
    """
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="texts of each kind")
    add_comparison(parser)
    options = parse(parser, argv, seeds=1)
    if options.against is not None:
        compare("bench.draft_length", ["--seeds", str(options.seeds)], options.against, 1)
        return
    machines = MACHINES[:1] if options.quick else MACHINES
    records = [
        record(machine, text, range(options.seeds)) for machine in machines for text in TEXTS
    ]
    if options.json:
        tell(records)
        return
    rows = [
        [f"{value:.3f}" if isinstance(value, float) else value for value in each.values()]
        for each in records
    ]
    columns = ["machine", "text", "best fixed length", "controller", "worst run"]
    keep = "draft-length" if options.keep else ""
    show("Speed with drafts, of that without", columns, rows, keep=keep, weights=SIMULATED)
    least = min(records, key=lambda each: float(each["worst"]))
    print(f"worst of all: {least['worst']:.3f}, {least['text']}, {least['machine']}")


if __name__ == "__main__":
    main()

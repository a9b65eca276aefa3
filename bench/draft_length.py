"""Gains and losses of the choice of draft lengths: a simulation with measured costs of steps.

    python -m bench.draft_length [--keep]
    python -m bench.draft_length --against DIR    # and another checkout's controller

A server decodes replies one after the other. The tokens that a source predicts are drawn once for each text, so that
all ways of drafting get the same ones. Speeds are multiples of the speed without drafts. `fixed` is the best single
length for the text, chosen afterwards; `worst` is the slowest single run.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from bench.common import parse, parser_of, show, tell
from bench.compare import add_comparison, compare
from pyctl.engine.draft.draft_length import LENGTHS, DraftLengthController, DraftResult

SEEDS = range(5)
HEAD, COPY = "head", "copy"


@dataclass(frozen=True)
class Machine:
    """Milliseconds of steps by tokens, in line between them, of a draft of a head, and what the first two steps of
    another width take longer: on a GPU one runs without a CUDA graph, and one captures it."""

    name: str
    step_ms: Mapping[int, float]
    draft_ms: float
    graph_ms: tuple[float, float] = (0.0, 0.0)

    def ms(self, n_tokens: int) -> float:
        return float(np.interp(n_tokens, list(self.step_ms), list(self.step_ms.values())))


MACHINES = (
    # Widths to 7 by bench.gpu.speculative and the profile of single steps, wider ones as in bench.gpu_seconds.
    Machine(
        "27B, H200",
        {1: 12.8, 2: 13.7, 3: 15.8, 4: 19.3, 5: 20.5, 6: 22.8, 7: 25.2, 32: 30.0, 64: 41.0, 128: 67.0, 256: 113.0},
        1.15,
        (4.5, 12.0),
    ),
    Machine(
        "35B-A3B, H200",
        {1: 4.75, 2: 5.45, 3: 6.15, 4: 7.4, 5: 8.0, 32: 25.0, 64: 41.0, 128: 69.0, 256: 77.0},
        0.7,
        (4.5, 12.0),
    ),
    Machine("line of 0.1", {1: 10.0, 513: 522.0}, 0.3),
    Machine("line of 0.5", {1: 10.0, 513: 2570.0}, 0.3),
)


@dataclass(frozen=True)
class Text:
    """Replies of ``n_tokens``, ``n_seqs`` at a time; ``predicted`` says of each token whether the source knows it, and
    whether it proposes anything there."""

    name: str
    predicted: Callable[[random.Random, int], Iterator[tuple[bool, bool]]]
    source: str = HEAD
    n_replies: int = 3
    n_tokens: int = 600
    n_seqs: int = 1
    noise: float = 0.05


def steady(*shares: float, stretch: int = 200) -> Callable[[random.Random, int], Iterator[tuple[bool, bool]]]:
    """A head that is right with these chances, one after the other."""
    return lambda rng, n: ((rng.random() < shares[i // stretch % len(shares)], True) for i in range(n))


def copies(n_own: float, n_copied: float) -> Callable[[random.Random, int], Iterator[tuple[bool, bool]]]:
    """Stretches of so many tokens on average: of its own, where a source proposes wrong tokens now and then, and
    copied."""

    def drawn(rng: random.Random, n: int) -> Iterator[tuple[bool, bool]]:
        copied = False
        for _ in range(n):
            yield copied, copied or rng.random() < 0.1
            if rng.random() < 1 / (n_copied if copied else n_own):
                copied = not copied

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
    Text("copies of 40, own text of 40", copies(40, 40), COPY),
    Text("copies of 200, own text of 100", copies(100, 200), COPY),
    Text("copies of 10, own text of 30", copies(30, 10), COPY),
    Text("copies of 3, own text of 30", copies(30, 3), COPY, n_tokens=1500),
    Text("copies of 40, own text of 40, 4 replies", copies(40, 40), COPY, n_seqs=4),
)
LIMITS = {HEAD: 3, COPY: 64}


def runs_of(known: Sequence[tuple[bool, bool]]) -> list[int]:
    """How many tokens from each place on are predicted."""
    return list(accumulate(reversed([right for right, _ in known]), lambda run, right: run + 1 if right else 0))[::-1]


def calibrated(machine: Machine, text: Text) -> DraftLengthController:
    """A controller with the costs that a server measures at its start."""
    controller = DraftLengthController()
    lengths = [n for n in LENGTHS if n <= LIMITS[text.source]]
    for n_seqs in sorted({1, text.n_seqs}):
        for n in (0, *sorted({*lengths, *range(1, min(LIMITS[text.source], 3) + 1)})):
            for _ in range(2):
                controller.costs(n_seqs).add(n_seqs * (1 + n), machine.ms(n_seqs * (1 + n)))
                if n and text.source == HEAD:
                    controller.proposing[HEAD, n_seqs].add(n, n * machine.draft_ms)
        controller.costs(n_seqs).graph = machine.graph_ms[1] / machine.ms(n_seqs)
        controller.costs(n_seqs).plain.clear()
    return controller


class Simulation:
    """The replies of one text on one machine; ``fixed`` drafts that many tokens always, None as a controller says."""

    def __init__(self, machine: Machine, text: Text, seed: int, fixed: int | None) -> None:
        self.machine, self.text, self.fixed = machine, text, fixed
        self._written, self._noise = random.Random(f"{text.name} {seed}"), random.Random(seed)
        self.controller = calibrated(machine, text)

    def ms(self) -> float:
        """What all replies take."""
        return sum(map(self._reply, range(self.text.n_replies)))

    def _reply(self, reply: int) -> float:
        text, rng, all_ms = self.text, self._noise, 0.0
        keys = range(reply * text.n_seqs, (reply + 1) * text.n_seqs)
        known = [list(text.predicted(self._written, text.n_tokens + 1)) for _ in keys]
        runs, at = [runs_of(each) for each in known], [0] * text.n_seqs
        width, place = 0, 0  # the prompt was of another
        while (least := text.n_tokens - max(at)) > 0:
            depth = 1 + sum(at) / text.n_seqs / 5000  # steps take longer with more context
            drafted = self._drafted(keys, [each[i][1] for each, i in zip(known, at, strict=True)], least - 1)
            accepted = [min(n, run[i]) for n, run, i in zip(drafted, runs, at, strict=True)]
            n_tokens = text.n_seqs + sum(drafted)
            place = place + 1 if n_tokens == width else 0
            width = n_tokens
            graph = self.machine.graph_ms[place] if place < 2 else 0.0
            ms = self.machine.ms(n_tokens) * depth + graph
            ms *= 3 if rng.random() < text.noise / 5 else 1 + text.noise * rng.random()
            head_ms = max(drafted) * self.machine.draft_ms if text.source == HEAD else 0.0
            all_ms += ms + head_ms
            results = [
                DraftResult(key, text.source if n else "", n, right)
                for key, n, right in zip(keys, drafted, accepted, strict=True)
            ]
            if self.fixed is None:
                self.controller.record(results, n_tokens, ms, {text.source: head_ms} if any(drafted) else {})
            at = [i + 1 + n for i, n in zip(at, accepted, strict=True)]
        for key in keys:
            self.controller.end(key)
        return all_ms

    def _drafted(self, keys: Sequence[int], proposes: Sequence[bool], most: int) -> list[int]:
        """How many tokens each request drafts."""
        limit, n_seqs, together = min(LIMITS[self.text.source], most), len(keys), self.text.source == HEAD
        if self.fixed is not None:
            return [min(self.fixed, limit) * does for does in proposes]
        wanted = []
        for key, does in zip(keys, proposes, strict=True):
            n = self.controller.length(key, self.text.source, limit, n_seqs, together=together)
            wanted.append(n * does)
        return [max(wanted)] * n_seqs if together else wanted


def record(machine: Machine, text: Text, seeds: Sequence[int]) -> dict[str, Any]:
    """Speeds of one text on one machine."""
    lengths: list[int | None] = [n for n in LENGTHS if n <= LIMITS[text.source]]
    took = {n: [Simulation(machine, text, seed, n).ms() for seed in seeds] for n in (0, None, *lengths)}
    speeds = {n: [plain / ms for plain, ms in zip(took[0], took[n], strict=True)] for n in took}
    found, fixed = speeds[None], max(statistics.mean(speeds[n]) for n in (0, *lengths))
    return {
        "machine": machine.name, "text": text.name, "fixed": fixed, "controller": statistics.mean(found),
        "worst": min(found),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="texts of each kind")
    add_comparison(parser)
    options = parse(parser, argv, seeds=1)
    if options.against is not None:
        compare("bench.draft_length", ["--seeds", str(options.seeds)], options.against, 1)
        return
    records = [record(machine, text, range(options.seeds)) for machine in MACHINES for text in TEXTS]
    if options.json:
        tell(records)
        return
    rows = [[f"{value:.3f}" if isinstance(value, float) else value for value in each.values()] for each in records]
    columns = ["machine", "text", "best fixed length", "controller", "worst run"]
    show("Speed with drafts, of that without", columns, rows, keep="draft-length" if options.keep else "")
    least = min(records, key=lambda each: float(each["worst"]))
    print(f"worst of all: {least['worst']:.3f}, {least['text']}, {least['machine']}")


if __name__ == "__main__":
    main()

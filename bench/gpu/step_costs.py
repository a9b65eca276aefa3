"""Milliseconds of single steps by their tokens: with a draft head, without one, and of its drafts.

    DIR/python -m bench.gpu.step_costs DIR --models 35b-a3b-nextn 27b-nextn
    python -m bench.gpu.step_costs --models tiny-hybrid-nextn=FILE.gguf --steps 20 --prompt 200

Ways to load and to evaluate a model:

    no head          --spec-type none
    idle head        a head that does not draft
    idle head, all states
                     the same, and plain steps keep earlier states as steps with drafts do

A step evaluates tokens of one sequence behind --prompt tokens, and samples one. All are measured in
turns, --rounds times; the tables have medians. The last column of the first table is the speed of
plain steps, as a multiple of that without a head. `bench.draft_length` simulates such machines.
Findings go to gpu-step-costs.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from bench.gpu.machine import describe
from bench.gpu.report import table_lines
from bench.gpu.servers import models_of, options_of, weights_of
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.sampling import Sampling
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import load
from pyctl.llama.memory import rollbacks
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import as_tokens

N_MAX = 3
"""Tokens that a head drafts at most."""

WIDTHS = (1, 2, 3, 4)
"""Tokens of a step whose milliseconds are measured."""

SETTLED = 24
"""Steps of one width that pass before it is measured: a GPU captures a graph in these."""

N_IDS = 200
"""Ids of tokens that each model has; which they are has no effect on times."""

PLACES = 4
"""Steps after a change of the width that are measured apart."""

NO_HEAD = "no head"
IDLE = "idle head"
ALL_STATES = "idle head, all states"

Samples = defaultdict[tuple[str, int], list[float]]
"""Milliseconds by way and number of tokens."""


class Decoder:
    """A reply on sequence 0 of ``backend``, behind a prompt of ``n_prompt`` tokens."""

    def __init__(self, backend: LlamaBackend, n_prompt: int) -> None:
        """Evaluate the prompt."""
        self.backend = backend
        self._prompt = as_tokens([7 + i % N_IDS for i in range(n_prompt)])
        self._sampler = backend.sampler(Sampling(temperature=0.0), self._prompt)
        self.position = 0
        self.restart()

    def restart(self) -> None:
        """Return to the end of the prompt."""
        self.backend.memory.clear(0)
        size = self.backend.facts.n_ubatch
        for first in range(0, len(self._prompt), size):
            self.backend.evaluate(0, self._prompt[first : first + size], first)
        self.position = len(self._prompt)

    def step(self, n_tokens: int) -> float:
        """Return the milliseconds of a step of ``n_tokens``, all but the first of them drafts that
        are accepted.
        """
        began = time.perf_counter()
        tokens = tuple(11 + (self.position + i) % N_IDS for i in range(n_tokens))
        self.backend.decode([SequenceTokens(0, tokens, self.position)])
        self._sampler.sample(0)
        self.position += n_tokens
        return (time.perf_counter() - began) * 1e3

    def draft(self, n: int) -> float:
        """Return the milliseconds in which the head drafts ``n`` tokens."""
        began = time.perf_counter()
        self.backend.draft([SequenceTokens(0, (11,), self.position)], n)
        return (time.perf_counter() - began) * 1e3

    def reject(self, n: int) -> None:
        """Take the last ``n`` tokens back."""
        self.position = self.backend.memory.rollback(0, self.position - n)

    def digests(self, n_steps: int) -> list[int]:
        """Return the digests of the logits of a fixed reply: plain steps, and drafts of which some
        are rejected.
        """
        self.restart()
        found = []
        for i in range(n_steps):
            is_drafted = i % 24 > 19
            self.step(N_MAX + 1 if is_drafted else 1)
            found.append(self.backend.logits_digest(0))
            if is_drafted:
                self.reject(i % N_MAX)
        return found


@contextmanager
def all_states() -> Iterator[None]:
    """Have plain steps keep earlier states, as steps with drafts do."""
    with patch.object(rollbacks, "PLAIN_STEPS", 1 << 30):
        yield


def open_backend(model: Path, n_ctx: int, *, has_head: bool) -> LlamaBackend:
    """Return a backend of ``model``, on all devices, with or without its head."""
    settings = ModelSettings(path=str(model), n_ctx=n_ctx, n_seqs=1, n_ubatch=512)
    drafts = DraftSettings(
        draft_types=("draft-mtp",) if has_head else ("none",), n_draft=N_MAX if has_head else 0
    )
    return load(settings, drafts=drafts).backend


def measure_widths(decoder: Decoder, way: str, samples: Samples, n_steps: int) -> None:
    """Add the milliseconds of steps of each of WIDTHS."""
    for width in WIDTHS:
        for i in range(SETTLED + n_steps):
            ms = decoder.step(width)
            if i >= SETTLED:
                samples[way, width].append(ms)


def measure_drafts(decoder: Decoder, drafting: Samples, verifying: Samples, n_steps: int) -> None:
    """Add the milliseconds in which the head drafts, and in which these drafts are verified."""
    for n in range(1, N_MAX + 1):
        for i in range(SETTLED + n_steps):
            draft_ms = decoder.draft(n)
            step_ms = decoder.step(1 + n)
            if i >= SETTLED:
                drafting["", n].append(draft_ms)
                verifying["", n].append(step_ms)


def measure_changes(decoder: Decoder, samples: Samples, n_changes: int) -> None:
    """Add the milliseconds of the first steps after a change of the width, by their place."""
    for _ in range(n_changes):
        for width in (1, 3):
            for place in range(SETTLED):
                ms = decoder.step(width)
                samples["plain" if width == 1 else "drafts", min(place, PLACES)].append(ms)


def medians(samples: Samples, way: str, numbers: Sequence[int]) -> list[str]:
    """Return the medians of ``way`` as text, one for each of ``numbers``."""
    return [f"{statistics.median(samples[way, number]):.2f}" for number in numbers]


def measure(model: Path, options: argparse.Namespace) -> list[str]:
    """Return the lines of a report on ``model``."""
    n_ctx = options.prompt + 16384
    without = Decoder(open_backend(model, n_ctx, has_head=False), options.prompt)
    head = Decoder(open_backend(model, n_ctx, has_head=True), options.prompt)
    steps = Samples(list)
    drafting = Samples(list)
    verifying = Samples(list)
    changes = Samples(list)
    for _ in range(options.rounds):
        for decoder in (without, head):
            decoder.restart()
        measure_widths(without, NO_HEAD, steps, options.steps)
        measure_widths(head, IDLE, steps, options.steps)
        with all_states():
            measure_widths(head, ALL_STATES, steps, options.steps)
        measure_drafts(head, drafting, verifying, options.steps)
        head.restart()
        measure_changes(head, changes, options.changes)
    bits = head.digests(options.steps)
    with all_states():
        is_equal = head.digests(options.steps) == bits
    lines = []
    plain = statistics.median(steps[NO_HEAD, 1])
    rows = []
    for way in (NO_HEAD, IDLE, ALL_STATES):
        speed = plain / statistics.median(steps[way, 1])
        rows.append([way, *medians(steps, way, WIDTHS), f"{speed:.3f}"])
    named = [f"{width} tokens" for width in WIDTHS]
    lines += table_lines(["ms of a step", *named, "speed of plain steps"], rows)
    numbers = range(1, N_MAX + 1)
    rows = [
        ["the head drafts", *medians(drafting, "", numbers)],
        ["a step verifies them", *medians(verifying, "", numbers)],
    ]
    lines += table_lines(["ms", *(f"{n} drafts" for n in numbers)], rows)
    places = range(PLACES + 1)
    rows = [
        ["after 3 tokens a step, 1", *medians(changes, "plain", places)],
        ["after 1 token a step, 3", *medians(changes, "drafts", places)],
    ]
    named = ["first step", "second", *(f"step {place + 1}" for place in range(2, PLACES)), "later"]
    lines += table_lines(["ms after a change", *named], rows)
    verdict = "equal" if is_equal else "NOT equal"
    lines += [f"Logits with and without earlier states: {verdict} in {len(bits)} steps.", ""]
    return lines


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> None:
    """Measure each of --models, print the tables, and write them to gpu-step-costs.md."""
    parser = options_of(__doc__, 600)
    parser.add_argument("directory", type=Path, nargs="?", help="what prepare.py was given")
    parser.add_argument(
        "--models", nargs="+", metavar="SHAPE[=FILE]", default=["35b-a3b-nextn", "27b-nextn"]
    )
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--steps", type=int, default=100, help="steps of each width in a round")
    parser.add_argument("--changes", type=int, default=8, help="changes of the width in a round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    options.llama_server = ""
    models, _ = models_of(options)
    shapes = list(models)
    lines = ["# Milliseconds of single steps", ""]
    lines += [f"- {name}: {value}" for name, value in describe(weights_of(shapes[0])).items()]
    for shape, model in models.items():
        lines += ["", f"## {shape}", "", *measure(model, options)]
    text = "\n".join(lines).rstrip() + "\n"
    say(text)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "gpu-step-costs.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

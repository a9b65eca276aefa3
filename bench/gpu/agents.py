"""Agents at once, in turn, and beyond the context, on pyctl and llama-server: one client, one run.

    DIR/python -m bench.gpu.agents DIR --models 27b-nextn       # prepared with --models 27b-nextn
    DIR/python -m bench.gpu.agents DIR --models 35b-a3b-nextn --cases "4 at once" --turns 4
    python -m bench.gpu.agents --llama-server FILE --models tiny-hybrid=FILE.gguf --head 300
    --results-of 50 200

Each agent has its own task and its own tool results after one head (system message) that all share.
A reply has a given number of letters, one token each, so that a server finds in the next prompt
what it wrote. Cases: 4 and 8 agents at once, 4 in turn (with the shortest replies), and 4 at once
where ``-c`` holds `OVER` of what they grow to. An agent tries again after a refusal, and is lost
after `TRIES` of them; its first token counts from its first request. `ideal` is what the answered
tokens take without any overlap or waiting: those that no earlier request had at the speed of one
cold prompt, then the replies at the speed of a full batch after short prompts, both measured on the
same server.

A case ends by itself: once --case-budget has passed since its first request, or --budget since the
start of the run, no agent sends another request, and requests in flight end. `unanswered` are the
turns without a reply, those of lost agents included. With --case-budget the first server of a case
leaves time for the second.

A second table splits the first tokens by turn: with ``--results-of N N --replies-of N N`` the
prompts of a turn are equal; of eight that come together and are served in this order, 95 % is 1.78
of the median. Findings go to gpu-agents-<shape>.json and .md.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bench.common import words
from bench.gpu.machine import describe, vram_mib
from bench.gpu.report import OURS, PEER, table_lines
from bench.gpu.servers import (
    Messages,
    Server,
    llama_server,
    models_of,
    options_of,
    pyctl,
    weights_of,
    window_rate,
)
from pyctl.measure.process_stats import resident_mib

TASK = 500
"""Characters, and so tokens, of an agent's first message."""

STEPS = 4
"""Sizes of tool results, and of replies, between the least and the most."""

N_DECODE = 64
"""Tokens of each reply with which the speed of a full batch is measured."""

OVER = 0.6
"""The part of all contexts together that ``-c`` holds if they do not fit."""

EXACT = "pyctl --exact"
"""The name of pyctl with that flag in the tables."""

TRIES = 5
PAUSE = 0.5
"""Tries of a request that is refused, and seconds between them."""

LETTERS = [[letter, 100.0] for letter in "aeioubdfgklmnprst "]
"""Replies of these are the same tokens when they come back as text."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """``n_agents`` in so many turns; ``fits``: all contexts fit into ``-c`` together."""

    name: str
    n_agents: int
    at_once: bool = True
    fits: bool = True


CASES = (
    Case("4 at once", 4),
    Case("8 at once", 8),
    Case("4 in turn", 4, at_once=False),
    Case("4 at once, over budget", 4, fits=False),
)
COLUMNS = (
    "wall s",
    "ideal s",
    "of ideal",
    "first tokens s",
    "first token ms: median",
    "95 %",
    "evaluated",
    "floor",
    "refused",
    "lost",
    "unanswered",
)


@dataclass(frozen=True)
class Asked:
    """An answered request, and the number of its refusals before."""

    agent: int
    turn: int
    first_ms: float
    cached: int
    evaluated: int
    n_predicted: int
    n_refused: int


class Agent:
    """A conversation that grows by tool results; the same for the same case, number and replies."""

    def __init__(self, case: Case, number: int, options: argparse.Namespace) -> None:
        rng = random.Random(f"{case.name} {number}")
        self.number, self.asked, self.n_refused, self.is_lost = number, list[Asked](), 0, False
        results, replies = (
            [*_spread(*sizes)] for sizes in (options.results_of, options.replies_of)
        )
        self.new = [TASK, *(rng.choice(results) for _ in range(options.turns - 1))]
        self.replies = [
            rng.choice(replies) if case.at_once else min(replies) for _ in range(options.turns)
        ]
        self.name = f"{case.name} {number}"
        self.head = words(f"head {case.name}", options.head)
        self.messages: Messages = [{"role": "system", "content": self.head}]
        self.size = options.head + sum(self.new) + sum(self.replies) + 60 * options.turns

    def turn(self, server: Server, end: float) -> None:
        """Send the next message, and keep the reply. A refused agent tries again after multiples of
        `PAUSE` seconds, and one that was refused too often is lost. Nothing is sent from ``end``
        on, in monotonic seconds.
        """
        number = len(self.asked)
        role = "tool" if number else "user"
        message = {"role": role, "content": words(f"{self.name} {number}", self.new[number])}
        began = time.perf_counter()
        tries = 0
        while not self.is_lost and time.monotonic() < end:
            asked = time.perf_counter()
            try:
                reply = server.request(
                    [*self.messages, message], self.replies[number], logit_bias=LETTERS
                )
            except (OSError, HTTPException, ValueError) as error:
                print(f"        {server.name}, agent {self.name}: {str(error)[:120]}", flush=True)
                tries += 1
                self.n_refused += 1
                self.is_lost = tries == TRIES
                if not self.is_lost:
                    time.sleep(PAUSE * (1 + self.number))
                continue
            first_ms = reply.first_ms + (asked - began) * 1e3
            counts = reply.cached, reply.evaluated, reply.n_predicted
            self.asked.append(Asked(self.number, number, first_ms, *counts, tries))
            self.messages += [message, {"role": "assistant", "content": reply.text}]
            return


def _spread(minimum: int, maximum: int) -> list[int]:
    """Return sizes from ``minimum`` to ``maximum``, each the same multiple of the one before."""
    return [round(minimum * (maximum / minimum) ** (i / (STEPS - 1))) for i in range(STEPS)]


def floor_of(asked: Sequence[Asked], n_head: int) -> int:
    """Return the number of tokens of prompts that no earlier request had, nor its reply; all agents
    share ``n_head``.
    """
    n = n_head if asked else 0
    before = dict[int, int]()
    for each in sorted(asked, key=lambda each: each.turn):
        whole = each.cached + each.evaluated
        n += max(whole - before.get(each.agent, n_head), 0)
        before[each.agent] = whole + each.n_predicted
    return n


class Subject:
    """A running server, and its speed at the parts of the ideal."""

    def __init__(self, server: Server, options: argparse.Namespace, n_ctx: int) -> None:
        self.server = server
        self._case_budget = options.case_budget
        server.request([{"role": "user", "content": words("warm", min(1200, n_ctx // 4))}], 4)
        cold = server.request(
            [{"role": "user", "content": words("cold", min(options.prefill, n_ctx // 2))}], 1
        )
        self.prefill = cold.evaluated / cold.first_ms * 1e3
        self._decode: dict[int, float] = {}

    def decode(self, n_seqs: int) -> float:
        """Return tokens per second of ``n_seqs`` replies together, of which none waits."""
        if n_seqs not in self._decode:
            prompts = [words(f"decode {n_seqs} {i}", 200) for i in range(n_seqs)]
            with ThreadPoolExecutor(n_seqs) as pool:
                replies = list(
                    pool.map(lambda prompt: self.server.complete(prompt, N_DECODE), prompts)
                )
            self._decode[n_seqs] = window_rate(replies)
        return self._decode[n_seqs]

    def run(self, case: Case, agents: Sequence[Agent], n_turns: int, end: float) -> Record:
        """Run all turns of all agents, until ``end`` in monotonic seconds or the end of the case's
        budget; return the record of the case.
        """
        is_batched = case.at_once and self.server.name != EXACT
        decode = self.decode(case.n_agents if is_batched else 1)
        n_head = len(self.server.post("/tokenize", {"content": agents[0].head})["tokens"])
        turns = range(n_turns)
        began = time.perf_counter()
        end = min(end, time.monotonic() + self._case_budget)
        if case.at_once:
            with ThreadPoolExecutor(len(agents)) as pool:
                list(pool.map(lambda agent: [agent.turn(self.server, end) for _ in turns], agents))
        else:
            for _ in turns:
                for agent in agents:
                    agent.turn(self.server, end)
        wall = time.perf_counter() - began
        asked = [each for agent in agents for each in agent.asked]
        floor = floor_of(asked, n_head)
        n_reply = sum(each.n_predicted for each in asked)
        return {
            "case": case.name,
            "server": self.server.name,
            "wall_s": wall,
            "floor": floor,
            "replies": n_reply,
            "evaluated": sum(each.evaluated for each in asked),
            "prefill": self.prefill,
            "decode": decode,
            "ideal_s": floor / self.prefill + n_reply / decode,
            "refused": sum(agent.n_refused for agent in agents),
            "lost": sum(agent.is_lost for agent in agents),
            "unanswered": n_turns * len(agents) - len(asked),
            "asked": [asdict(each) for each in asked],
        }


@dataclass
class Run:
    """The run of one model: its findings, and the time until which requests may be sent, in
    monotonic seconds.
    """

    shape: str
    model: Path
    peer: str | None
    options: argparse.Namespace
    work: Path
    records: list[Record]
    end: float

    def all(self) -> None:
        """Run the cases that fit on one server of each kind, then the others on another."""
        cases = [case for case in CASES if case.name in self.options.cases]
        for number, group in enumerate(
            ([c for c in cases if c.fits], [c for c in cases if not c.fits])
        ):
            for name in self._names():
                if group:
                    self._serve(
                        name,
                        group,
                        self.work / f"{self.shape}-{number}-{name.replace(' ', '')}.log",
                    )

    def _names(self) -> list[str]:
        """Return the servers to measure, in order."""
        names = [OURS] * (OURS in self.options.servers)
        names += [EXACT] * self.options.exact
        names += [PEER] * (PEER in self.options.servers and self.peer is not None)
        return names

    def _serve(self, name: str, cases: Sequence[Case], log: Path) -> None:
        """Start a server with a context for the largest of ``cases``, or `OVER` of it if they must
        not fit, and keep a record of each case, with MiB on the device and resident. An error
        becomes a record as well, and skips the cases that are left.
        """
        whole = max(sum(agent.size for agent in self._agents(case)) for case in cases)
        n_seqs = max(case.n_agents for case in cases)
        n_ctx = int(1.1 * whole) if cases[0].fits else int(OVER * whole)
        flags = [
            "-m",
            str(self.model),
            "-ngl",
            "99",
            "-fa",
            "on",
            "--spec-type",
            "none",
            "--kv-unified",
        ]
        flags += ["-np", str(n_seqs), "-c", str(n_ctx), *self.options.flags]
        if name == PEER:
            server = llama_server(str(self.peer), flags, log)
        else:
            server = pyctl([*flags, *(["--exact"] if name == EXACT else [])], None, log)
            server.name = name
        before = vram_mib()
        try:
            server.start()
            subject = Subject(server, self.options, n_ctx)
            for case in cases:
                if time.monotonic() > self.end:
                    self.keep({"case": case.name, "server": name, "why": "no time left"})
                    continue
                record = subject.run(case, self._agents(case), self.options.turns, self.end)
                record["n_ctx"] = n_ctx
                record["resident_mib"] = resident_mib(server.pid) if server.is_running else None
                record["vram_mib"] = None if before is None else (vram_mib() or 0.0) - before
                self.keep(record)
        except (OSError, HTTPException, ValueError, ZeroDivisionError) as error:
            self.keep({"case": cases[0].name, "server": name, "why": str(error)[-300:]})
        finally:
            server.kill()

    def _agents(self, case: Case) -> list[Agent]:
        return [Agent(case, number, self.options) for number in range(case.n_agents)]

    def keep(self, record: Record) -> None:
        """Print one finding, and write all."""
        self.records.append(record)
        shown = {
            key: round(value, 1) if isinstance(value, float) else value
            for key, value in record.items()
        }
        print("    ", {key: value for key, value in shown.items() if key != "asked"}, flush=True)
        path = self.options.results / f"gpu-agents-{self.shape}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "shape": self.shape,
            "machine": describe(weights_of(self.shape)),
            "records": self.records,
        }
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(document(data), encoding="utf-8")


def waits(asked: Sequence[Record]) -> tuple[float, float]:
    """Return the median and the 95th percentile of the waits for first tokens, ms."""
    first = sorted(each["first_ms"] for each in asked) or [float("nan")]
    return statistics.median(first), first[min(int(0.95 * len(first)), len(first) - 1)]


def rows_by_turn(record: Record) -> Iterator[list[str]]:
    """Yield the first tokens of one case on one server, by turn."""
    asked = record.get("asked", [])
    for turn in sorted({each["turn"] for each in asked}):
        first, late = waits([each for each in asked if each["turn"] == turn])
        yield [
            record["case"],
            record["server"],
            f"{turn + 1}",
            f"{first:,.0f}",
            f"{late:,.0f}",
            f"{late / first:.2f}",
        ]


def row(record: Record) -> list[str]:
    """Return the cells of one case on one server."""
    if "why" in record:
        return [
            record["case"],
            record["server"],
            record["why"].replace("\n", " "),
            *[""] * (len(COLUMNS) + 1),
        ]
    first, late = waits(record["asked"])
    cells = [
        record["case"],
        record["server"],
        f"{record['wall_s']:.1f}",
        f"{record['ideal_s']:.1f}",
    ]
    all_first = sum(each["first_ms"] for each in record["asked"]) / 1e3
    of_ideal = f"{record['wall_s'] / record['ideal_s']:.2f}" if record["asked"] else ""
    cells += [of_ideal, f"{all_first:.1f}"]
    cells += [f"{first:,.0f}", f"{late:,.0f}"]
    counts = "evaluated", "floor", "refused", "lost", "unanswered"
    cells += [f"{record[name]:,}" for name in counts]
    return [
        *cells,
        *("" if record[n] is None else f"{record[n]:,.0f}" for n in ("vram_mib", "resident_mib")),
    ]


def document(data: dict[str, Any]) -> str:
    """Return the table of one model in Markdown."""
    lines = [f"# Agents on pyctl and llama-server, {data['shape']} shape", ""]
    lines += [f"- {name}: {value}" for name, value in data["machine"].items()]
    records = sorted(
        data["records"], key=lambda record: [case.name for case in CASES].index(record["case"])
    )
    columns = ["case", "server", *COLUMNS, "VRAM MiB", "resident MiB"]
    lines += ["", *table_lines(columns, [row(record) for record in records])]
    columns = ["case", "server", "turn", "first token ms: median", "95 %", "95 % of median"]
    return "\n".join(
        [
            *lines,
            *table_lines(columns, [each for record in records for each in rows_by_turn(record)]),
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases on each model until the budget ends, and print the records as a document."""
    parser = options_of(__doc__, 180)
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        help="the directory of prepare.py; without it, name files",
    )
    parser.add_argument("--models", nargs="+", metavar="SHAPE[=FILE]", default=["27b-nextn"])
    parser.add_argument("--llama-server", metavar="FILE")
    parser.add_argument(
        "--cases", nargs="+", choices=[case.name for case in CASES], default=[c.name for c in CASES]
    )
    parser.add_argument(
        "--case-budget",
        type=float,
        default=math.inf,
        metavar="S",
        help="seconds for each case on each server; no request is sent later (default: no limit)",
    )
    parser.add_argument("--exact", action="store_true", help="measure pyctl with --exact, too")
    parser.add_argument("--turns", type=int, default=2, help="of each agent")
    parser.add_argument("--head", type=int, default=3000, help="tokens that all agents share")
    parser.add_argument(
        "--results-of",
        type=int,
        nargs=2,
        default=[500, 4000],
        metavar="N",
        help="tool results, tokens",
    )
    parser.add_argument(
        "--replies-of", type=int, nargs=2, default=[128, 700], metavar="N", help="tokens"
    )
    parser.add_argument(
        "--prefill", type=int, default=6000, help="tokens of the cold prompt that is timed"
    )
    options = parser.parse_args(argv)
    began, (models, peer) = time.monotonic(), models_of(options)
    with tempfile.TemporaryDirectory(prefix="agents-") as work:
        for shape, model in models.items():
            run = Run(shape, model, peer, options, Path(work), [], began + options.budget)
            run.all()
            print(document({"shape": shape, "machine": {}, "records": run.records}))
    print(f"{time.monotonic() - began:.0f} s; tables in {options.results}")


if __name__ == "__main__":
    main()

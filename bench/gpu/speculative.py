"""Speculative decoding side by side with llama-server: the same GGUF with a head, the same flags,
one run.

    DIR/python -m bench.gpu.speculative DIR                                # all parts, both shapes
    DIR/python -m bench.gpu.speculative DIR --parts lengths --models 27b-nextn --budget 120
    python -m bench.gpu.speculative --llama-server FILE --models tiny-hybrid-nextn=FILE.gguf
    --prompt 500 --together 2 DIR/python -m bench.gpu.speculative DIR --models 27b-nextn --parts
    lengths --draft FILE.gguf --type draft-dflash \
        --n-max 15 --lengths 4 --prompt 2048 10240 51200 --n-predict 128 1000

Parts: lengths (drafts accepted by chance with a given mean length, and no drafts), rewriting
(`bench.gpu.rewriting`: given replies, with and without the cache). Chance makes lengths differ:
speeds are for its yield on average from drafts as long as each server makes them, which may be
shorter than --n-max, or none, if that is faster. Servers are loaded and warmed several at a time,
as the device's memory allows, and measured one after the other while the others are idle: each
evaluates every prompt once, and continues it by every number of tokens. Findings go to
gpu-speculative-<shape>.json and .md once a server has ended, with a draft model to
gpu-speculative-<shape>-<file>.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from itertools import product, repeat
from pathlib import Path
from typing import Any

from bench.common import words
from bench.gpu.machine import describe, free_vram_mib, vram_mib
from bench.gpu.report import OURS, PEER
from bench.gpu.rewriting import HEAD, KINDS, rewriting
from bench.gpu.servers import (
    Completion,
    Server,
    llama_server,
    models_of,
    options_of,
    pyctl,
    weights_of,
    window_rate,
)
from bench.gpu.speculative_report import WITHOUT, document
from bench.head import continued
from pyctl.measure.process_stats import resident_mib
from pyctl.measure.server_process import PYCTL_SERVE
from pyctl.processes.module_command import module_command
from tools.generator import SHAPES

PARTS = ("lengths", "rewriting")

N_WARM = 16
N_QUIET = 64
"""Tokens generated before anything counts: once loaded, and after each prompt, so that costs are
known.
"""

CHANCE_DRAFTS = module_command("bench.gpu.chance_drafts")

_ALONE = threading.Lock()

BESIDE_MIB = 4500
"""MiB that a server may take on the device besides its weights, rows and states."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A server to be measured. ``length`` is the mean number of tokens that a step yields, by
    chance.
    """

    n_max: int = 0
    length: float = 0.0

    @property
    def name(self) -> str:
        if not self.n_max:
            return WITHOUT
        wanted = f"length {self.length:g}" if self.length < self.n_max + 1 else "all accepted"
        return f"n_max {self.n_max}, {wanted}"


def planned(options: argparse.Namespace) -> list[Case]:
    """Return the cases of one model, the most telling first: nothing accepted comes last."""
    lengths = sorted(options.lengths, key=lambda length: (length == 1, length))
    return [Case(), *(Case(options.n_max, length) for length in lengths)]


class Findings:
    """Everything about one model, in ``<directory>/gpu-speculative-<shape>.json`` and .md; a part
    measured again replaces what it had found before, and findings of another commit or machine go.
    """

    def __init__(
        self, directory: Path, shape: str, header: dict[str, str], parts: Sequence[str]
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"gpu-speculative-{shape}.json"
        self.records: list[Record] = []
        if self._path.exists():
            old = json.loads(self._path.read_text(encoding="utf-8"))
            if (both := continued(old["machine"], header)) is not None:
                self.records = [record for record in old["records"] if record["part"] not in parts]
                header = both
        self._head = {"shape": shape, "machine": header}

    def add(self, **fields: Any) -> None:
        self.records.append(fields)
        shown = " ".join(
            f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items()
        )
        print(f"    {time.monotonic() - BEGAN:6.1f} s  {shown}", flush=True)
        data = {**self._head, "records": self.records}
        self._path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        self._path.with_suffix(".md").write_text(document(data), encoding="utf-8")


BEGAN = time.monotonic()


@dataclass
class Run:
    """The run of one model, and the time until which cases may be started."""

    shape: str
    model: Path
    llama_server: str | None
    options: argparse.Namespace
    findings: Findings
    end: float
    work: Path

    def flags(self, case: Case) -> list[str]:
        """Return the flags that both servers get."""
        drafting = ["--spec-type", "none"]
        if case.n_max:
            drafting = ["--spec-type", self.options.type, "--spec-draft-n-max", str(case.n_max)]
            drafting += ["-md", self.options.draft] if self.options.draft else []
        own = ["-m", str(self.model), "--metrics", *drafting, *self.options.flags]
        sizes = ["-c", str(self.n_ctx), "-ub", "512", "--parallel", "1"]
        return [*own, "-ngl", "99", "-fa", "on", *sizes, "-ctk", "f16", "-ctv", "f16"]

    @property
    def n_ctx(self) -> int:
        """Tokens of the context."""
        return int(max(self.options.prompt) + max(self.options.n_predict) + 1024)

    @property
    def need_mib(self) -> float:
        """The device memory that a server may take, in MiB; for an unlisted shape, with a short
        context.
        """
        files = [self.model, *([Path(self.options.draft)] if self.options.draft else [])]
        need = BESIDE_MIB + 1.05 * sum(file.stat().st_size for file in files) / 2**20
        if (shape := SHAPES.get(self.shape)) is not None:
            rows = self.n_ctx * shape.row_bytes()
            states = (1 + self.options.n_max) * shape.state_bytes
            need += (1.3 * rows + states) / 2**20
        return need

    def server(self, case: Case, name: str, number: int) -> Server:
        flags = self.flags(case)
        log = self.work / f"{self.shape}-{number}-{name}.log"
        if name == PEER:
            chance = ["--spec-synth-len", f"{case.length:g}"] if case.length else []
            return llama_server(str(self.llama_server), [*flags, *chance], log)
        directory = Path(tempfile.mkdtemp(prefix="cache-", dir=self.work))
        program = (
            (*CHANCE_DRAFTS, f"{case.length:g}", str(case.n_max)) if case.length else PYCTL_SERVE
        )
        return pyctl(flags, directory, log, program)

    @property
    def has_time(self) -> bool:
        return time.monotonic() <= self.end

    @property
    def names(self) -> list[str]:
        return [
            name
            for name in (OURS, PEER)
            if name in self.options.servers and (name == OURS or self.llama_server)
        ]


class Subject:
    """A server with the case that it is measured in, and the results of each prompt and reply."""

    def __init__(self, run: Run, case: Case, name: str, number: int) -> None:
        self.run = run
        self.case = case
        self.name = name
        self.server = run.server(case, name, number)
        self.failed = ""

    def prepare(self, together: threading.Barrier) -> None:
        """Load it, and let it do once the work to be measured; others load at the same time.

        A measurement of the cost of drafts, when it is loaded and from then on, has the device to
        itself.
        """
        together.wait()  # a thread for each
        if self.name == PEER:
            self._start()
        together.wait()
        if self.name == OURS:
            with _ALONE:
                self._start()
        together.wait()
        try:
            with _ALONE:
                if not self.failed:
                    self.server.complete(words("warm", 1200), N_WARM)
        except (OSError, HTTPException, ValueError) as error:
            self.failed = str(error)[-600:]

    def _start(self) -> None:
        try:
            self.server.start()
        except Exception as error:  # the others wait for this one
            self.failed = str(error)[-600:]

    def measure(self) -> None:
        """Measure alone; then stop the server and read the memory that this frees."""
        found: list[Record] = []
        try:
            if self.failed:
                raise OSError(self.failed)
            for n in sorted(self.run.options.prompt):
                found += self._continued(n) if self.run.has_time else []
        except (OSError, HTTPException, ValueError, ZeroDivisionError) as error:
            self._note("failed", why=str(error)[-600:])
        resident = resident_mib(self.server.pid) if found else None
        before = vram_mib()
        self.server.kill()
        after = vram_mib()
        memory = {"load_s": self.server.load_seconds, "resident_mib": resident}
        memory["vram_mib"] = None if before is None or after is None else before - after
        for record in found:
            self._note("speed", **record, **memory)
        n_left = len(self.run.options.prompt) * len(self.run.options.n_predict) - len(found)
        if n_left and not self.failed and not self.run.has_time:
            self._note("skipped", why=f"no time left for {n_left} replies")

    def _continued(self, n: int) -> list[Record]:
        """Return a record of each number of tokens after a prompt of ``n`` tokens, which is
        evaluated once.
        """
        prompt = words(f"{self.run.shape} {self.case.name} {n}", n)
        cold = self.server.complete(prompt, N_QUIET)
        prefill = cold.timings["prompt_n"] / cold.first_ms * 1e3
        found = []
        for n_reply in sorted(self.run.options.n_predict):
            n_drafts = self.server.drafts()
            reply = self.server.complete(prompt, n_reply)
            record = {
                "prompt": n,
                "reply": n_reply,
                "n_max": self.case.n_max,
                "wanted": self.case.length,
            }
            drafts = self.server.drafts() - n_drafts
            found.append(
                {
                    **record,
                    "rate": window_rate([reply]),
                    **counts(reply),
                    "drafts": drafts,
                    "prefill": prefill,
                }
            )
        return found

    def _note(self, kind: str, **fields: Any) -> None:
        self.run.findings.add(
            part="lengths", kind=kind, case=self.case.name, server=self.name, **fields
        )


def counts(reply: Completion) -> dict[str, int]:
    """Return tokens drafted and accepted, and steps: an accepted token came with another one."""
    steps = reply.n_predicted - 1 - reply.n_accepted
    return {"drafted": reply.n_drafted, "accepted": reply.n_accepted, "steps": steps}


def groups(run: Run, subjects: Sequence[Subject]) -> Iterator[Sequence[Subject]]:
    """Yield groups of as many subjects as fit on the device at once."""
    n = run.options.together
    if not n:
        free = free_vram_mib()
        n = max(int(free // run.need_mib), 1) if free is not None else 2
    for start in range(0, len(subjects), n):
        yield subjects[start : start + n]


def side_by_side(run: Run) -> None:
    """Measure the part ``lengths``."""
    pairs = product(planned(run.options), run.names)
    subjects = [Subject(run, case, name, number) for number, (case, name) in enumerate(pairs)]
    # Servers end with the thread that starts them.
    with ThreadPoolExecutor(16) as pool:
        for group in groups(run, subjects):
            if not run.has_time:
                for each in group:
                    run.findings.add(
                        part="lengths", kind="skipped", case=each.case.name, server=each.name
                    )
                continue
            together = threading.Barrier(len(group))
            list(pool.map(lambda each, barrier: each.prepare(barrier), group, repeat(together)))
            for each in group:
                each.measure()


def main() -> None:
    """Measure the parts on each model, and print the records as a document."""
    parser = options_of(__doc__, 3600)
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        help="the directory of prepare.py; without it, name files",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--models", nargs="+", metavar="SHAPE[=FILE]", default=["27b-nextn", "35b-a3b-nextn"]
    )
    parser.add_argument("--llama-server", metavar="FILE")
    parser.add_argument("--lengths", type=float, nargs="+", default=[4.0, 2.0, 3.0, 1.0])
    parser.add_argument(
        "--n-max", type=int, default=3, help="tokens of a draft; a block of n has n - 1"
    )
    parser.add_argument("--prompt", type=int, nargs="+", default=[8192], help="tokens")
    parser.add_argument("--n-predict", type=int, nargs="+", default=[128], help="tokens")
    parser.add_argument(
        "--head-share",
        type=float,
        default=0.8,
        help="of rewriting: drafts of the head that are right",
    )
    parser.add_argument(
        "--types",
        nargs="+",
        default=[],
        metavar="TYPES",
        help="of rewriting: --spec-type, then more flags",
    )
    parser.add_argument(
        "--texts", nargs="+", choices=KINDS, default=list(KINDS), help="of rewriting"
    )
    parser.add_argument(
        "--together", type=int, default=0, metavar="N", help="servers loaded at a time; 0: that fit"
    )
    parser.add_argument("--type", default=HEAD, help="source of drafts, of lengths")
    parser.add_argument("--draft", metavar="FILE", help="of a draft model, for --type")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory(prefix="speculative-") as work:
        models, peer = models_of(options)
        for shape, model in models.items():
            name = f"{shape}-{Path(options.draft).stem}" if options.draft else shape
            findings = Findings(options.results, name, describe(weights_of(shape)), options.parts)
            runs.append(
                Run(shape, model, peer, options, findings, BEGAN + options.budget, Path(work))
            )
        for run in runs:
            if "lengths" in options.parts:
                side_by_side(run)
            if "rewriting" in options.parts:
                rewriting(run)
    for run in runs:
        print(document({"shape": run.shape, "machine": {}, "records": run.findings.records}))
    print(f"{time.monotonic() - BEGAN:.0f} s; tables in {options.results}")


if __name__ == "__main__":
    main()

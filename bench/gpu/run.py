"""The measurement of a model: the remaining time, the findings, and a server that runs a
workload.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import words
from bench.gpu.machine import available_mib, vram_mib
from bench.gpu.report import COLD, FIRST_TOKEN, OURS, PEER, RESTART, document
from bench.gpu.servers import Reply, Server
from bench.gpu.workloads import RETURN, Conversation, Step
from bench.head import continued
from pyctl.measure.process_stats import resident_mib
from tools.generator import SHAPES

__all__ = ["N_FIRST", "QUESTION", "Clock", "Results", "Run", "Visit"]

Record = dict[str, Any]


class Clock:
    """The time until ``end``, in monotonic seconds, and estimates that learn from measurements."""

    def __init__(self, end: float, tokens_per_second: float) -> None:
        self._began = time.monotonic()
        self._end = end
        self.tokens_per_second = tokens_per_second

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def fits(self, seconds: float) -> bool:
        return time.monotonic() + seconds <= self._end

    def prefill(self, n_tokens: int) -> float:
        """Return an estimate of the seconds to evaluate so many tokens, a little pessimistic."""
        return 1.1 * n_tokens / self.tokens_per_second + 0.5

    def learn(self, n_tokens: int, seconds: float) -> None:
        """Learn the speed of prefill from a long one."""
        if n_tokens >= 2000:
            self.tokens_per_second = n_tokens / seconds


class Results:
    """Everything about one model, in ``<directory>/gpu-side-by-side-<shape>.json`` and .md.

    A section measured again replaces what it had found before; others stay, and so does one that
    finds nothing. But findings of another commit or machine go.
    """

    def __init__(self, directory: Path, shape: str, header: dict[str, str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"gpu-side-by-side-{shape}.json"
        self.data: dict[str, Any] = {"shape": shape, "records": []}
        if self._path.exists():
            old = json.loads(self._path.read_text(encoding="utf-8"))
            if (both := continued(old["machine"], header)) is not None:
                self.data = old
                header = both
        self.data["machine"] = header
        self._old: dict[str, list[Record]] = {}

    @property
    def records(self) -> list[Record]:
        return list(self.data["records"])

    def records_of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    def begin(self, section: str) -> None:
        """Begin a section: its next finding replaces the findings of an earlier run."""
        mine = [record for record in self.records if record["section"] == section]
        self._old[section] = [record for record in mine if record["kind"] != "skipped"]
        self.data["records"] = [
            r for r in self.records if r["section"] != section or r["kind"] != "skipped"
        ]

    def add(self, section: str, kind: str, **fields: Any) -> None:
        """Keep one finding, and write both files."""
        if kind != "skipped":
            old = self._old.pop(section, [])
            self.data["records"] = [record for record in self.records if record not in old]
        self.data["records"].append({"section": section, "kind": kind, **fields})
        self.save()

    def skip(self, section: str, what: str, why: str) -> None:
        print(f"    skipped: {section}: {what} ({why})", flush=True)
        self.add(section, "skipped", what=what, why=why)

    def save(self) -> None:
        for path, text in (
            (self._path, json.dumps(self.data, indent=1)),
            (self._path.with_suffix(".md"), document(self.data)),
        ):
            temporary = path.with_suffix(f"{path.suffix}.tmp")
            temporary.write_text(text + "\n", encoding="utf-8")
            temporary.replace(path)


N_FIRST = 4
N_DECODE = 256
"""Tokens generated where the first one counts, and where their speed does."""

LARGE = 50_000
"""Tokens of a conversation whose rows and states may be more than --cache-ram holds."""

QUESTION = {"role": "user", "content": "tell me more about that"}


@dataclass
class Run:
    """The run of one model: its tables, and the time that is left."""

    shape: str
    model: Path
    llama_server: str | None
    options: argparse.Namespace
    results: Results
    clock: Clock
    work: Path

    loading: float = 2.0
    """Seconds until a server answers: a guess at first, then those of the last one."""

    def flags(self) -> list[str]:
        """Return the flags of both servers; drafts and RAM are llama-server's defaults."""
        flags = [
            "--spec-type",
            "none",
            "--cache-ram",
            "8192",
            "-ngl",
            "99",
            "-fa",
            "on",
            "--parallel",
            "1",
        ]
        return [
            *flags,
            "-c",
            str(self.options.ctx),
            "-ctk",
            "f16",
            "-ctv",
            "f16",
            *self.options.flags,
        ]


class Visit:
    """A server with the conversations it is asked about; every answer becomes a record."""

    def __init__(self, run: Run, section: str, server: Server, kind: str = FIRST_TOKEN) -> None:
        self.run = run
        self.section = section
        self.server = server
        self._kind = kind
        self._last: dict[str, Any] = {}

    def follow(self, steps: Generator[Step, str, None], **fields: Any) -> bool:
        """Ask step by step; False if time ran out."""
        with closing(steps):
            step = next(steps, None)
            while step is not None:
                if not self.run.clock.fits(self.run.clock.prefill(self.expected(step))):
                    self.run.results.skip(
                        self.section, f"{self.server.name}: {step.way}, {step.size}", "no time left"
                    )
                    return False
                reply = self.server.request(step.messages, N_FIRST, **fields)
                self.keep(step, reply)
                try:
                    step = steps.send(reply.text)
                except StopIteration:
                    step = None
        return True

    def expected(self, step: Step) -> int:
        """Return the most tokens that the server may have to evaluate. llama-server has no cache
        after a restart, and loses a prompt larger than its cache in RAM when another conversation
        comes.
        """
        if self.server.name == PEER and (
            step.way == RESTART or (step.way == RETURN and step.size > LARGE)
        ):
            return sum(len(message["content"]) for message in step.messages)
        return step.n_new

    def keep(self, step: Step, reply: Reply) -> None:
        """Record and print a reply: milliseconds to the first token, and its cached and evaluated
        tokens. A cold reply also corrects the clock's speed of prefill, by which later steps are
        planned.
        """
        timings = reply.timings
        name = self.server.name
        if step.way == COLD:
            self.run.clock.learn(reply.evaluated, reply.first_ms / 1e3)
        self.run.results.add(
            self.section,
            self._kind,
            server=name,
            way=step.way,
            size=step.size,
            first_ms=reply.first_ms,
            prompt=reply.cached + reply.evaluated,
            cached=reply.cached,
            evaluated=reply.evaluated,
            prompt_ms=timings["prompt_ms"],
            source=timings.get("source"),
            lookup_ms=timings.get("lookup_ms"),
            restore_ms=timings.get("restore_ms"),
            save_ms=timings.get("save_ms"),
        )
        source = f" from {timings['source']}" if "source" in timings else ""
        shown = (
            f"{step.way}, {step.size}: {reply.evaluated} evaluated, {reply.cached} cached{source}"
        )
        print(
            f"    {self.run.clock.elapsed:6.1f} s  {name:12} {shown}, first token "
            f"{reply.first_ms:.1f} ms",
            flush=True,
        )
        if name == OURS and self._kind == FIRST_TOKEN:
            self._kept(step)

    def _kept(self, step: Step) -> None:
        """Record the growth of the cache in this turn, against the bytes of the new rows and
        states.
        """
        seen = self.server.get("/cache")
        flat = list(_walk(seen["prefixes"]))
        now = {
            "size": step.size,
            "bytes": seen["bytes"]["resident"],
            "evicted": seen["slots"]["evicted"],
            "states": sum(node["state_bytes"] for node in flat),
            "count": len(flat),
            "n": max((node["n"] for node in flat), default=0),
        }
        before = self._last
        self._last = now
        comparable = before and before["size"] == step.size and before["evicted"] == now["evicted"]
        comparable = comparable and self.run.shape in SHAPES  # the size of a row is known
        if not comparable or step.way != "append" or now["n"] <= before["n"]:
            return
        shape = SHAPES[self.run.shape]
        theory = (now["n"] - before["n"]) * shape.row_bytes() + now["states"] - before["states"]
        grown = now["bytes"] - before["bytes"]
        self.run.results.add(
            self.section,
            "kept turn",
            way=(f"{step.way}, {step.size:,}"),
            tokens=now["n"] - before["n"],
            snapshots=now["count"] - before["count"],
            bytes=grown,
            theory=theory,
            ratio=grown / theory,
        )

    def memory(self, when: str, before: float | None, available: float) -> None:
        """Record the server's memory ``when`` in MiB: resident, on the device above ``before``, and
        the fall of the host's memory below ``available``. pyctl adds the parts of its cache.
        """
        vram = vram_mib()
        counted = {}
        if self.server.name == OURS:
            seen = self.server.get("/cache")
            sizes = {
                "cache": seen["bytes"]["resident"],
                "budget": seen["bytes"]["budget"],
                **seen["memory"],
            }
            parts = ("cache", "budget", "blocks", "in_flight", "arena")
            counted = {f"{part}_mib": sizes[part] / 2**20 for part in parts if sizes[part] >= 0}
        self.run.results.add(
            self.section,
            "memory",
            server=self.server.name,
            when=when,
            resident_mib=resident_mib(self.server.pid),
            vram_mib=None if vram is None or before is None else vram - before,
            ram_mib=available - available_mib(),
            **counted,
        )

    def decode(self, conversation: Conversation) -> None:
        """Record tokens per second of a reply, by the client's clock, the first token left out."""
        if not self.run.clock.fits(8):
            return self.run.results.skip(
                self.section, f"{self.server.name}: decode", "no time left"
            )
        reply = self.server.request([*conversation.messages, QUESTION], N_DECODE, ignore_eos=True)
        n = reply.n_predicted
        rate = (n - 1) / reply.decode_ms * 1e3 if n > 1 and reply.decode_ms else None
        self.run.results.add(
            self.section,
            "decode",
            server=self.server.name,
            size=conversation.size,
            n=n,
            tokens_per_second=rate,
        )

    def streams(self, n_streams: int) -> None:
        """Record tokens per second of each of so many replies at once, by the client's clock, while
        all of them arrive.
        """
        if not self.run.clock.fits(10):
            return self.run.results.skip(
                self.section, f"{self.server.name}: {n_streams} streams", "no time left"
            )
        prompts = [words(f"{self.section} {n_streams} {i}", 480) for i in range(n_streams)]
        with ThreadPoolExecutor(n_streams) as pool:
            replies = list(pool.map(lambda prompt: self.server.complete(prompt, N_DECODE), prompts))
        first = max(r.arrivals[0][0] for r in replies)
        last = min(r.arrivals[-1][0] for r in replies)
        rates = [
            sum(n for at, n in r.arrivals if first < at <= last) / (last - first)
            for r in replies
            if last > first
        ]
        self.run.results.add(
            self.section,
            "streams",
            server=self.server.name,
            streams=n_streams,
            tokens_per_second=statistics.mean(rates) if rates else None,
        )


def _walk(nodes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for node in nodes:
        yield node
        yield from _walk(node["children"])

"""Measure pyctl and llama-server side by side, on a machine that prepare.py has prepared.

    DIR/python bench/gpu/measure.py DIR                          # everything
    DIR/python bench/gpu/measure.py DIR --only base kv --budget 500 --results OUT
    DIR/python bench/gpu/measure.py DIR --models tiny-hybrid --sizes 3000 1000 --long 6000 --ctx 16384 --only base

Sections, the most telling first: base (first token, decode, prefill, memory and restarts at --sizes), kv (copies in
GB/s), long (as base, at --long), exact (logits), card (27B within 24 GB). Each finding is written to
gpu-side-by-side-<shape>.json and .md at once. What no longer fits --budget is skipped, and the tables say so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drive import cached_share, direct_rate, evict, settle
from machine import available_mib, describe, resident_mib, storage_reads, vram_mib
from report import BARE, COLD, ONE_MESSAGE, OURS, PEER, RESTART, WARM_RESTART, aims
from results import Clock, Results
from servers import Reply, Server, llama_server, pyctl
from workloads import RETURN, Conversation, Step, alternate, cut, grow, once, restarted

from pyctl.models import SHAPES

HERE = Path(__file__).resolve().parent
SECTIONS = ("base", "kv", "long", "exact", "card")
PREFILL = {"27b": 2400.0, "35b-a3b": 5000.0}
"""Tokens per second that the first estimate assumes; a tiny model on a CPU is in between."""

LOADING = {"27b": 10.0, "35b-a3b": 12.0}
"""Seconds until a server answers, likewise."""

N_FIRST, N_DECODE = 4, 256
"""Tokens generated where the first one counts, and where their speed does."""

CARD_MIB = 24_000
"""What a card of 24 GB has left beside the driver's own."""

LARGE = 50_000
"""Tokens of a conversation whose rows and states may be more than --cache-ram holds."""

STREAMS = (1, 4, 16)
"""Blocks read at a time when the drive is measured alone."""


@dataclass
class Run:
    """One model, its tables, and the time that is left."""

    shape: str
    model: Path
    llama_server: str | None
    options: argparse.Namespace
    results: Results
    clock: Clock
    work: Path

    loading: float = 2.0
    """Seconds until a server answers: a guess at first, then what the last one took."""

    def flags(self, kv: str = "f16", n_ctx: int | None = None) -> list[str]:
        """What both servers get."""
        flags = ["-ngl", "99", "-fa", "on", "-c", str(n_ctx or self.options.ctx), "-ub", "512", "--parallel", "1"]
        return [*flags, "-ctk", kv, "-ctv", kv, *self.options.flags]


# -- first token, decode, restarts -------------------------------------------------------------------------------------


class Visit:
    """One server with the conversations it is asked about; every answer becomes a record."""

    def __init__(self, run: Run, section: str, server: Server) -> None:
        self.run, self.section, self.server = run, section, server
        self._last: dict[str, Any] = {}

    def follow(self, steps: Generator[Step, str, None], **fields: Any) -> bool:
        """Ask step by step; False if time ran out."""
        with closing(steps):
            step = next(steps, None)
            while step is not None:
                if not self.run.clock.fits(self.run.clock.prefill(self.expected(step))):
                    self.run.results.skip(self.section, f"{self.server.name}: {step.way}, {step.size}", "no time left")
                    return False
                reply = self.server.ask(step.messages, N_FIRST, **fields)
                self.keep(step, reply)
                try:
                    step = steps.send(reply.text)
                except StopIteration:
                    step = None
        return True

    def expected(self, step: Step) -> int:
        """How many tokens the server may have to evaluate: llama-server knows nothing after a restart, and what is
        larger than its cache in RAM is lost to it when another conversation comes."""
        if self.server.name == PEER and (step.way == RESTART or (step.way == RETURN and step.size > LARGE)):
            return sum(len(message["content"]) for message in step.messages)
        return step.n_new

    def keep(self, step: Step, reply: Reply) -> None:
        timings, name = reply.timings, self.server.name
        if step.way == COLD:
            self.run.clock.learn(reply.evaluated, reply.first_ms / 1e3)
        self.run.results.add(
            self.section, "first token", server=name, way=step.way, size=step.size, first_ms=reply.first_ms,
            prompt=reply.cached + reply.evaluated, cached=reply.cached, evaluated=reply.evaluated,
            prompt_ms=timings["prompt_ms"], source=timings.get("source"), lookup_ms=timings.get("lookup_ms"),
            restore_ms=timings.get("restore_ms"), save_ms=timings.get("save_ms"),
        )  # fmt: skip
        source = f" from {timings['source']}" if "source" in timings else ""
        shown = f"{step.way}, {step.size}: {reply.evaluated} evaluated, {reply.cached} cached{source}"
        print(
            f"    {self.run.clock.elapsed:6.1f} s  {name:12} {shown}, first token {reply.first_ms:.1f} ms", flush=True
        )
        if name == OURS:
            self._kept(step)

    def _kept(self, step: Step) -> None:
        """What the cache grew by in this turn, against the new rows and states."""
        seen = self.server.get("/cache")
        flat = list(_walk(seen["prefixes"]))
        now = {
            "size": step.size, "bytes": seen["bytes"]["resident"], "evicted": seen["slots"]["evicted"],
            "states": sum(node["state_bytes"] for node in flat), "count": len(flat),
            "n": max((node["n"] for node in flat), default=0),
        }  # fmt: skip
        before, self._last = self._last, now
        comparable = before and before["size"] == step.size and before["evicted"] == now["evicted"]
        if not comparable or step.way != "append" or now["n"] <= before["n"]:
            return
        shape = SHAPES[self.run.shape]
        theory = (now["n"] - before["n"]) * shape.row_bytes() + now["states"] - before["states"]
        grown = now["bytes"] - before["bytes"]
        self.run.results.add(
            self.section, "kept turn", way=f"{step.way}, {step.size:,}", tokens=now["n"] - before["n"],
            snapshots=now["count"] - before["count"], bytes=grown, theory=theory, ratio=grown / theory,
        )  # fmt: skip

    def memory(self, when: str, before: float | None, available: float) -> None:
        vram = vram_mib()
        cache = self.server.get("/cache")["bytes"]["resident"] / 2**20 if self.server.name == OURS else None
        self.run.results.add(
            self.section, "memory", server=self.server.name, when=when, resident_mib=resident_mib(self.server.pid),
            vram_mib=None if vram is None or before is None else vram - before, ram_mib=available - available_mib(),
            cache_mib=cache,
        )  # fmt: skip

    def decode(self, conversation: Conversation) -> None:
        """Tokens per second of a reply, by the client's clock, the first token left out."""
        if not self.run.clock.fits(8):
            return self.run.results.skip(self.section, f"{self.server.name}: decode", "no time left")
        reply = self.server.ask([*conversation.messages, *_question()], N_DECODE, ignore_eos=True)
        n = reply.n_predicted
        rate = (n - 1) / reply.decode_ms * 1e3 if n > 1 and reply.decode_ms else None
        self.run.results.add(
            self.section, "decode", server=self.server.name, size=conversation.size, n=n, tokens_per_second=rate
        )


def _question() -> list[dict[str, str]]:
    return [{"role": "user", "content": "tell me more about that"}]


def _walk(nodes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for node in nodes:
        yield node
        yield from _walk(node["children"])


def side_by_side(run: Run, section: str, sizes: Sequence[int], *, thorough: bool) -> None:
    """Both servers, one after the other, through the same conversations.

    ``thorough`` adds a cold prompt of one message, prompts that pyctl does not cache, and llama-server after a restart,
    which knows nothing then and evaluates everything.
    """
    run.results.add(section, "flags", flags=" ".join(run.flags()))
    for name in (OURS, PEER):
        if name not in run.options.servers or (name == PEER and run.llama_server is None):
            continue
        if not run.clock.fits(run.loading + run.clock.prefill(sizes[-1])):
            run.results.skip(section, name, "no time left")
            continue
        with tempfile.TemporaryDirectory(prefix="cache-", dir=run.work) as directory:
            cache, log = Path(directory), run.work / f"{run.shape}-{section}-{name}.log"
            flags = ["-m", str(run.model), *run.flags()]
            server = pyctl(flags, cache, log) if name == OURS else llama_server(str(run.llama_server), flags, log)
            try:
                one_server(run, section, server, sizes, cache, thorough=thorough)
            except OSError as error:
                run.results.skip(section, name, f"failed: {str(error)[:200]}")
            finally:
                server.kill()


def one_server(run: Run, section: str, server: Server, sizes: Sequence[int], cache: Path, *, thorough: bool) -> None:
    vram, available = vram_mib(), available_mib()
    server.start()
    run.loading = server.load_seconds + 1
    print(f"    {run.clock.elapsed:6.1f} s  {server.name} loaded in {server.load_seconds:.1f} s", flush=True)
    visit = Visit(run, section, server)
    visit.memory("loaded", vram, available)
    # The first evaluation of a process also loads kernels, on both.
    server.ask(Conversation("warm", 1200).messages, N_FIRST)

    conversations = []
    for size in sizes:
        conversation = Conversation(f"{run.shape} a", size)
        if visit.follow(grow(conversation)):
            conversations.append(conversation)
    if not conversations:
        return
    if thorough:
        visit.follow(alternate(conversations, rounds=2))
        visit.decode(conversations[-1])
        visit.follow(cut(conversations[-1]))
    visit.follow(alternate(conversations[:1], rounds=1))
    visit.follow(cut(conversations[0]))
    if thorough:
        document = Conversation(f"{run.shape} document", sizes[-1], one_message=True)
        visit.follow(once(document, ONE_MESSAGE))
        for size in sizes if server.name == OURS else ():
            visit.follow(once(Conversation(f"{run.shape} b", size), BARE), cache_prompt=False)
    visit.memory("end", vram, available)
    if server.name == OURS:
        restart_ours(run, section, visit, conversations, cache)
    elif thorough and run.clock.fits(run.loading):
        server.kill()
        server.start()
        visit.follow(restarted(conversations, RESTART))


def restart_ours(run: Run, section: str, visit: Visit, conversations: Sequence[Conversation], cache: Path) -> None:
    """Kill and start again, once with the cache's files out of the page cache and once with them in it."""
    server, results = visit.server, run.results
    written = settle(cache)
    files: list[Path] = []
    for way in (RESTART, WARM_RESTART):
        if not run.clock.fits(run.loading + 3):
            results.skip(section, way, "no time left")
            return
        server.kill()
        files = [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > 2**16]
        share = None
        if way == RESTART:
            evict(files)
            share = cached_share(files)
        server.start()
        results.add(section, "restart", way=way, load_s=server.load_seconds, files_bytes=written, page_cache=share)
        for conversation in conversations:
            before = storage_reads(server.pid)
            if not visit.follow(restarted([conversation], way)):
                return
            last = results.records_of("first token")[-1]
            shape = SHAPES[run.shape]
            size = last["cached"] * shape.row_bytes() + shape.state_bytes
            results.add(
                section, "disk restore", way=way, size=conversation.size, bytes=size, restore_ms=last["restore_ms"],
                read=storage_reads(server.pid) - before, source=last["source"],
            )  # fmt: skip
        settle(cache)
    server.kill()
    for streams in STREAMS:
        if run.clock.fits(5):
            rate = direct_rate(files, streams)
            if rate is not None:
                results.add(section, "drive", streams=streams, gb_per_second=rate)


# -- the other sections ------------------------------------------------------------------------------------------------


def inside(run: Run, section: str, seconds: float, kind: str, command: str, sizes: Sequence[int]) -> None:
    """Run inside.py and keep each line it prints as a record."""
    if not run.clock.fits(seconds):
        return run.results.skip(section, section, "no time left")
    log = run.work / f"{run.shape}-{section}.log"
    arguments = [sys.executable, str(HERE / "inside.py"), command, str(run.model), *map(str, sizes)]
    with log.open("ab") as errors, subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"{"):
                run.results.add(section, kind, **json.loads(line))
                print(f"    {run.clock.elapsed:6.1f} s  {line.decode().strip()[:150]}", flush=True)
    if process.returncode != 0:
        run.results.skip(section, section, f"failed: {log.read_text(errors='replace')[-300:]}")


@contextmanager
def small_card(run: Run) -> Iterator[None]:
    """Leaves as much device memory as a card of 24 GB would have."""
    arguments = [sys.executable, str(HERE / "inside.py"), "ballast", str(CARD_MIB)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise OSError("the memory of the GPU could not be taken")
            yield
        finally:
            process.stdin.close()


def card(run: Run) -> None:
    """The long prompt and one more turn on what a 24 GB card has, q8_0 KV."""
    n = run.options.long
    if vram_mib() is None:
        return run.results.skip("card", "24 GB", "no GPU")
    if not run.clock.fits(run.loading + run.clock.prefill(n) + 5):
        return run.results.skip("card", "24 GB", "no time left")
    flags = run.flags("q8_0", max(run.options.ctx, 131_072))
    server = pyctl(["-m", str(run.model), *flags], None, run.work / f"{run.shape}-card.log")
    try:
        with small_card(run), closing(Conversation(run.shape, n).ask(COLD, n)) as steps:
            before = vram_mib() or 0.0
            server.start()
            step = next(steps)
            cold = server.ask(step.messages, N_FIRST)
            following = [*step.messages, {"role": "assistant", "content": cold.text}, *_question()]
            warm = server.ask(following, N_FIRST)
            run.results.add(
                "card", "small card", flags=" ".join(flags), limit_mib=CARD_MIB, vram_mib=(vram_mib() or 0.0) - before,
                prompt=cold.cached + cold.evaluated, first_ms=cold.first_ms, next_ms=warm.first_ms,
                next_evaluated=warm.evaluated,
            )  # fmt: skip
            server.kill()
    except OSError as error:
        run.results.skip("card", "24 GB", f"failed: {str(error)[:300]}")
    finally:
        server.kill()


def jobs(runs: Sequence[Run], only: Sequence[str]) -> list[tuple[str, Run, Callable[[Run], None]]]:
    """(section, model, what to do), the most telling first."""
    base, others = [], []
    for run in runs:
        options = run.options
        sizes, long = options.sizes, [options.long, min(2048, options.sizes[-1])]
        kv_sizes = [n // 512 * 512 for n in (min(options.sizes), max(options.sizes))]
        base.append(("base", run, lambda run, sizes=sizes: side_by_side(run, "base", sizes, thorough=True)))
        others += [
            ("kv", run, lambda run, sizes=kv_sizes: inside(run, "kv", 40, "copy", "kv", sizes)),
            ("long", run, lambda run, sizes=long: side_by_side(run, "long", sizes, thorough=False)),
            ("exact", run, lambda run: inside(run, "exact", 60, "exact", "exact", [run.options.exact_tokens])),
        ]
        if run is runs[0]:
            others.append(("card", run, card))
    others.sort(key=lambda job: SECTIONS.index(job[0]))
    return [job for job in [*base, *others] if job[0] in only]


def wait_for(model: Path, clock: Clock) -> bool:
    """Whether the model is there before time runs out; False at once if nobody writes it any more."""
    writer = model.with_suffix(".pid")
    while not model.exists():
        alive = writer.exists() and Path(f"/proc/{writer.read_text()}").exists()
        if not alive and not model.exists():
            return False
        if not clock.fits(20):
            return False
        time.sleep(0.5)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="what prepare.py was given")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--models", nargs="+", metavar="SHAPE", help="default: those that were prepared")
    parser.add_argument("--servers", nargs="+", choices=(OURS, PEER), default=(OURS, PEER))
    parser.add_argument("--sizes", type=int, nargs="+", default=[32768, 8192], help="conversations of base, tokens")
    parser.add_argument("--long", type=int, default=100_000, help="conversation of long and card, tokens")
    parser.add_argument("--ctx", type=int, default=120_000, help="-c of both servers")
    parser.add_argument("--exact-tokens", type=int, default=3000)
    parser.add_argument("--budget", type=float, default=3600, metavar="S", help="seconds, all in all")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results", metavar="DIR")
    parser.add_argument("--flags", default="", help="more flags for both servers, in one argument")
    options = parser.parse_args()
    options.flags = options.flags.split()
    prepared = json.loads((options.directory / "prepared.json").read_text(encoding="utf-8"))
    if any(os.environ.get(name) != value for name, value in prepared["environment"].items()):
        raise SystemExit(f"run this with {options.directory}/python")
    work = options.directory / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()

    began, header = time.monotonic(), describe()
    runs = []
    for shape in options.models or prepared["models"]:
        clock = Clock(began + options.budget, PREFILL.get(shape, 4000.0))
        results = Results(options.results, shape, header)
        runs.append(
            Run(shape, Path(prepared["models"][shape]), prepared["llama_server"], options, results, clock, work)
        )
    for section, run, work_on in jobs(runs, options.only):
        print(f"{run.clock.elapsed:8.1f} s  {run.shape}: {section}", flush=True)
        run.results.begin(section)
        if wait_for(run.model, run.clock):
            work_on(run)
        else:
            run.results.skip(section, section, "the model is not there")
    for run in runs:
        print(f"\n{run.shape}")
        for what, aim, found, reached in aims(run.results.records):
            print(f"  {'  ' if reached else '! '}{what}: {found} ({aim})")
    print(f"\n{time.monotonic() - began:.0f} s; tables in {options.results}")


if __name__ == "__main__":
    main()

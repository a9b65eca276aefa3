"""Switch between two models with conversations, pyctl next to llama-server's router; prepare.py has
run before.

    DIR/python -m bench.gpu.models DIR --sizes 8000 52000 --card
    DIR/python -m bench.gpu.models DIR --models tiny-hybrid tiny-dense --sizes 1500 --ctx 8192
    --switches 6 --no-card

One model is loaded at a time (--models-max 1). Ways, in this order:

    first      each size is a conversation with each model, whose file is in the page cache
    back       each gets another turn, --rounds times, so that every turn switches
    cold       the same with the models' files out of the page cache
    switches   --switches short turns at once, with the memory after each: it must stay flat

Columns: seconds to the first token by the client's clock, of which loading (pyctl's figure, of
llama-server it is what the prompt did not take), GB/s of the file in that time, tokens from the
cache, tokens evaluated. Steps that no longer fit --budget are left out and named. Findings go to
gpu-models.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bench.common import RESULTS
from bench.gpu.machine import describe, vram_mib
from bench.gpu.measure import PREFILL, small_card, wait_for
from bench.gpu.report import OURS, PEER
from bench.gpu.run import N_FIRST, Clock
from bench.gpu.servers import Reply, Server, llama_server, pyctl
from bench.gpu.workloads import Conversation
from pyctl.measure.process_stats import evict, resident_mib

Record = dict[str, Any]

WAYS = ("first", "back", "cold", "switches")

FIRST = "first time"
BACK = "another model and back"
COLD = "files not in RAM"

SETTLED = 3
"""Switches after which memory counts: both models have been there, and the first one again."""

SHORT = 300
"""Tokens of the text after a short turn."""

REST = 1.0
"""Seconds between two turns: no person is faster, and --models-patience is over by then."""


def preset(path: Path, models: dict[str, Path], options: argparse.Namespace) -> Path:
    """Write a preset file that both servers read; return its path."""
    keys = {"c": options.ctx, "ngl": 99, "ctk": options.kv, "ctv": options.kv, "np": 1, "fa": "on"}
    keys["load-mode"] = options.load_mode
    general = "".join(f"{key} = {value}\n" for key, value in keys.items())
    sections = "".join(f"[{name}]\nmodel = {file}\n" for name, file in models.items())
    path.write_text(f"version = 1\n[*]\n{general}{sections}", encoding="utf-8")
    return path


class Switching:
    """A server, and its conversations with each model until ``end``, monotonic seconds."""

    def __init__(
        self,
        server: Server,
        models: dict[str, Path],
        sizes: Sequence[int],
        end: float,
        found: list[Record],
    ) -> None:
        """Prepare a conversation of each of ``sizes`` tokens with each model. ``end`` is in
        monotonic seconds; records are appended to ``found``.
        """
        self.server = server
        self.models = models
        self._found = found
        self._talks = {
            (shape, size): Conversation(f"{shape} switch", size)
            for size in sizes
            for shape in models
        }
        rates = {shape: PREFILL.get(shape.removesuffix("-nextn"), 4000.0) for shape in models}
        self._clocks = {shape: Clock(end, rate) for shape, rate in rates.items()}
        self._loading = 15.0

    def turns(self, way: str, *, files: Sequence[Path] = ()) -> None:
        """Send another message in each conversation, each with another model than the one
        before.
        """
        for (shape, size), talk in self._talks.items():
            is_new = len(talk.messages) == talk.opened
            n_new = size if is_new or self.server.name == PEER else 2 * SHORT
            clock = self._clocks[shape]
            if not clock.fits(clock.prefill(n_new) + self._loading * (3 if files else 1)):
                self._leave_out(f"{way}: {shape}, {size:,}")
                continue
            if files:
                evict(files)
            steps = talk.ask(way, 0) if is_new else talk.turn(way)
            messages = next(steps).messages
            time.sleep(REST)
            reply = self.server.request(messages, N_FIRST, model=shape)
            self._note(way, shape, size, reply)
            try:
                steps.send(reply.text)
            except StopIteration:
                continue

    def short(self, n: int) -> None:
        """Send ``n`` requests that switch the model after a short text."""
        seen: list[Record] = []
        shapes = list(self.models)
        clock = self._clocks[shapes[0]]
        for index in range(n):
            if not clock.fits(self._loading + 1):
                self._leave_out(f"{n - index} of {n} switches")
                break
            began = time.monotonic()
            self.server.request(
                Conversation("short", SHORT).messages, 2, model=shapes[index % len(shapes)]
            )
            took = time.monotonic() - began
            vram = vram_mib()
            resident = sum(resident_mib(pid) for pid in family(self.server.pid))
            seen.append({"seconds": took, "vram_mib": vram, "resident_mib": resident})
        record = {"server": self.server.name, "way": f"{len(seen)} switches", "switches": seen}
        self._found.append(record)
        print(line(record), flush=True)

    def _leave_out(self, what: str) -> None:
        self._found.append({"server": self.server.name, "way": f"left out, no time: {what}"})
        print(line(self._found[-1]), flush=True)

    def _note(self, way: str, shape: str, size: int, reply: Reply) -> None:
        """Record and print one reply: seconds to the first token, of the load and of the prompt,
        and GB/s of the load. A server that does not report its load is charged with the time before
        the prompt.
        """
        prompt_ms = float(reply.timings["prompt_ms"])
        load_s = self._load_seconds(shape) or max(reply.first_ms - prompt_ms, 0.0) / 1e3
        record = {
            "server": self.server.name,
            "way": way,
            "model": shape,
            "size": size,
            "first_s": reply.first_ms / 1e3,
            "load_s": load_s,
            "load_rate": self.models[shape].stat().st_size / load_s / 1e9 if load_s else None,
            "prompt_s": prompt_ms / 1e3,
            "source": reply.timings.get("source", ""),
            "cached": reply.cached,
            "evaluated": reply.evaluated,
        }
        self._clocks[shape].learn(reply.evaluated, prompt_ms / 1e3)
        self._loading = max(load_s, 1.0) if way != COLD else self._loading
        self._found.append(record)
        print(line(record), flush=True)

    def _load_seconds(self, shape: str) -> float:
        listed = self.server.get("/v1/models")["data"]
        return float(next(each.get("load_seconds", 0.0) for each in listed if each["id"] == shape))


def family(pid: int) -> list[int]:
    """Return the process and all below it: llama-server's router has one for each model."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            found += [int(child) for child in task.read_text(encoding="ascii").split()]
    return found


def line(record: Record) -> str:
    """Return a row of the table."""
    head = f"{record['server']:12} {record['way']:22}"
    if "switches" in record:
        return f"{head} {flatness(record['switches'])}"
    if "model" not in record:
        return head
    seconds = " ".join(
        f"{record[name]:8.2f}" for name in ("first_s", "load_s", "load_rate", "prompt_s")
    )
    counts = f"{record['cached']:8,} {record['evaluated']:8,} {record['source']}"
    return f"{head} {record['model']:12} {record['size']:8,} {seconds} {counts}"


def flatness(switches: Sequence[Record]) -> str:
    """Return in words the range and the growth of memory while the same model was loaded."""
    said = []
    for name, what in (("vram_mib", "MiB of the GPU"), ("resident_mib", "MiB resident")):
        sizes = [each[name] for each in switches[SETTLED:] if each[name] is not None]
        grown = [after - before for before, after in zip(sizes, sizes[2:], strict=False)]
        if sizes:
            said.append(
                f"{min(sizes):,.0f} to {max(sizes):,.0f} {what}, {sum(grown) / 2:+,.0f} in all"
            )
    seconds = sorted(each["seconds"] for each in switches)
    return "; ".join([*said, f"{seconds[len(seconds) // 2]:.2f} s each" if seconds else "none"])


@contextmanager
def running(server: Server, *, small: bool) -> Iterator[None]:
    """Run the server, on a card of 24 GB if ``small``."""
    with ExitStack() as stack:
        if small:
            stack.enter_context(small_card())
        server.start()
        try:
            yield
        finally:
            server.kill()


def measure(
    name: str, peer: str, models: dict[str, Path], options: argparse.Namespace, work: Path
) -> list[Record]:
    """Return all findings of one server; up to a failure if it fails."""
    found: list[Record] = []
    file = preset(work / "models.ini", models, options)
    flags = ["--models-preset", str(file), "--models-max", "1"]
    with tempfile.TemporaryDirectory(prefix="cache-", dir=work) as directory:
        log = work / f"models-{name}.log"
        ours = name == OURS
        server = pyctl(flags, Path(directory), log) if ours else llama_server(peer, flags, log)
        switching = Switching(server, models, options.sizes, options.end, found)
        try:
            with running(server, small=options.card):
                if {"first", "back", "cold"} & {*options.ways}:
                    switching.turns(FIRST)
                for _ in range(options.rounds if "back" in options.ways else 0):
                    switching.turns(BACK)
                if "cold" in options.ways:
                    switching.turns(COLD, files=list(models.values()))
                if "switches" in options.ways:
                    switching.short(options.switches)
        except (OSError, HTTPException, ValueError) as error:
            found.append({"server": name, "way": f"failed: {error}"[:200]})
            print(line(found[-1]), flush=True)
    return found


def keep(path: Path, found: list[Record]) -> None:
    """Write the findings and their head."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"machine": describe("random"), "found": found}, indent=1) + "\n",
        encoding="utf-8",
    )


def main() -> None:
    """Measure switches between two models on each server; print a row per request, and keep them in
    the results. SystemExit if a model's file does not arrive in the time.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="the directory of prepare.py")
    parser.add_argument("--models", nargs=2, default=["27b", "35b-a3b"], metavar="SHAPE")
    parser.add_argument("--servers", nargs="+", choices=(OURS, PEER), default=(OURS, PEER))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[8000, 52_000], help="conversations, tokens"
    )
    parser.add_argument("--ctx", type=int, default=65_536, help="-c of both models")
    parser.add_argument("--kv", default="q8_0", help="-ctk and -ctv of both models")
    parser.add_argument(
        "--load-mode", default="auto", help="of both servers: auto, mmap, none or dio"
    )
    parser.add_argument("--rounds", type=int, default=1, help="turns of each conversation")
    parser.add_argument("--switches", type=int, default=50, help="short ones at the end")
    parser.add_argument(
        "--card", action=argparse.BooleanOptionalAction, default=True, help="leave what 24 GB have"
    )
    parser.add_argument(
        "--budget", type=float, default=540, metavar="S", help="seconds, all in all"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    prepared = json.loads((options.directory / "prepared.json").read_text(encoding="utf-8"))
    work = options.directory / "work-models"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    models = {shape: Path(prepared["models"][shape]) for shape in options.models}
    began = time.monotonic()
    options.end = began + options.budget
    if not all(wait_for(file, Clock(options.end, 4000.0)) for file in models.values()):
        raise SystemExit("a model is not there")
    for file in models.values():
        warm(file)
    print(
        f"{time.monotonic() - began:.0f} s: the models' files are there and in the page cache",
        flush=True,
    )
    found: list[Record] = []
    for name in options.servers:
        if name == OURS or prepared["llama_server"]:
            found += measure(name, str(prepared["llama_server"]), models, options, work)
    keep(options.results / "gpu-models.json", found)
    names = (
        f"{'server':12} {'way':22} {'model':12} {'tokens':>8} {'first s':>8} {'load s':>8} "
        f"{'GB/s':>8} {'prompt s':>8}"
    )
    print(f"\n{names} {'cached':>8} {'new':>8}")
    for record in found:
        print(line(record))
    print(f"{time.monotonic() - began:.0f} s")


def warm(path: Path) -> None:
    """Have the file in the page cache, as one that was used before."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(16 * 2**20)
        while file.readinto(buffer):
            pass


if __name__ == "__main__":
    main()

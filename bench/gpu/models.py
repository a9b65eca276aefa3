"""Switch between two models behind conversations, pyctl beside llama-server's router; prepare.py has run before.

    DIR/python -m bench.gpu.models DIR --sizes 8000 52000 --card
    DIR/python -m bench.gpu.models DIR --models tiny-hybrid tiny-dense --sizes 1500 --ctx 8192 --switches 6 --no-card

One model is loaded at a time (--models-max 1). Each size is a conversation with each model; then each gets another
turn, so that every turn switches. Columns: seconds to the first token by the client's clock, of which loading (pyctl
says it, of llama-server it is what the prompt did not take), tokens from the cache, tokens evaluated. The last turn
finds the models' files out of the page cache. Then --switches short turns: memory must stay flat. Findings go to
gpu-models.json, and the table is printed.
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
from bench.gpu.measure import small_card, wait_for
from bench.gpu.report import OURS, PEER
from bench.gpu.run import N_FIRST, Clock
from bench.gpu.servers import Reply, Server, llama_server, pyctl
from bench.gpu.workloads import Conversation
from pyctl.measure.observed import evict, resident_mib

Record = dict[str, Any]


def preset(path: Path, models: dict[str, Path], options: argparse.Namespace) -> Path:
    """A preset file that both servers read."""
    keys = {"c": options.ctx, "ngl": 99, "ctk": options.kv, "ctv": options.kv, "np": 1, "fa": "on"}
    general = "".join(f"{key} = {value}\n" for key, value in keys.items())
    sections = "".join(f"[{name}]\nmodel = {file}\n" for name, file in models.items())
    path.write_text(f"version = 1\n[*]\n{general}{sections}", encoding="utf-8")
    return path


class Switching:
    """One server, and the conversations that it has with each model."""

    def __init__(self, server: Server, shapes: Sequence[str], sizes: Sequence[int], found: list[Record]) -> None:
        self.server, self.shapes, self._found = server, shapes, found
        self._talks = {(shape, size): Conversation(f"{shape} switch", size) for size in sizes for shape in shapes}

    def turns(self, way: str, *, files: Sequence[Path] = ()) -> None:
        """Another message in each conversation, each with another model than the one before."""
        for (shape, size), talk in self._talks.items():
            if files:
                evict(files)
            steps = talk.turn(way) if len(talk.messages) > talk.opened else talk.ask(way, 0)
            step = next(steps)
            reply = self.server.ask(step.messages, N_FIRST, model=shape)
            self._note(way, shape, size, reply)
            try:
                steps.send(reply.text)
            except StopIteration:
                continue

    def short(self, n: int) -> None:
        """``n`` switches behind a short text."""
        for index in range(n):
            self.server.ask(Conversation("short", 300).messages, 2, model=self.shapes[index % len(self.shapes)])
            if index in (3, n - 1):
                memory = {"vram_mib": vram_mib(), "resident_mib": resident_mib(self.server.pid)}
                self._found.append({"server": self.server.name, "way": f"after {index + 1} switches", **memory})

    def _note(self, way: str, shape: str, size: int, reply: Reply) -> None:
        prompt_ms = float(reply.timings["prompt_ms"])
        record = {
            "server": self.server.name,
            "way": way,
            "model": shape,
            "size": size,
            "first_s": reply.first_ms / 1e3,
            "load_s": self._load_seconds(shape) or max(reply.first_ms - prompt_ms, 0.0) / 1e3,
            "prompt_s": prompt_ms / 1e3,
            "source": reply.timings.get("source", ""),
            "cached": reply.cached,
            "evaluated": reply.evaluated,
        }
        self._found.append(record)
        print(line(record), flush=True)

    def _load_seconds(self, shape: str) -> float:
        listed = self.server.get("/v1/models")["data"]
        return float(next(each.get("load_seconds", 0.0) for each in listed if each["id"] == shape))


def line(record: Record) -> str:
    """A row of the table."""
    if "model" not in record:
        vram = "?" if record["vram_mib"] is None else f"{record['vram_mib']:,.0f}"
        text = f"{vram} MiB of the GPU, {record['resident_mib']:,.0f} MiB resident"
        return f"{record['server']:12} {record['way']:22} {text}"
    seconds = " ".join(f"{record[name]:8.2f}" for name in ("first_s", "load_s", "prompt_s"))
    counts = f"{record['cached']:8,} {record['evaluated']:8,} {record['source']}"
    return f"{record['server']:12} {record['way']:22} {record['model']:12} {record['size']:8,} {seconds} {counts}"


@contextmanager
def running(server: Server, *, small: bool) -> Iterator[None]:
    """The server, on a card of 24 GB if ``small``."""
    with ExitStack() as stack:
        if small:
            stack.enter_context(small_card(None))  # type: ignore[arg-type]  # which it does not use
        server.start()
        try:
            yield
        finally:
            server.kill()


def measure(name: str, peer: str, models: dict[str, Path], options: argparse.Namespace, work: Path) -> list[Record]:
    """All findings of one server; those up to a failure if it fails."""
    found: list[Record] = []
    file = preset(work / "models.ini", models, options)
    flags = ["--models-preset", str(file), "--models-max", "1"]
    with tempfile.TemporaryDirectory(prefix="cache-", dir=work) as directory:
        log = work / f"models-{name}.log"
        ours = name == OURS
        server = pyctl(flags, Path(directory), log) if ours else llama_server(peer, flags, log)
        switching = Switching(server, list(models), options.sizes, found)
        try:
            with running(server, small=options.card):
                switching.turns("first time")
                for _ in range(options.rounds):
                    switching.turns("another model and back")
                switching.turns("files not in RAM", files=list(models.values()))
                switching.short(options.switches)
        except (OSError, HTTPException, ValueError) as error:
            found.append({"server": name, "way": f"failed: {error}"[:200], "vram_mib": None, "resident_mib": 0.0})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="what prepare.py was given")
    parser.add_argument("--models", nargs=2, default=["27b", "35b-a3b"], metavar="SHAPE")
    parser.add_argument("--servers", nargs="+", choices=(OURS, PEER), default=(OURS, PEER))
    parser.add_argument("--sizes", type=int, nargs="+", default=[8000, 52_000], help="conversations, tokens")
    parser.add_argument("--ctx", type=int, default=65_536, help="-c of both models")
    parser.add_argument("--kv", default="q8_0", help="-ctk and -ctv of both models")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each conversation")
    parser.add_argument("--switches", type=int, default=50, help="short ones at the end")
    parser.add_argument("--card", action=argparse.BooleanOptionalAction, default=True, help="leave what 24 GB have")
    parser.add_argument("--budget", type=float, default=540, metavar="S", help="seconds to wait for the models' files")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    prepared = json.loads((options.directory / "prepared.json").read_text(encoding="utf-8"))
    work = options.directory / "work-models"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    models = {shape: Path(prepared["models"][shape]) for shape in options.models}
    clock = Clock(time.monotonic() + options.budget, 4000.0)
    if not all(wait_for(file, clock) for file in models.values()):
        raise SystemExit("a model is not there")
    found: list[Record] = []
    for name in options.servers:
        if name == OURS or prepared["llama_server"]:
            found += measure(name, str(prepared["llama_server"]), models, options, work)
    options.results.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": describe(), "found": found}, indent=1)
    (options.results / "gpu-models.json").write_text(text + "\n", encoding="utf-8")
    names = f"{'server':12} {'way':22} {'model':12} {'tokens':>8} {'first s':>8} {'load s':>8} {'prompt s':>8}"
    print(f"\n{names} {'cached':>8} {'new':>8}")
    for record in found:
        print(line(record))


if __name__ == "__main__":
    main()

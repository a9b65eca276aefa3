"""One model alone: `pyctl serve -m MODEL` of two checkouts in turn; prepare.py has run before.

    DIR/python -m bench.gpu.alone DIR --against CHECKOUT [--models 27b-nextn 35b-a3b-nextn] [--size 8000] [--rounds 2]

Seconds until the server answers, to the first token of a new conversation, of its next turn and of a return to it, and
tokens a second of a reply: medians of all rounds, there and here. A CHECKOUT without a built extension uses this one's,
if its csrc is the same.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from bench.common import show, shown
from bench.compare import HERE
from bench.gpu.machine import vram_mib
from bench.gpu.measure import small_card
from bench.gpu.run import N_DECODE, N_FIRST, QUESTION
from bench.gpu.servers import pyctl
from bench.gpu.workloads import Conversation
from pyctl.measure.observed import resident_mib
from pyctl.module_command import module_command

FIGURES = ("start s", "first s", "next s", "back s", "tokens/s", "MiB of the GPU", "MiB resident")


def program_of(tree: Path) -> tuple[str, ...]:
    """What runs pyctl of ``tree``, with this one's extension if it has none; SystemExit if that cannot be."""
    if not any((tree / "pyctl").glob("_core*.so")):
        same = filecmp.dircmp(HERE / "csrc", tree / "csrc")
        if same.diff_files or same.left_only or same.right_only:
            raise SystemExit(f"{tree} has no built extension, and another csrc than {HERE}")
        for path in (HERE / "pyctl").glob("_core*.so"):
            shutil.copy2(path, tree / "pyctl")
    own = tree / ".venv" / "bin" / "python"
    program = module_command("pyctl", str(own) if own.exists() else "", (str(tree),))
    shown = subprocess.run(
        [program[0], "-c", "import pyctl; print(pyctl.__file__)"], cwd=tree, capture_output=True, text=True, check=False
    )
    if Path(shown.stdout.strip()).parent != tree / "pyctl":
        raise SystemExit(f"{tree} was to be measured, not {shown.stdout.strip()}: run `make install` there")
    return (*program, "serve")


def visit(program: tuple[str, ...], model: Path, options: argparse.Namespace, work: Path) -> list[float]:
    """The figures of one server."""
    flags = ["-m", str(model), "-c", str(options.ctx), "-ngl", "99", "-fa", "on", *options.flags.split()]
    with tempfile.TemporaryDirectory(prefix="cache-", dir=work) as directory:
        server = pyctl(flags, Path(directory), work / "alone.log", program)
        before = vram_mib()
        server.start()
        try:
            server.ask(Conversation("warm", 1200).messages, N_FIRST)
            talks = [Conversation(f"alone {number}", options.size) for number in range(2)]
            found = [server.load_seconds]
            for way in ("ask", "turn", "other", "turn"):
                talk = talks[way == "other"]
                steps = talk.turn("") if way == "turn" else talk.ask("", 0)
                reply = server.ask(next(steps).messages, N_FIRST)
                found += [reply.first_ms / 1e3] * (way != "other")
                try:
                    steps.send(reply.text)
                except StopIteration:
                    continue
            found.append(server.ask([*talks[0].messages, QUESTION], N_DECODE, ignore_eos=True).rate or 0.0)
            return [*found, (vram_mib() or 0.0) - (before or 0.0), resident_mib(server.pid)]
        finally:
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="what prepare.py was given")
    parser.add_argument("--against", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--models", nargs="+", default=["27b"], metavar="SHAPE")
    parser.add_argument("--size", type=int, default=8000, help="tokens of a conversation")
    parser.add_argument("--ctx", type=int, default=32_768, help="-c of the server")
    parser.add_argument("--flags", default="-ctk q8_0 -ctv q8_0", help="more flags of the server, in one argument")
    parser.add_argument("--rounds", type=int, default=2, help="servers of each checkout")
    parser.add_argument("--card", action=argparse.BooleanOptionalAction, default=True, help="leave what 24 GB have")
    options = parser.parse_args()
    prepared = json.loads((options.directory / "prepared.json").read_text(encoding="utf-8"))
    there = options.against.resolve()
    programs = {tree: program_of(tree) for tree in (there, HERE)}
    began = time.monotonic()
    for shape in options.models:
        runs: dict[Path, list[list[float]]] = {there: [], HERE: []}
        with small_card(None) if options.card else tempfile.TemporaryDirectory() as _:  # type: ignore[arg-type]
            for turn in range(options.rounds):
                for tree in (HERE, there) if turn % 2 else (there, HERE):
                    found = visit(programs[tree], Path(prepared["models"][shape]), options, options.directory)
                    runs[tree].append(found)
                    print(
                        f"{tree}: {', '.join(f'{n}: {shown(x)}' for n, x in zip(FIGURES, found, strict=True))}",
                        flush=True,
                    )
        medians = {tree: [statistics.median(each) for each in zip(*rows, strict=True)] for tree, rows in runs.items()}
        rows = [
            [name, shown(old), shown(new), f"{new / old:.3f}" if old else ""]
            for name, old, new in zip(FIGURES, medians[there], medians[HERE], strict=True)
        ]
        show(f"{shape} alone, {time.monotonic() - began:.0f} s", ["", "there", "here", "here / there"], rows)


if __name__ == "__main__":
    main()

"""A soak on a full card: two models in turn, kills, images, drafts, and another program that takes
the memory.

    DIR/python -m bench.gpu.soak DIR --models tiny-hybrid-nextn tiny-dense  # DIR: see prepare.py
    DIR/python -m bench.gpu.soak DIR --models 27b-nextn 35b-a3b --seed 7
    python -m bench.gpu.soak DIR --no-card --minutes 2                       # on a CPU

The server has what a card of 24 GB has left, for small models less (--left), and meanwhile another
program takes and gives memory. Its models are behind one address, one at a time (--models-max 1). A
model of which DIR has an encoder (VISION_SHAPES) gets images; one with a head drafts by it, others
by n-grams and the cache. Greedy replies are compared with a second server's, which has the model
alone: one sequence, no cache, no drafts, the same device and flags.

Wrong is what `bench.soak` names, but for lack of memory: then a request may fail with an error that
names it, and the server may end with exit code 1 when it has said why, with the cache written.
Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import httpx

from bench.common import parse, parser_of
from bench.cuda import MIB, Device, open_device
from bench.gpu.images import bitmap
from bench.gpu.machine import vram_mib
from bench.gpu.measure import CARD_MIB, small_card
from bench.soak.findings import Findings
from bench.soak.hostile import Attacker
from bench.soak.judge import TIE, Judge
from bench.soak.talk import CHAT, Talker
from bench.soak.target import (
    LONG,
    REST_SECONDS,
    Bounds,
    Target,
    add_soak,
    beside,
    report,
    short_lives,
    verify,
)
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from tools.generator import VISION_SHAPES

KINDS = ("neighbour", "kills", "images", "drafts", "vanish")

NO_MEMORY = re.compile(
    r"out of memory|allocation failed|failed to allocate|unable to allocate|does not fit"
    r"|are free|too large for",
    re.I,
)
"""Words of errors for lack of memory, of the library and of pyctl."""

PICTURES = ((64, 64), (320, 256), (256, 320))
"""Pixels of images."""

GPU_TIE = 0.3
"""`TIE` on a GPU: cold replies of tiny-hybrid-nextn alone, in company and with --exact differ by up
to 0.26.
"""

ONCE_MIB = 448
"""MiB that a server takes of the device once: rests of two lives had 1,282, then 1,698, and 1,696
twice.
"""

SLACKS = (0, 4, 32, 256)
"""MiB that the other program leaves, so that an allocation fails at once, or a later one."""


class Served(NamedTuple):
    """A model, and its own parts: an encoder of images, and a type of drafts."""

    name: str
    file: Path
    encoder: Path | None
    drafts: str

    @property
    def flags(self) -> list[str]:
        """The flags that the judge of the model shares."""
        return ["-m", str(self.file), *(["--mmproj", str(self.encoder)] if self.encoder else [])]


class Neighbour:
    """Another program on the card, and at rests the look at the memory that the server holds."""

    def __init__(self, target: Target, name: str, seed: int, growth_mib: float) -> None:
        self.target = target
        self.name = name
        self.growth_mib = growth_mib
        self.random = random.Random(seed)
        self.before = vram_mib()
        self.rests: dict[int, list[float]] = {}

    def run(self) -> None:
        """Take memory of the device again and again until the soak is over."""
        device = open_device()
        while not self.target.over.wait(self.random.uniform(0.1, 4)):
            if self.target.is_resting:
                self._rest(self.target.life)
            elif device is not None:
                self._take(device)

    def _take(self, device: Device) -> None:
        """Take some pieces, one after the other, the last of them almost all that is left."""
        with ExitStack() as held, suppress(OSError):  # another may have been faster
            for number in range(n := self.random.randint(1, 5)):
                share = self.random.uniform(0.1, 0.9) if number < n - 1 else 1.0
                size = int(device.free() * share) - self.random.choice(SLACKS) * MIB
                if size > 0:
                    held.enter_context(device.memory(size))
                    self.target.findings.count("pieces that another program took")
                if self.target.over.wait(self.random.uniform(0, 0.6)) or self.target.is_resting:
                    return

    def _rest(self, life: int) -> None:
        """Have the first model loaded, and compare the memory with the last rest's."""
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": "rest"}],
            "max_tokens": 1,
        }
        with suppress(httpx.TransportError):
            httpx.post(f"{self.target.url}{CHAT}", json=body, timeout=REST_SECONDS / 2)
        end = time.monotonic() + REST_SECONDS
        used = vram_mib()
        while self.target.is_resting and time.monotonic() < end and not self.target.over.wait(0.2):
            used = vram_mib()
        if self.before is None or used is None:
            return
        rests = self.rests.setdefault(life, [])
        rests.append(used - self.before)
        if rests[-1] - rests[0] > ONCE_MIB + self.growth_mib:
            self.target.findings.violate(f"life {life}: device memory at rests: {rests} MiB")


def served(options: argparse.Namespace) -> list[Served]:
    """Return the models of the options, or the first two of the directory. SystemExit if one is not
    there.
    """
    prepared = json.loads((options.directory / "prepared.json").read_text(encoding="utf-8"))[
        "models"
    ]
    names = options.models or [name for name in prepared if name not in VISION_SHAPES][:2]
    found = []
    for name in names:
        if name not in prepared or not Path(prepared[name]).exists():
            raise SystemExit(f"{options.directory} has no model {name}")
        file = Path(prepared[name])
        plain = name.removesuffix("-nextn")
        shape = "tiny-vision" if plain in ("tiny-hybrid", "tiny-moe") else f"vision-{plain}"
        encoder = Path(prepared.get(shape, file.with_name(f"{shape}.gguf")))
        drafts = "draft-mtp,cache" if name.endswith("-nextn") else "ngram-mod,cache"
        is_seen = "images" in options.kinds and encoder.exists()
        found.append(
            Served(
                name,
                file,
                encoder if is_seen else None,
                drafts if "drafts" in options.kinds else "none",
            )
        )
    if "images" in options.kinds and not any(model.encoder for model in found):
        print(
            f"no images: {options.directory} has no encoder of these models "
            "(tiny-vision, vision-NAME)"
        )
    return found


def preset(path: Path, models: Sequence[Served]) -> Path:
    """Write the file of --models-preset; return its path."""
    sections = []
    for model in models:
        lines = [f"[{model.name}]", f"model = {model.file}", f"spec-type = {model.drafts}"]
        sections += [*lines, f"mmproj = {model.encoder}"] if model.encoder else lines
    path.write_text("\n".join(["version = 1", *sections, ""]), encoding="utf-8")
    return path


def talkers_of(
    target: Target, models: Sequence[Served], judges: Sequence[Judge], options: argparse.Namespace
) -> list[Talker]:
    """Return clients, each of one of the models."""
    maximum = min(3 * options.context // (2 * options.clients), options.context // 4)
    rng = random.Random(options.seed)
    found = []
    for number in range(options.clients):
        model = models[number % len(models)]
        judge = judges[number % len(models)]
        talker = Talker(target, judge, target.findings, rng.randrange(2**32), maximum)
        talker.named = {"model": model.name}
        if model.encoder:
            files = [
                base64.b64encode(bitmap(*size, seed)).decode() for seed, size in enumerate(PICTURES)
            ]
            talker.pictures = [f"data:image/bmp;base64,{file}" for file in files]
        found.append(talker)
    return found


def lives(target: Target, options: argparse.Namespace, cache: Path) -> None:
    """Run two long lives, and between them short ones that are killed or stopped."""
    rng = random.Random(options.seed)
    seconds = options.minutes * 60
    disk = [
        "--kv-cache-dir",
        str(cache),
        "--kv-cache-budget",
        "2048",
        "--kv-cache-min-tokens",
        "128",
    ]
    target.live("long, disk", seconds * LONG, "stop", disk)
    if "kills" in options.kinds:
        flags: tuple[list[str], ...] = ([], ["--exact"], ["--disk-prefix-cache", "full"])
        short_lives(
            target,
            rng,
            seconds * (1 - 2 * LONG),
            lambda: ("short, disk", [*disk, *rng.choice(flags)]),
        )
    target.live("long, disk, exact", seconds * LONG, "stop", [*disk, "--exact"])


def soak(options: argparse.Namespace, directory: Path) -> tuple[Target, Neighbour]:
    """Run it in ``directory``."""
    models = served(options)
    flags = shlex.split(options.flags)
    flags += ["-c", str(options.context)]
    alone = ["-np", "1", "--cache-ram", "0", "--no-cache-prompt", "--spec-type", "none"]
    with ExitStack() as stack:
        judges = []
        for model in models:
            log = directory / f"judge-{model.name}.log"
            other = ServerProcess([*PYCTL_SERVE, *model.flags, *flags, *alone], log, timeout=300)
            judges.append(Judge(stack.enter_context(other).url, GPU_TIE if options.card else TIE))
            stack.callback(judges[-1].close)
        if options.card:
            largest = max(model.file.stat().st_size for model in models) // MIB
            stack.enter_context(small_card(options.left or min(CARD_MIB, largest * 3 // 2 + 3000)))
        command = [
            *PYCTL_SERVE,
            "--models-preset",
            str(preset(directory / "models.ini", models)),
            "--models-max",
            "1",
        ]
        command += [
            *flags,
            "-np",
            str(options.parallel),
            "--cache-ram",
            str(options.cache_ram),
            "--metrics",
        ]
        target = Target(command, directory, Findings(), Bounds(options.growth_limit, 0))
        target.excuse = NO_MEMORY
        neighbour = Neighbour(target, models[0].name, options.seed, options.growth_limit)
        talkers = talkers_of(target, models, judges, options)
        attacker = Attacker(target, target.findings, talkers, options.seed, options.growth_limit)
        work: list[Callable[[], None]] = [target.healthy, *(talker.run for talker in talkers)]
        work += [neighbour.run] if options.card and "neighbour" in options.kinds else []
        work += [attacker.vanish] if "vanish" in options.kinds else []
        beside(work, target, lambda: lives(target, options, directory / "cache"))
    verify(directory / "cache", target.findings)
    text = target.log.read_text(encoding="utf-8", errors="replace")
    target.findings.count("switches", len(re.findall(r"switched to \S+ in ", text)))
    target.findings.count("lives", target.life)
    return target, neighbour


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables; exit with 1 if anything is wrong."""
    parser = parser_of(__doc__, keep=False)
    parser.add_argument("directory", type=Path, help="the directory of prepare.py")
    parser.add_argument(
        "--models", nargs="+", metavar="SHAPE", help="default: the first two that are prepared"
    )
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(10**6),
        help="default: a new one",
    )
    parser.add_argument("--context", type=int, default=16384, help="cells of each model")
    add_soak(parser, KINDS, 512, 256.0)
    parser.add_argument(
        "--flags", default="-ngl 99 -fa on", help="more flags for all servers, in one string"
    )
    parser.add_argument(
        "--card", action=argparse.BooleanOptionalAction, default=True, help="leave --left of memory"
    )
    parser.add_argument(
        "--left", type=int, metavar="MiB", help="memory of the card; default: by the larger model"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep the logs and the cache there"
    )
    options = parse(parser, argv, minutes=0.4, clients=4, context=4096, growth_limit=1000.0)
    options.kinds = [kind for kind in KINDS if kind not in options.without]
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        work = options.work or Path(directory)
        work.mkdir(parents=True, exist_ok=True)
        target, neighbour = soak(options, work)
    rests = [
        [f"MiB of the device at rests, life {life}", each] for life, each in neighbour.rests.items()
    ]
    report(
        target, f"A soak on a full card, {options.minutes:g} minutes, seed {options.seed}", rests
    )


if __name__ == "__main__":
    main()

"""A soak: one server, `-np 4`, under everything at once; exits with 1 if anything is wrong.

    python -m bench.soak --minutes 30 --seed 7 --keep
    python -m bench.soak -m model.gguf --flags "-ngl 99 -ctk q8_0" --context 16384 --minutes 5
    --resident-limit 12000

Clients hold conversations that together have three times the cells of the context, through all
APIs, with tools, schemas and several choices. Other clients disconnect in the middle, send hostile
bodies, or keep connections open. An operator saves, restores, pins and clears. The server has three
long lives: without a cache directory, with one, and with --exact as well, whose replies must be the
judge's to the bit. Between them it is stopped and killed.

The soak reports as wrong: a 500; a greedy reply that differs from a second server's (one sequence,
no cache, one request at a time); a slow refusal; memory that grows from one pause without requests
to the next; threads or files that grow after the first third of a life; a log that grows faster
than requests; an unexpected exit code; a connection that breaks while the server lives. Where two
tokens are nearly as likely, a batch with other sequences may choose either; such replies are
counted.
"""

from __future__ import annotations

import argparse
import random
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.common import add_model, parse, parser_of
from bench.soak.findings import Findings
from bench.soak.hostile import Attacker, corpus
from bench.soak.judge import Judge
from bench.soak.talk import Talker
from bench.soak.target import LONG, Bounds, Target, add_soak, beside, report, short_lives, verify
from bench.soak.upkeep import Operator
from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess

KINDS = ("grammars", "schemas", "counts", "json", "paths", "idle", "vanish", "operator", "kills")


def command_of(options: argparse.Namespace) -> list[str]:
    """Return the flags of a server, without those under test."""
    model = ["-m", options.model] if options.model else []
    return [*PYCTL_SERVE, *model, "-t", str(options.threads), *shlex.split(options.flags)]


def soak(options: argparse.Namespace, directory: Path) -> Target:
    """Run it in ``directory``."""
    rng = random.Random(options.seed)
    findings = Findings()
    (directory / "slots").mkdir()
    flags = [
        "-np",
        str(options.parallel),
        "-c",
        str(options.context),
        "--cache-ram",
        str(options.cache_ram),
    ]
    flags += ["--metrics", "--slot-save-path", str(directory / "slots")]
    n_files = (
        Bounds.n_files if options.minutes >= 1 else 64
    )  # in lives of seconds, clients still connect
    bounds = Bounds(options.growth_limit, options.resident_limit, n_files=n_files)
    target = Target([*command_of(options), *flags], directory, findings, bounds)
    # One conversation after the other fits into the judge's context with its reply.
    alone = [
        "-np",
        "1",
        "-c",
        str(options.context),
        "--cache-ram",
        "0",
        "--no-cache-prompt",
        "--exact",
    ]
    with ServerProcess(
        [*command_of(options), *alone], directory / "judge.log", timeout=300
    ) as other:
        judge = Judge(other.url, is_exact=True)
        maximum = 3 * options.context // (2 * options.clients)
        talkers = [
            Talker(target, judge, findings, rng.randrange(2**32), maximum)
            for _ in range(options.clients)
        ]
        attacker = Attacker(target, findings, talkers, rng.randrange(2**32), options.patience)
        operator = Operator(target, findings, rng.randrange(2**32), options.parallel)
        bodies = corpus(options.without)
        work: list[Callable[[], None]] = [target.healthy, *(talker.run for talker in talkers)]
        work += [operator.run] if "operator" not in options.without else []
        work += [attacker.vanish, attacker.vanish] if "vanish" not in options.without else []
        work += [attacker.idle] if "idle" not in options.without else []
        work += [lambda: attacker.send_bodies(bodies)] if bodies else []
        try:
            beside(work, target, lambda: _lives(target, rng, options, directory / "cache"))
        finally:
            judge.close()
    if (directory / "cache").exists():
        verify(directory / "cache", findings)
    return target


def _lives(target: Target, rng: random.Random, options: argparse.Namespace, cache: Path) -> None:
    """Run four kinds of lives in turn: long ones in memory, short ones that are killed, and long
    ones on disk, without and with --exact. Only long lives are judged by their growth.
    """
    seconds = options.minutes * 60
    disk = [
        "--kv-cache-dir",
        str(cache),
        "--kv-cache-budget",
        "256",
        "--kv-cache-min-tokens",
        "128",
    ]
    target.live("long, memory only", seconds * LONG, "stop", [])
    if "kills" not in options.without:
        short_lives(
            target,
            rng,
            seconds * (1 - 3 * LONG),
            lambda: ("short, disk", disk) if rng.random() < 0.7 else ("short, memory only", []),
        )
    target.live("long, disk", seconds * LONG, "stop", disk)
    target.live("long, disk, exact", seconds * LONG, "stop", [*disk, "--exact"])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the soak and report it; --quick takes seconds, with a larger limit of growth."""
    parser = parser_of(__doc__)
    add_model(parser, None)
    parser.set_defaults(threads=1)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096, help="cells for all sequences")
    add_soak(parser, KINDS, 24, 24.0)
    parser.add_argument("--flags", default="", help="more flags for both servers, in one string")
    parser.add_argument(
        "--patience", type=float, default=2.0, metavar="SECONDS", help="time limit of a refusal"
    )
    parser.add_argument(
        "--resident-limit",
        type=float,
        default=0.0,
        metavar="MiB",
        help="resident memory; 0: no limit",
    )
    options = parse(parser, argv, minutes=0.3, clients=3, patience=100.0, growth_limit=400.0)
    with tempfile.TemporaryDirectory() as directory:
        target = soak(options, Path(directory))
    report(
        target,
        f"A soak of {options.minutes:g} minutes, seed {options.seed}",
        keep="soak" if options.keep else "",
    )


if __name__ == "__main__":
    main()

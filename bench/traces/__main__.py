"""Recorded sessions of strangers on a simulated card: evaluated tokens against the floor, and the
seconds that people wait, by kind of request.

    python -m bench.traces --keep              # all 710 sessions on two machines, half an hour
    python -m bench.traces --first 31 --sessions 50 --machines 32
    python -m bench.traces --sample 100 --seed 7
    python -m bench.traces --sessions 30 --restart-every 500 --switch-every 200 --visit-every 50

Engine, cache, disk tier and policies are the real ones; the model is none
(bench/traces/simulated_server.py). Rows and states have the bytes of a 27B with KV in q8_0,
prompts, pauses and shared prefixes are recorded (bench/traces/recording.py), and seconds are a
published RTX 3090's (bench/gpu_seconds.py). The cache has the bytes of RAM and of disk that pyctl
chooses on a machine of so many GB (MACHINES). The floor of a request is its tokens less those that
an earlier request of its session, or the reply to it, had in the same places. Requests beyond the
context are left out. Of a reply, 16 tokens are generated; the rest counts as new in the next
prompt.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from bench.common import SIMULATED, parse, parser_of, show
from bench.gpu_seconds import DEVICES
from bench.traces.household import Household, Interruptions, Served
from bench.traces.recording import Session, read_sessions
from bench.traces.simulated_server import Card, temporary_directory
from bench.traces.tables import WAITS, rows_by_kind, rows_by_reason, rows_by_source, worst_rows
from pyctl.cache.cache_settings import DEFAULT_DAILY_MIB, DiskSettings
from tools.generator import QWEN36_27B

MIB = 2**20

ROW_BYTES = 34_816
"""Bytes of a token's K and V in q8_0, of the 27B."""

N_CELLS = 131_072
"""Context of a card with 24 GB, within the 172,032 tokens that docs/contexts.md has for q8_0."""

CARD = next(device for device in DEVICES if device.name.endswith("RTX 3090"))

MACHINES = {"32": 13_465, "64": 29_337}
"""GB of RAM of a machine, and the MiB that pyctl chooses for its cache with a 27B
(docs/internals/decisions/006-defaults.md).
"""

Rows: TypeAlias = Callable[[Sequence[Served]], list[list[object]]]

TABLES: Sequence[tuple[str, str, Sequence[str], Rows]] = (
    (
        "",
        "",
        (
            "kind",
            "requests",
            "prompt tokens",
            "floor",
            "evaluated",
            "ratio",
            *(f"below {seconds:g} s, %" for seconds in WAITS),
        ),
        rows_by_kind,
    ),
    (
        "sources",
        ": sources",
        ("restored from", "requests", "tokens restored"),
        rows_by_source,
    ),
    (
        "reasons",
        ": reasons",
        ("why above the floor", "requests", "tokens above"),
        rows_by_reason,
    ),
    (
        "worst",
        ": the worst",
        (
            "session",
            "row",
            "kind",
            "prompt tokens",
            "floor",
            "evaluated",
            "from",
            "why",
        ),
        worst_rows,
    ),
)
"""The tables: the ends of file and title, the columns after the machine's, and the rows."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables: by kind of request, by source, by reason, and the worst requests."""
    options = _options(argv)
    sessions = _choose(read_sessions(), options)
    served: dict[str, list[Served]] = {}
    n_refused = 0
    for machine in options.machines:
        with temporary_directory() as directory:
            household = Household(
                _card(machine, options),
                sessions,
                options.at_once,
                Path(directory),
                Interruptions(options.restart_every, options.switch_every, options.visit_every),
            )
            served[machine] = list(household.run())
        n_refused = household.n_refused
    _show(served, _title(sessions, options), n_refused, options)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line: sessions, machines and interruptions."""
    parser = parser_of(__doc__)
    parser.add_argument("--first", type=int, default=1, help="the place of the first session")
    parser.add_argument("--sessions", type=int, default=0, help="so many from there, 0 = all")
    parser.add_argument("--sample", type=int, default=0, help="so many of these at random, 0 = all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--at-once", type=int, default=3, help="sessions that take turns")
    parser.add_argument(
        "--machines", nargs="+", default=list(MACHINES), choices=list(MACHINES), help="GB of RAM"
    )
    parser.add_argument("--ram", type=float, default=0.0, help="GiB of the cache in its place")
    parser.add_argument("--no-disk", action="store_true", help="without the disk tier")
    parser.add_argument("--cells", type=int, default=N_CELLS, help="tokens of context")
    for event, what in (
        ("restart", "a restart"),
        ("switch", "a switch of models"),
        ("visit", "a prompt of another client"),
    ):
        parser.add_argument(
            f"--{event}-every", type=int, default=0, help=f"requests from {what} to the next"
        )
    return parse(parser, argv, sessions=2, machines=["32"])


def _choose(sessions: Sequence[Session], options: argparse.Namespace) -> Sequence[Session]:
    """Return the sessions that the options name, in the order of the recording."""
    first = options.first - 1
    last = first + options.sessions if options.sessions else None
    chosen = sessions[first:last]
    if not options.sample:
        return chosen
    numbers = random.Random(options.seed).sample(range(len(chosen)), options.sample)
    return [chosen[number] for number in sorted(numbers)]


def _card(machine: str, options: argparse.Namespace) -> Card:
    """Return the memory of a machine: the defaults of pyctl, unless the options differ."""
    ram_bytes = int(options.ram * 2**30) or MACHINES[machine] * MIB
    disk_bytes = 0 if options.no_disk else DiskSettings().disk_mib * MIB
    daily_bytes = DEFAULT_DAILY_MIB * MIB
    return Card(
        CARD, options.cells, ROW_BYTES, QWEN36_27B.state_bytes, ram_bytes, disk_bytes, daily_bytes
    )


def _title(sessions: Sequence[Session], options: argparse.Namespace) -> str:
    title = f"{len(sessions)} recorded sessions, {options.at_once} at once"
    if options.sample:
        title += f", a sample with seed {options.seed}"
    return title


def _show(
    served: dict[str, list[Served]], title: str, n_refused: int, options: argparse.Namespace
) -> None:
    """Print the tables, and keep them if the options ask for it."""
    cards = {machine: _card(machine, options) for machine in served}
    notes = [
        f"{machine} GB of RAM: {card.ram_bytes // MIB:,} MiB for the cache, "
        f"{card.disk_bytes // MIB:,} MiB on disk, {card.daily_bytes // MIB:,} MiB written a day."
        for machine, card in cards.items()
    ]
    notes.append(f"{n_refused:,} requests exceed {options.cells:,} tokens and are left out.")
    for name, end, columns, rows_of in TABLES:
        rows = [
            [machine, *row] for machine, requests in served.items() for row in rows_of(requests)
        ]
        keep = "-".join(part for part in ("traces", name) if part)
        show(
            f"{title}{end}",
            ["GB", *columns],
            rows,
            keep=keep if options.keep else "",
            notes=notes,
            weights=SIMULATED,
        )


if __name__ == "__main__":
    main()

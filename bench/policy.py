"""Policies of the disk tier on synthetic prompts, no model: what a server that restarts before every request restores.

    python -m bench.policy [--keep]

tools/disk_simulation.py says what is simulated. "merged" is the rule of the original change: store and look up the
selected length only. Sums over the seeds; MiB are those of one. In brackets: requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.common import parse, parser_of, show
from pyctl.cache.persist import DiskPolicy
from tools.disk_simulation import WORKLOADS, Tally, Writer, prompt_of, simulate

POLICIES = ("off", "full", "auto:2", "auto:8", "auto:30", "1024")


def cells(tallies: Sequence[Tally]) -> list[str]:
    requests, hits, cached, cacheable = (
        sum(getattr(tally, name) for tally in tallies) for name in ("requests", "hits", "cached", "cacheable")
    )
    per_run = sum(tally.written for tally in tallies) / len(tallies) / 2**20
    return [
        f"{100 * hits / requests:.0f} %",
        f"{cached / max(hits, 1):.0f}",
        f"{100 * cached / cacheable:.0f} %",
        f"{per_run:.0f}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parse(parser, argv, seeds=1)
    rows: list[list[object]] = []
    for workload in WORKLOADS:
        runs = [[prompt_of(messages) for messages in workload(Writer(seed))] for seed in range(arguments.seeds)]
        for text in POLICIES:
            policy = DiskPolicy.parse(text)
            ours, merged = ([simulate(run, policy, merged=rule) for run in runs] for rule in (False, True))
            name = f"{workload.__name__.replace('_', ' ')} ({len(runs[0])})" if text == POLICIES[0] else ""
            rows.append([name, policy.name, *cells(ours), *cells(merged)])
    names = ["hits", "tokens/hit", "of cacheable", "MiB written"]
    columns = ["workload", "policy", *names, *(f"merged: {names[0]}", *names[1:])]
    show("Disk policies, a restart before every request", columns, rows, keep="policy" if arguments.keep else "")


if __name__ == "__main__":
    main()

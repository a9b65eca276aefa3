"""Policies of the disk tier on synthetic prompts, without a model: tokens restored if a server
always restarts.

    python -m bench.policy [--keep]
    python -m bench.policy --weights [--keep]

With --weights, eviction from RAM and the device instead: agents' sessions in a simulation
(bench/budgets.py), with each likelihood in the worth of snapshots halved and doubled. Means over
the workloads.

tools/disk_simulation.py describes the simulation. Tokens are sums over the seeds, MiB are one
seed's, figures in brackets requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from bench.budgets import is_late, simulated
from bench.common import SIMULATED, parse, parser_of, show
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.eviction import Likelihoods
from tools.disk_simulation import WORKLOADS, Tally, Writer, prompt_of, simulate

POLICIES = ("off", "full", "auto:2", "auto:8", "auto:30", "1024")


def cells(tallies: Sequence[Tally]) -> list[str]:
    requests, hits, cached, cacheable = (
        sum(getattr(tally, name) for tally in tallies)
        for name in ("requests", "hits", "cached", "cacheable")
    )
    per_run = sum(tally.written for tally in tallies) / len(tallies) / 2**20
    return [
        f"{100 * hits / requests:.0f} %",
        f"{cached / max(hits, 1):.0f}",
        f"{100 * cached / cacheable:.0f} %",
        f"{per_run:.0f}",
    ]


SESSIONS = (
    "three_agents",
    "visits",
    "long_and_short",
    "claude_code",
    "codex",
    "opencode",
    "qwen_code",
    "aider",
)


def weights(only: Sequence[str], gibs: Sequence[float], *, keep: bool) -> None:
    """Show the gain of each likelihood of the policy."""
    chosen = Likelihoods()
    tried = [
        ("as it is", chosen),
        ("ends alone", Likelihoods(end=1.0, head=0.0, again=0.0, turn=0.0)),
    ]
    for each in fields(Likelihoods):
        for factor in (0.5, 2):
            value = getattr(chosen, each.name) * factor
            value = (
                min(value, 0.95) if each.name == "end" else type(getattr(chosen, each.name))(value)
            )
            tried.append((f"{each.name} {value:g}", replace(chosen, **{each.name: value})))
    rows: list[list[object]] = []
    for name, likelihoods in tried:
        row: list[object] = [name]
        for gib in gibs:
            runs = [simulated(workload, gib, likelihoods=likelihoods).turns for workload in only]
            ratios = [
                sum(turn.n_evaluated for turn in run) / sum(turn.floor for turn in run)
                for run in runs
            ]
            row += [
                f"{sum(ratios) / len(ratios):.3f}",
                sum(is_late(turn) for run in runs for turn in run),
            ]
        rows.append(row)
    columns = ["likelihoods", *(column for gib in gibs for column in (f"{gib:g} GiB", "late"))]
    title = "Tokens evaluated per token that was new, by how snapshots are valued"
    show(title, columns, rows, keep="policy-weights" if keep else "", weights=SIMULATED)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row per workload and disk policy: hits, tokens per hit, the share of the cacheable
    tokens, and MiB written. With --weights, measure eviction from RAM and the device instead.
    """
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--weights", action="store_true", help="measure eviction from RAM and the device instead"
    )
    parser.add_argument("--only", nargs="+", default=SESSIONS, choices=SESSIONS, metavar="WORKLOAD")
    parser.add_argument("--gib", nargs="+", type=float, default=[4.0, 8.0])
    arguments = parse(parser, argv, seeds=1, only=["long_and_short"], gib=[4.0])
    if arguments.weights:
        return weights(arguments.only, arguments.gib, keep=arguments.keep)
    rows: list[list[object]] = []
    for workload in WORKLOADS:
        runs = [
            [prompt_of(messages) for messages in workload(Writer(seed))]
            for seed in range(arguments.seeds)
        ]
        for text in POLICIES:
            policy = DiskPolicy.parse(text)
            name = (
                f"{workload.__name__.replace('_', ' ')} ({len(runs[0])})"
                if text == POLICIES[0]
                else ""
            )
            rows.append([name, policy.name, *cells([simulate(run, policy) for run in runs])])
    columns = ["workload", "policy", "hits", "tokens/hit", "of cacheable", "MiB written"]
    title = "Disk policies, a restart before every request"
    show(title, columns, rows, keep="policy" if arguments.keep else "", weights=SIMULATED)


if __name__ == "__main__":
    main()

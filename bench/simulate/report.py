"""Tables of a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.common import SIMULATED, show
from bench.simulate.household import Household

SHOWN_ERROR = 90
"""Characters of a fault's description in the table."""


@dataclass(frozen=True)
class RunSummary:
    """The outcome of one household.

    Attributes:
        seed: The seed that decided everything.
        hours: The simulated hours of its clients.
        seconds: The time that the simulation took.
        counts: Requests, tokens and calls by their names in the table.
        events: The events by kind.
        n_steps: The number of events.
        digest: A digest of all events; equal for two runs of the same seed.
        wrong: The first error of a server; "" for none.
        last: The last events, if the run ended at an error or at the step asked for.
    """

    seed: int
    hours: float
    seconds: float
    counts: Counter[str]
    events: Counter[str]
    n_steps: int
    digest: str
    wrong: str
    last: tuple[str, ...]


def summarize(
    household: Household, seed: int, hours: float, seconds: float, wrong: str
) -> RunSummary:
    """Return the summary of a run of ``hours`` simulated hours, which took ``seconds``."""
    log = household.log
    totals = household.totals
    counts = Counter(
        {
            "requests answered": totals.n_requests,
            "requests beyond the context, left out": totals.n_refused,
            "prompt tokens": totals.n_prompt,
            "evaluated tokens": totals.n_evaluated,
        }
    )
    for source, n_tokens in sorted(totals.restored.items()):
        counts[f"restored tokens, {source}"] = n_tokens
    counts["calls that could fail"] = household.n_calls
    ends_early = bool(wrong) or log.is_over
    return RunSummary(
        seed=seed,
        hours=hours,
        seconds=seconds,
        counts=counts,
        events=Counter(log.counts),
        n_steps=log.step,
        digest=log.digest,
        wrong=wrong,
        last=tuple(log.last) if ends_early else (),
    )


def show_runs(runs: Sequence[RunSummary], *, keep: bool) -> None:
    """Print the sums over all households, and for each the command that repeats it."""
    hours = sum(run.hours for run in runs)
    counts: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for run in runs:
        counts.update(run.counts)
        events.update(run.events)
    rows: list[list[object]] = [["hours of the clients", f"{hours:,.1f}"]]
    rows += [[name, f"{n:,}"] for name, n in counts.items() if n]
    rows += [[f"event: {kind}", f"{n:,}"] for kind, n in sorted(events.items())]
    rows.append(["wrong", sum(bool(run.wrong) for run in runs)])
    seeds = [str(run.seed) for run in runs]
    named = f"seed {seeds[0]}" if len(runs) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    show(
        f"{hours:,.0f} simulated hours, {named}",
        ["", ""],
        rows,
        keep="simulate" if keep else "",
        notes=[line for run in runs for line in _notes(run)],
        weights=SIMULATED,
    )


def _notes(run: RunSummary) -> list[str]:
    """Return the lines that repeat a run, and its error and last events if it ended early."""
    speed = run.counts["requests answered"] / max(run.seconds, 1e-9)
    lines = [
        f"Command: python -m bench.simulate --hours {run.hours:.1f} --seed {run.seed}; "
        f"{run.n_steps:,} events, digest {run.digest}, {speed:.0f} requests a second."
    ]
    if run.wrong:
        lines.append(f"WRONG at step {run.n_steps} of seed {run.seed}: {run.wrong}")
    return [*lines, *run.last]


def show_planted(rows: Sequence[Sequence[str]], *, keep: bool) -> None:
    """Print a row for each planted fault: its name, the seed, the step, and how it showed."""
    show(
        "Faults planted in the source",
        ["fault", "seed", "step", "found as"],
        [[*row[:3], row[3][:SHOWN_ERROR]] for row in rows],
        keep="simulate-planted" if keep else "",
        notes=["Command: python -m bench.simulate --plant all"],
        weights=SIMULATED,
    )

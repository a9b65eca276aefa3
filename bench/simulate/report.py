"""Tables of a simulation."""

from __future__ import annotations

from collections.abc import Sequence

from bench.common import SIMULATED, show
from bench.simulate.household import Household

SHOWN_ERROR = 90
"""Characters of a fault's description in the table."""


def show_run(
    household: Household, seed: int, hours: float, seconds: float, wrong: str, *, keep: bool
) -> None:
    """Print the counts of a run of ``hours`` simulated hours, which took ``seconds``; ``wrong`` is
    the first error of a server, "" for none.
    """
    log = household.log
    totals = household.totals
    rows: list[list[object]] = [
        ["hours of the clients", f"{hours:,.1f}"],
        ["requests answered", f"{totals.n_requests:,}"],
        ["requests beyond the context, left out", f"{totals.n_refused:,}"],
        ["prompt tokens", f"{totals.n_prompt:,}"],
        ["evaluated tokens", f"{totals.n_evaluated:,}"],
    ]
    for source, n_tokens in sorted(totals.restored.items()):
        if n_tokens:
            rows.append([f"restored tokens, {source}", f"{n_tokens:,}"])
    rows += [[f"event: {kind}", f"{n:,}"] for kind, n in sorted(log.counts.items())]
    rows += [
        ["calls that could fail", f"{household.n_calls:,}"],
        ["wrong", 1 if wrong else 0],
    ]
    notes = [
        f"Command: python -m bench.simulate --hours {hours:.1f} --seed {seed}; "
        f"{log.step:,} events, digest {log.digest}, "
        f"{totals.n_requests / max(seconds, 1e-9):.0f} requests a second."
    ]
    if wrong:
        notes.append(f"WRONG at step {log.step} of seed {seed}: {wrong}")
    if wrong or log.is_over:
        notes += log.last
    show(
        f"{hours:,.0f} simulated hours, seed {seed}",
        ["", ""],
        rows,
        keep="simulate" if keep else "",
        notes=notes,
        weights=SIMULATED,
    )


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

"""The cost of RAM budgets: evaluated tokens against new ones, and seconds on a GPU, without a
model.

    python -m bench.budgets    # every workload, a few minutes

Engine and cache are the real ones, with batches as on a GPU; rows and states have the bytes of the
27B, at a scale of 1 to 256. The floor of a request is its tokens less those that any request before
it, or its reply, had in the same places. For each budget the table shows: evaluated tokens per
token of the floor; the bound for any policy with these bytes, even with knowledge of the future;
the number of turns that evaluated more than twice their floor and 64 tokens; and the seconds of
prompts, restores and saved states, in total and at most, on each device of bench/gpu_seconds.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.common import SIMULATED, parse, parser_of, show
from bench.gpu_seconds import DEVICES
from bench.oracle import min_evaluated
from bench.sessions import AGENTS, BUDGETED, LONG, WORKLOADS
from bench.simulated import Simulation, SizedBackend, Turn
from pyctl.cache.eviction import Likelihoods
from pyctl.chat import CHATML
from pyctl.chat.template import Template
from tools.generator import QWEN36_27B

__all__ = ["SCALE", "is_late", "simulated"]

TEMPLATE = (
    Path(__file__).resolve().parents[1] / "vendor/llama.cpp/models/templates/Qwen3.5-4B.jinja"
)

SCALE = 256
"""Bytes of the 27B for each byte here."""

ROW_BYTES = QWEN36_27B.row_bytes() // SCALE
STATE_BYTES = QWEN36_27B.state_bytes // SCALE

N_CELLS = 65_536
N_SEQS = 4
N_UBATCH = 1024


def is_late(turn: Turn) -> bool:
    """Return whether the turn evaluated more than twice its floor and 64 tokens."""
    return turn.n_evaluated > 2 * turn.floor + 64


def simulated(
    name: str,
    gib: float | None,
    n_slots: int = 0,
    *,
    likelihoods: Likelihoods | None = None,
    n_seqs: int = N_SEQS,
    n_cells: int = N_CELLS,
    row_bytes: int = ROW_BYTES,
) -> Simulation:
    """Run a workload with ``gib`` of RAM for ``n_slots`` snapshots; None and 0: no limit.

    ``likelihoods`` replace the policy's.
    """
    groups = {**WORKLOADS, **BUDGETED, **LONG, **AGENTS}
    plain = name in WORKLOADS or not TEMPLATE.is_file()
    template = Template(
        CHATML if plain else TEMPLATE.read_text(encoding="utf-8"), eos_token="<|im_end|>"
    )
    sizes = n_cells, n_seqs, row_bytes, STATE_BYTES
    backend = SizedBackend(*sizes, n_ubatch=N_UBATCH, batch_cost=N_UBATCH // 2, scale=SCALE)
    budget = None if gib is None else int(gib * 2**30 / SCALE)
    simulation = Simulation(template, backend, budget, n_slots)
    if likelihoods is not None:
        simulation.cache.policy.likelihoods = likelihoods
    groups[name](simulation)
    return simulation


def minimum(
    simulation: Simulation, gib: float, n_cells: int = N_CELLS, row_bytes: int = ROW_BYTES
) -> float:
    """Return the fewest tokens that its requests need with ``gib`` of RAM, all cells, and one state
    on the device.
    """
    n_bytes = gib * 2**30 / SCALE + n_cells * row_bytes + STATE_BYTES
    prompts = [turn.n for turn in simulation.turns]
    return min_evaluated(prompts, simulation.known.all, n_bytes, row_bytes, STATE_BYTES)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row per workload and budget: turns, floor, tokens evaluated per token of the floor,
    the bound of `minimum`, late turns, and the sum and maximum of the seconds on each device.
    """
    parser = parser_of(__doc__)
    names = [*WORKLOADS, *BUDGETED, *AGENTS]
    parser.add_argument(
        "--only", nargs="+", default=names, choices=[*names, *LONG], metavar="WORKLOAD"
    )
    parser.add_argument(
        "--gib", nargs="+", type=float, default=[4.0, 8.0, 16.0], help="budgets to compare"
    )
    parser.add_argument("--slots", type=int, default=0, help="snapshots at most, 0 = no limit")
    parser.add_argument("--cells", type=int, default=N_CELLS, help="tokens of context")
    parser.add_argument(
        "--row-bytes", type=int, default=ROW_BYTES * SCALE, help="of a token: 65536 f16, 34816 q8_0"
    )
    arguments = parse(parser, argv, only=["regenerate", "short_requests"], gib=[8.0])
    rows: list[list[object]] = []
    card = {"n_cells": arguments.cells, "row_bytes": arguments.row_bytes // SCALE}
    for name in arguments.only:
        for gib in arguments.gib:
            simulation = simulated(name, gib, arguments.slots, **card)
            turns = simulation.turns
            evaluated = sum(turn.n_evaluated for turn in turns)
            floor = sum(turn.floor for turn in turns)
            cells: list[object] = [
                f"{evaluated / floor:.2f}",
                f"{minimum(simulation, gib, **card) / floor:.2f}",
            ]
            cells.append(sum(map(is_late, turns)))
            for device in DEVICES:
                seconds = [turn.seconds[device.name] for turn in turns]
                cells.append(f"{sum(seconds):.1f} ({max(seconds):.1f})")
            rows.append([name.replace("_", " "), len(turns), floor, f"{gib:g}", *cells])
    columns = ["workload", "turns", "floor", "GiB", "per new token", "bound", "late"]
    columns += [f"s, {device.name}" for device in DEVICES]
    title = (
        "Prompt tokens evaluated per token that was new, and seconds on a GPU, by what "
        "snapshots may take"
    )
    show(title, columns, rows, keep="budgets" if arguments.keep else "", weights=SIMULATED)


if __name__ == "__main__":
    main()

"""The gain of spilling, and the bytes that it writes: agents in a simulation without a model.

    python -m bench.spill [--only three_agents ...] [--gib 4 8] [--keep]

Engine, cache and disk tier are the real ones; rows and states have the bytes of the 27B, at a scale of 1 to 256, and
do not compress. A token costs 1 ms to evaluate, the drive reads 1 GB/s, and a turn begins when the last one is written.
For each policy the table shows: evaluated tokens per token that no earlier request had, turns that evaluated more than
twice their floor and 64 tokens, tokens read from disk, and GiB of the 27B written per 1,000 turns. An agent without
pauses takes 6,000 turns of 15 s a day; "a day" is what these turns write, within the daily write budget.

Not scaled: MOST_BEHIND_BYTES, so the write queue is never full here, as it would be beside long conversations that are
not on disk; and the clock by which files age, since turns take no time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from bench.budgets import N_CELLS, N_SEQS, ROW_BYTES, SCALE, STATE_BYTES, TEMPLATE, is_late
from bench.common import parse, parser_of, show
from bench.sessions import AGENTS, BUDGETED, WORKLOADS
from bench.simulated import Simulation, SizedBackend
from pyctl.cache.cache_settings import DiskSettings
from pyctl.cache.costs import Costs
from pyctl.cache.disk.file_format import BlockSizes
from pyctl.cache.disk.store import DiskStore
from pyctl.cache.disk.writer import SPILLED_PER_DAY
from pyctl.cache.disk_tier import DiskTier
from pyctl.cache.persist import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Block, Held, Rows, State
from pyctl.chat import CHATML
from pyctl.chat.template import Template
from pyctl.engine.backend import Backend
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.prompt import Prompt, Tokens

POLICIES = ("off", "auto:30", "auto:30,spill")

TURNS_OF_A_DAY = 6_000

DEFAULTS = ["three_agents", "visits", "long_and_short", "claude_code", "codex", "opencode"]


class ScaledCosts(Costs):
    """Those of the 27B, whatever the simulation takes."""

    def load(self, n_bytes: int) -> float:
        return super().load(n_bytes * SCALE)

    def read(self, n_bytes: int) -> float:
        return super().read(n_bytes * SCALE)

    def note_evaluated(self, first: int, last: int, seconds: float) -> None:
        pass

    def note_read(self, n_bytes: int, seconds: float) -> None:
        pass


class NoisyBackend(SizedBackend):
    """Bytes that no codec makes fewer."""

    _noise = np.random.default_rng(0)

    def save_rows(self, seq: int, first: int, last: int, *, hold: bool = False) -> Rows:
        rows = super().save_rows(seq, first, last, hold=hold)
        return rows if hold else Rows(self._noisy(rows.block))

    def save_state(self, seq: int, n: int) -> State:
        return State.of(self._noisy(super().save_state(seq, n).recurrent))

    def fetch(self, held: Held, first: int, last: int) -> Block:
        return self._noisy(super().fetch(held, first, last))

    def _noisy(self, block: Block) -> Block:
        return self._noise.integers(0, 256, block.size, dtype=np.uint8)


class Spilling(Simulation):
    """With a cache directory, whose writing is done when the next request comes."""

    def __init__(
        self, template: Template, backend: SizedBackend, budget: int, policy: str, directory: Path, disk: float
    ) -> None:
        super().__init__(template, backend, budget, 0)
        defaults = DiskSettings()
        sizes = BlockSizes(0, ROW_BYTES, STATE_BYTES)
        store = DiskStore(directory, "27B", int(disk * 2**30 / SCALE), sizes=sizes)
        self.tier = DiskTier(store, DiskPolicy.of_server(policy), cold_max=defaults.cold_max)
        self._cache = RamCache(0, budget, ScaledCosts())
        self._engine = Engine(cast(Backend, backend), self._cache, EngineSettings(), self.tier)

    def answer(self, prompt: Prompt, reply: Tokens) -> None:
        super().answer(prompt, reply)
        self.tier.queue.settle()
        self.tier.flush(60)


def row_of(name: str, gib: float, policy: str, disk: float) -> list[object]:
    """One workload with so many GiB of RAM and on disk."""
    groups = {**WORKLOADS, **BUDGETED, **AGENTS}
    plain = name in WORKLOADS or not TEMPLATE.is_file()
    template = Template(CHATML if plain else TEMPLATE.read_text(encoding="utf-8"), eos_token="<|im_end|>")
    directory = Path(tempfile.mkdtemp(prefix="pyctl-spill-"))
    try:
        backend = NoisyBackend(N_CELLS, N_SEQS, ROW_BYTES, STATE_BYTES)
        run = Spilling(template, backend, int(gib * 2**30 / SCALE), policy, directory, disk)
        groups[name](run)
        view, turns = run.tier.view(), run.turns
        run.tier.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    evaluated, floor = sum(turn.n_evaluated for turn in turns), sum(turn.floor for turn in turns)
    from_disk = sum(turn.n - turn.n_evaluated for turn in turns if turn.source == "disk")
    written, spilled = (SCALE * each.n_bytes / 2**30 / len(turns) * 1000 for each in (view.written, view.spilled))
    allowed = SPILLED_PER_DAY * disk
    chosen = (written - spilled) * TURNS_OF_A_DAY / 1000
    day = chosen + min(spilled * TURNS_OF_A_DAY / 1000, allowed)
    return [
        *(policy, f"{evaluated / floor:.2f}", sum(map(is_late, turns)), from_disk),
        *(f"{written:.0f}", f"{spilled:.0f}", f"{day:.0f}", view.given_up),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    names = [*WORKLOADS, *BUDGETED, *AGENTS]
    parser.add_argument("--only", nargs="+", default=DEFAULTS, choices=names, metavar="WORKLOAD")
    parser.add_argument("--gib", nargs="+", type=float, default=[8.0], help="budgets of RAM to compare")
    parser.add_argument("--disk", type=float, default=DiskSettings.disk_mib / 1024, help="GiB of the cache directory")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    arguments = parse(parser, argv, only=["regenerate"], gib=[4.0], policies=["spill"])
    os.fsync = cast(Any, lambda descriptor: None)
    rows: list[list[object]] = []
    for name in arguments.only:
        for gib in arguments.gib:
            for policy in arguments.policies:
                first = policy == arguments.policies[0]
                rows.append(
                    [
                        name.replace("_", " ") if first else "",
                        f"{gib:g}" if first else "",
                        *row_of(name, gib, policy, arguments.disk),
                    ]
                )
                print(rows[-1], flush=True)
    columns = ["workload", "GiB of RAM", "policy", "evaluated", "late", "from disk", "GiB/1,000 turns", "spilled"]
    title = f"Snapshots written as they leave RAM, {arguments.disk:g} GiB of disk"
    name = "spill" if arguments.disk == DiskSettings.disk_mib / 1024 else f"spill-{arguments.disk:g}-gib"
    show(title, [*columns, "a day", "given up"], rows, keep=name if arguments.keep else "")


if __name__ == "__main__":
    main()

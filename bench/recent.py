"""How long the engine's thread is held by the disk tier while that writes: prompts of late, a snapshot, both.

    python -m bench.recent [--prompts 120 --tokens 32768 --keep]

Every call that the engine makes, in turn, first with an idle disk, then while the writing thread stores a snapshot and
the recent prompts without a pause. What threads of this process waited for a core is taken off: on a machine with
other work, that is not the tier's doing.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from bench.common import parse, parser_of, show
from pyctl.cache.disk.store import DiskStore
from pyctl.cache.disk_tier import DiskTier
from pyctl.cache.persist import DiskPolicy
from pyctl.cache.snapshot import PromptMatch, Segment, Snapshot, State
from pyctl.cli import SWITCH_SECONDS
from pyctl.prompt import Prompt, Tokens, as_tokens

MIB = 2**20

T = TypeVar("T")


class Calls:
    """What the engine asks of ``tier`` for one request, timed."""

    def __init__(self, tier: DiskTier, n_prompts: int, n_tokens: int) -> None:
        self._tier, self._random = tier, np.random.default_rng(0)
        self._head = self._tokens(n_tokens // 2)
        self._prompts = [
            self._prompt(as_tokens(np.concatenate([self._head, self._tokens(n_tokens // 2)]))) for _ in range(n_prompts)
        ]
        for prompt in self._prompts:
            tier.recent.add(prompt)
        self.times: dict[str, list[float]] = {}

    def request(self) -> None:
        """One of the conversations goes on by a message."""
        tier = self._tier
        at = int(self._random.integers(len(self._prompts)))
        prompt = self._prompts[at] = self._prompt(
            as_tokens(np.concatenate([self._prompts[at].tokens[:-4], self._tokens(100)]))
        )
        match = PromptMatch(prompt.tokens)
        found = self._timed("compare", lambda: tier.recent.compare(prompt))
        self._timed("add", lambda: tier.recent.add(prompt, found))
        match.prefix(len(prompt) - 1)
        self._timed("find", lambda: tier.find(match, len(prompt) - 1))
        self._timed("select", lambda: tier.select(found, 0))
        snapshot = snapshot_of(prompt, 64)
        self._timed("offer", lambda: tier.write(snapshot))
        self._timed("count_hit", lambda: tier.count_hit(snapshot))
        self._timed("view", tier.view)

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        waited, began = waited_ns(), time.perf_counter()
        result = call()
        seconds = time.perf_counter() - began
        held = seconds - (waited_ns() - waited) / 1e9
        self.times.setdefault(name, []).append(max(held, 0.0) * 1e3)
        return result

    def _tokens(self, n: int) -> Tokens:
        return as_tokens(self._random.integers(0, 150_000, n))

    def _prompt(self, tokens: Tokens) -> Prompt:
        return Prompt.of(tokens, range(100, tokens.size, 100))


def waited_ns() -> int:
    """How long the threads of this process have waited for a core, all together."""
    waited = 0
    for path in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            waited += int((path / "schedstat").read_text().split()[1])
    return waited


def snapshot_of(prompt: Prompt, row_bytes: int) -> Snapshot:
    rows = np.random.default_rng(len(prompt)).integers(0, 256, len(prompt) * row_bytes, np.uint8)
    segment = Segment(0, prompt.tokens, rows, None, (len(prompt),))
    return Snapshot(PromptMatch(prompt.tokens).prefix(len(prompt)), segment, State.of(rows[:4096]))


def measured(tier: DiskTier, calls: Calls, seconds: float, busy: bool) -> dict[str, list[float]]:
    """The times of each call for so long; ``busy``: while the tier writes without a pause."""
    calls.times = {}
    stop = threading.Event()

    def keep_writing() -> None:
        if not stop.is_set():
            tier._writer.save_recent()
            tier.queue.run_soon(keep_writing)

    if busy:
        tier.queue.run_soon(keep_writing)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        calls.request()
        time.sleep(0.002)
        if not busy:
            tier.flush(60)
    stop.set()
    tier.flush(60)
    return calls.times


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parse(parser, argv, prompts=5, tokens=512, seconds=0.3)
    sys.setswitchinterval(SWITCH_SECONDS)  # as the program does, and so is the freeze below
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as name:
        store = DiskStore(Path(name), "bench", 512 * MIB)
        tier = DiskTier(store, DiskPolicy("auto"), cold_max=10240)
        calls = Calls(tier, arguments.prompts, arguments.tokens)
        tier._writer.save_recent()
        gc.collect()
        gc.freeze()
        idle = measured(tier, calls, arguments.seconds, busy=False)
        busy = measured(tier, calls, arguments.seconds, busy=True)
        tier.close()
    for call, quiet in idle.items():
        cells = [
            f"{value:.2f}"
            for times in (quiet, busy[call])
            for value in (statistics.median(times), p99(times), max(times))
        ]
        rows.append([call, len(busy[call]), *cells])
    columns = ["call", "times", "idle ms", "99 %", "largest", "writing ms", "99 %", "largest"]
    title = f"The engine's calls, {arguments.prompts} recent prompts of {arguments.tokens} tokens"
    show(title, columns, rows, keep="recent" if arguments.keep else "")


def p99(times: Sequence[float]) -> float:
    return sorted(times)[int(0.99 * (len(times) - 1))]


if __name__ == "__main__":
    main()

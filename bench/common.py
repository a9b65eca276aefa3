"""What the benchmarks share: a table, the machine's name, and repeated timing."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pyctl.engine.engine import Engine
from pyctl.engine.handle import RequestHandle
from pyctl.engine.llama.library import build_version
from pyctl.engine.request import Done, Event, Failed, Request

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """The processor, how many cores this process may use, and the llama.cpp release."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].partition(": ")[2] if names else platform.processor()
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores; {build_version()}"


def median_seconds(function: Callable[[], object], repeat: int) -> float:
    """The median time of ``repeat`` calls after one that does not count."""
    function()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def answered(engine: Engine, request: Request) -> Done:
    """Run ``request`` on ``engine`` in this thread; raises what it failed with."""
    handle = RequestHandle(request)
    engine.submit(handle)
    while engine.step():
        pass
    return finished(handle.drain())


def finished(events: Iterable[Event]) -> Done:
    """The end of a reply; raises what it failed with."""
    last: Event | None = None
    for last in events:
        if isinstance(last, Failed):
            raise last.error
    if not isinstance(last, Done):
        raise RuntimeError(f"the request did not end but with {last}")
    return last


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, keep: str = "") -> None:
    """Print one table; with ``keep``, also write it to results/<keep>.md."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(width=140).print(table)
    if keep:
        lines = [f"# {title}", "", machine(), "", "| " + " | ".join(columns) + " |", "|" + "---:|" * len(columns)]
        lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{keep}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")

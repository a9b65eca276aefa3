"""What the page costs: a running reply while it is open, memory over 1,000 renders, and the way to its first paint.

    python -m bench.page        # the rows that need a browser need '.[page]' and chromium

One long reply is streamed by a server that is bound to two cores. In turn it runs alone, and with the page open in a
real browser, which asks for the cache as it does while somebody looks, and has a block of Markdown rendered twice a
second, as for a reply of its own. The browser runs on other cores if there are any; where there are not, its work
counts, too. What the server works for a page is also measured alone, as processor time, which says the same on a busy
machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.common import parse, parser_of, show
from bench.frontend import SETTLE_SECONDS, SHAPE, compared
from tools.generator import cached_model
from tools.server_process import PYCTL_SERVE, ServerProcess

BLOCK = "Some **words** with `code`, [a link](https://example.org/) and $x^{n}$ in them. "
CODE = "```python\ndef f{0}(x):\n    return [x, {0}]  # why not\n```\n\n"
LATENCY_MS = 200
N_STEPS = 5

RENDER = """async (block) => {
  clearInterval(window.rendering);
  let n = 0;
  window.rendering = setInterval(() => fetch("page/markdown", { method: "POST",
    headers: { "content-type": "application/json" }, body: JSON.stringify({ texts: [block + n++] }) }), 500);
}"""


def text(i: int) -> str:
    """Markdown of a kilobyte that is like no other."""
    return f"# Part {i}\n\n{BLOCK * 6}\n\n{CODE.format(i)}| a | b |\n|-|-|\n| {i} | 2 |\n"


def chromium() -> str | None:
    """The browser, if there is one and playwright to lead it."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium")
    return found if found and importlib.util.find_spec("playwright") else None


@contextlib.asynccontextmanager
async def a_browser(path: str) -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


# -- a reply beside it -------------------------------------------------------------------------------------------------


async def beside(address: str, path: str, seconds: float, rounds: int) -> list[tuple[float, float, float]]:
    """Tokens per second of each round: before the page is open, while it is, and after it."""
    async with a_browser(path) as browser:

        @contextlib.asynccontextmanager
        async def looked_at() -> AsyncIterator[None]:
            page = await opened(browser, address)
            await page.evaluate(RENDER, BLOCK * 4)
            await asyncio.sleep(2 * SETTLE_SECONDS)
            yield
            await page.close()

        return await compared(address, looked_at, seconds, rounds, 2 * SETTLE_SECONDS)


async def opened(browser: Any, address: str) -> Any:
    """A tab with the page, ready to be used."""
    page = await browser.new_page()
    await page.goto(address)
    await page.wait_for_selector("body[data-ready]")
    return page


def show_beside(found: Sequence[tuple[float, float, float]], keep: str) -> None:
    rows: list[tuple[object, ...]] = []
    ratios = []
    for number, (before, loaded, after) in enumerate(found, 1):
        ratios.append(loaded / ((before + after) / 2))
        rows.append((number, f"{before:.1f}", f"{loaded:.1f}", f"{after:.1f}", f"{ratios[-1]:.3f}"))
    rows.append(("median", "", "", "", f"{statistics.median(ratios):.3f}"))
    columns = ("round", "alone before, tokens/s", "page open", "alone after", "speed with the page open")
    show("A reply while the page is open in a browser", columns, rows, keep=keep)


# -- what it uses of processors ----------------------------------------------------------------------------------------


def cpu_ms(pid: int) -> float:
    """Milliseconds that the server and the process that renders have had a processor."""
    tasks = (task for each in processes(pid) for task in Path(f"/proc/{each}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


ALL_OF_IT = "() => { setInterval(() => fetch('cache').then((answer) => answer.json()), 1000); }"


async def work(server: ServerProcess, path: str, seconds: float) -> list[tuple[object, ...]]:
    """Processor milliseconds a second, by what the page does, with nothing else to be done."""
    rows: list[tuple[object, ...]] = []
    async with a_browser(path) as browser:
        for what in ("no page", "the page, open", "and two renders a second", "and a cache that changes every second"):
            page = await opened(browser, server.url) if rows else None
            if page is not None and len(rows) > 1:
                await page.evaluate(RENDER, BLOCK * 4)
            if page is not None and len(rows) > 2:
                await page.evaluate(ALL_OF_IT)
            await asyncio.sleep(4 * SETTLE_SECONDS)
            used, began = cpu_ms(server.pid), time.perf_counter()
            await asyncio.sleep(seconds)
            used = (cpu_ms(server.pid) - used) / (time.perf_counter() - began)
            rows.append((what, f"{used:.1f}", f"{used / 10:.2f} %"))
            if page is not None:
                await page.close()
    return rows


# -- memory ------------------------------------------------------------------------------------------------------------


def processes(pid: int) -> Iterator[int]:
    """``pid`` and those below it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from processes(int(child))


def resident_mib(pid: int) -> float:
    """What the server and the process that renders have in memory."""
    status = (Path(f"/proc/{each}/status").read_text() for each in processes(pid))
    return sum(int(found[1]) for text in status if (found := re.search(r"VmRSS:\s+(\d+)", text))) / 1024


def renders(server: ServerProcess, n: int) -> list[tuple[object, ...]]:
    """Memory after parts of ``n`` texts, all of them different."""
    rows: list[tuple[object, ...]] = []
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def render(first: int, count: int) -> float:
            began = time.perf_counter()
            for start in range(first, first + count, 4):
                texts = [text(i) for i in range(start, min(start + 4, first + count))]
                client.post("/page/markdown", json={"texts": texts}).raise_for_status()
            return (time.perf_counter() - began) * 1e3 / count

        render(-n // 10, n // 10)  # what is loaded once
        first = resident_mib(server.pid)
        rows.append((0, f"{first:.1f}", "", ""))
        for step in range(N_STEPS):
            each = render(step * n // N_STEPS, n // N_STEPS)
            now = resident_mib(server.pid)
            rows.append(((step + 1) * n // N_STEPS, f"{now:.1f}", f"{now - first:+.1f}", f"{each:.1f}"))
    return rows


# -- the first paint ---------------------------------------------------------------------------------------------------


def sizes(url: str) -> tuple[int, int, int]:
    """Files of the page, their bytes, and what goes over the wire."""
    with httpx.Client(base_url=url) as client:
        first = client.get("/")
        names = re.findall(r'(?:src|href)="(page/[^"]+)"', first.text)
        answers = [first, *(client.get("/" + name) for name in dict.fromkeys(names))]
        sent = sum(int(answer.headers["content-length"]) for answer in answers)
        return len(answers), sum(len(answer.content) for answer in answers), sent


async def paint_ms(url: str, path: str, rounds: int) -> tuple[float, float]:
    """Milliseconds to the first paint, and until the page can be used, with LATENCY_MS before each answer."""
    paints, ready = [], []
    async with a_browser(path) as browser:
        for _ in range(rounds):
            page = await browser.new_page()
            session = await page.context.new_cdp_session(page)
            await session.send("Network.enable")
            slow = {"offline": False, "latency": LATENCY_MS, "downloadThroughput": -1, "uploadThroughput": -1}
            await session.send("Network.emulateNetworkConditions", slow)
            await page.goto(url)
            await page.wait_for_selector("body[data-ready]")
            ready.append(await page.evaluate("performance.now()"))
            paints.append(
                await page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN")
            )
            await page.close()
    return statistics.median(paints), statistics.median(ready)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--renders", type=int, default=1000)
    arguments = parse(parser, argv, seconds=0.3, rounds=1, renders=20)
    path = chromium()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as directory:
        model = cached_model(SHAPE, directory)
        os.sched_setaffinity(0, cores[:2])
        command = [*PYCTL_SERVE, "-m", str(model), "-c", "65536", "-t", "1", "-np", "1"]
        with ServerProcess(command, Path(directory) / "log") as server:
            os.sched_setaffinity(0, cores[2:] or cores)
            n_files, n_bytes, sent = sizes(server.url)
            rows: list[tuple[object, ...]] = [
                ("files", n_files), ("bytes", f"{n_bytes:,}"), ("bytes sent, compressed", f"{sent:,}"),
            ]  # fmt: skip
            memory = renders(server, arguments.renders)
            if path is not None:
                paint, ready = asyncio.run(paint_ms(server.url, path, max(arguments.rounds // 2, 1)))
                rows.append((f"first paint, {LATENCY_MS} ms before each answer", f"{paint:.0f} ms"))
                rows.append(("until it can be used, likewise", f"{ready:.0f} ms"))
                worked = asyncio.run(work(server, path, 5 * arguments.seconds))
                found = asyncio.run(beside(server.url, path, arguments.seconds, arguments.rounds))
    show("The page", ("", ""), rows, keep="page-size" if arguments.keep else "")
    title = f"Memory of the server and its renderer over {arguments.renders:,} renders"
    columns = ("renders", "MiB", "since the first", "ms a text")
    show(title, columns, memory, keep="page-memory" if arguments.keep else "")
    if path is None:
        print("no chromium or no playwright: nothing was measured in a browser")
    else:
        used = ("", "ms a second", "of one core")
        show("Processor time of the server for a page", used, worked, keep="page-work" if arguments.keep else "")
        show_beside(found, "page" if arguments.keep else "")


if __name__ == "__main__":
    main()

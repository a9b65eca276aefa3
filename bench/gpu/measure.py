"""Measure pyctl and llama-server side by side, on a machine that prepare.py has prepared.

    DIR/python -m bench.gpu.measure DIR                          # everything
    DIR/python -m bench.gpu.measure DIR --only base kv --budget 500 --results OUT
    DIR/python -m bench.gpu.measure DIR --models tiny-hybrid --sizes 3000 1000 --long 6000 --ctx
    16384 --only base

Sections, the most telling first: defaults (first token and replies side by side with as few flags
as possible), base (first token, decode, prefill, memory, restarts at --sizes), held (returns on the
device), kv (copies in GB/s), memory (resident and counted bytes over many prompts, without a cache
directory), long (as base, at --long), exact (logits), card (defaults and an expert's flags within
24 GB). Each finding is written to gpu-side-by-side-<shape>.json and .md at once. The tables name
the sections that --budget left out.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bench.compare import MeasurementError, measured
from bench.gpu.machine import (
    available_mib,
    cached_share,
    describe,
    direct_rate,
    settle,
    storage_reads,
    vram_mib,
)
from bench.gpu.report import BARE, BY_DEFAULT, COLD, ONE_MESSAGE, OURS, PEER, RESTART, WARM_RESTART
from bench.gpu.run import N_DECODE, N_FIRST, QUESTION, Clock, Results, Run, Visit
from bench.gpu.servers import Server, llama_server, options_of, prepared_in, pyctl, weights_of
from bench.gpu.speculative import CHANCE_DRAFTS
from bench.gpu.workloads import Conversation, alternate, cut, edited, grow, once, restarted
from pyctl.llama.settings.draft_settings import AUTOMATIC_LENGTH
from pyctl.measure.process_stats import evict
from pyctl.measure.server_process import PYCTL_SERVE
from pyctl.processes.module_command import module_command
from tools.generator import SHAPES

REPOSITORY = Path(__file__).resolve().parents[2]
PREFILL = {"27b": 2400.0, "35b-a3b": 5000.0}
"""Tokens per second that the first estimate assumes; a tiny model on a CPU is in between."""

LOADING = {"27b": 10.0, "35b-a3b": 12.0}
"""Seconds until a server answers, likewise."""

CARD_MIB = 24_000
CARD_PROMPT = 60_000
CARD_SHARE = 0.7
"""MiB that a card of 24 GB has left besides the driver's, a prompt that fits into every context
there, and the share of drafts that are accepted.
"""

N_PROMPTS = 60
PROMPT_TOKENS = 2000
"""Prompts of the section memory, and tokens of each: with 27B, more than the default cache
holds.
"""

STREAMS = (1, 4, 16)
"""Blocks read at a time when only the drive is measured."""


@contextmanager
def tried(run: Run, section: str, what: str, server: Server) -> Iterator[None]:
    """End ``server`` whatever happens; its failure is a finding."""
    try:
        yield
    except (OSError, HTTPException, ValueError) as error:
        run.results.skip(section, what, f"failed: {str(error)[:300]}")
    finally:
        server.kill()


def side_by_side(run: Run, section: str, sizes: Sequence[int], *, thorough: bool) -> None:
    """Measure both servers, one after the other, with the same conversations.

    ``thorough`` adds a cold prompt of one message, prompts that pyctl does not cache, and
    llama-server after a restart, which then has no cache and evaluates everything.
    """
    for name in (OURS, PEER):
        if name not in run.options.servers or (name == PEER and run.llama_server is None):
            continue
        if not run.clock.fits(run.loading + run.clock.prefill(sizes[-1])):
            run.results.skip(section, name, "no time left")
            continue
        with tempfile.TemporaryDirectory(prefix="cache-", dir=run.work) as directory:
            cache = Path(directory)
            log = run.work / f"{run.shape}-{section}-{name}.log"
            flags = ["-m", str(run.model), *run.flags()]
            server = (
                pyctl(flags, cache, log)
                if name == OURS
                else llama_server(str(run.llama_server), flags, log)
            )
            with tried(run, section, name, server):
                one_server(run, section, server, sizes, cache, thorough=thorough)


def one_server(
    run: Run, section: str, server: Server, sizes: Sequence[int], cache: Path, *, thorough: bool
) -> None:
    """Measure a server with conversations of ``sizes`` tokens: growth, alternation, cuts, memory,
    and a restart; ``thorough`` adds decoding, a single long message and prompts without the cache.
    """
    vram = vram_mib()
    available = available_mib()
    server.start()
    run.loading = server.load_seconds + 1
    run.results.add(section, "flags", server=server.name, flags=" ".join(run.flags()))
    print(
        f"    {run.clock.elapsed:6.1f} s  {server.name} loaded in {server.load_seconds:.1f} s",
        flush=True,
    )
    visit = Visit(run, section, server)
    visit.memory("loaded", vram, available)
    # The first evaluation of a process also loads kernels, on both.
    server.request(Conversation("warm", 1200).messages, N_FIRST)

    conversations = []
    for size in sizes:
        conversation = Conversation(f"{run.shape} a", size)
        if visit.follow(grow(conversation)):
            conversations.append(conversation)
    if not conversations:
        return
    if thorough:
        visit.follow(alternate(conversations, rounds=2))
        visit.decode(conversations[-1])
        visit.follow(cut(conversations[-1]))
    visit.follow(alternate(conversations[:1], rounds=1))
    visit.follow(cut(conversations[0]))
    if thorough:
        document = Conversation(f"{run.shape} document", sizes[-1], one_message=True)
        visit.follow(once(document, ONE_MESSAGE))
        for size in sizes if server.name == OURS else ():
            visit.follow(once(Conversation(f"{run.shape} b", size), BARE), cache_prompt=False)
    visit.memory("end", vram, available)
    if server.name == OURS:
        restart_ours(run, section, visit, conversations, cache)
    elif thorough and run.clock.fits(run.loading):
        server.kill()
        server.start()
        visit.follow(restarted(conversations, RESTART))


def restart_ours(
    run: Run, section: str, visit: Visit, conversations: Sequence[Conversation], cache: Path
) -> None:
    """Kill and start again, once with the cache's files out of the page cache and once with them in
    it.
    """
    server = visit.server
    results = run.results
    written = settle(cache)
    files: list[Path] = []
    for way in (RESTART, WARM_RESTART):
        if not run.clock.fits(run.loading + 3):
            results.skip(section, way, "no time left")
            return
        server.kill()
        files = [
            path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > 2**16
        ]
        share = None
        if way == RESTART:
            evict(files)
            share = cached_share(files)
        server.start()
        results.add(
            section,
            "restart",
            way=way,
            load_s=server.load_seconds,
            files_bytes=written,
            page_cache=share,
        )
        for conversation in conversations:
            before = storage_reads(server.pid)
            if not visit.follow(restarted([conversation], way)):
                return
            if run.shape not in SHAPES:  # the size of a row is not known
                continue
            last = results.records_of("first token")[-1]
            shape = SHAPES[run.shape]
            size = last["cached"] * shape.row_bytes() + shape.state_bytes
            results.add(
                section,
                "disk restore",
                way=way,
                size=conversation.size,
                bytes=size,
                restore_ms=last["restore_ms"],
                read=storage_reads(server.pid) - before,
                source=last["source"],
            )
        settle(cache)
    server.kill()
    files = [path for path in files if path.exists()]  # recent prompts come and go
    for streams in STREAMS:
        if run.clock.fits(5):
            rate = direct_rate(files, streams)
            if rate is not None:
                results.add(section, "drive", streams=streams, gb_per_second=rate)


def defaults(run: Run) -> None:
    """Measure both servers with the flags that they need, and four sequences."""
    small = min(run.options.sizes)
    large = max(run.options.sizes)
    flags = ["-m", str(run.model), "-ngl", "99", "-fa", "on", "-np", "4", "--kv-unified"]
    flags += ["-c", str(2 * (small + large))]
    for name in (OURS, PEER):
        if name not in run.options.servers or (name == PEER and run.llama_server is None):
            continue
        if not run.clock.fits(run.loading + run.clock.prefill(large)):
            run.results.skip("defaults", name, "no time left")
            continue
        log = run.work / f"{run.shape}-defaults-{name}.log"
        flags_of = [*flags, *run.options.flags]
        server = (
            pyctl(flags_of, None, log)
            if name == OURS
            else llama_server(str(run.llama_server), flags_of, log)
        )
        with tried(run, "defaults", name, server):
            vram = vram_mib()
            available = available_mib()
            server.start()
            run.loading = server.load_seconds + 1
            visit = Visit(run, "defaults", server, BY_DEFAULT)
            server.request(Conversation("warm", 1200).messages, N_FIRST)
            visit.follow(grow(Conversation(f"{run.shape} a", large)))
            for seed in "efg":
                visit.follow(edited(Conversation(f"{run.shape} {seed}", small)))
            for n_streams in (4, 4, 4, 1):  # the first time loads kernels
                visit.streams(n_streams)
            visit.memory("end", vram, available)


def held(run: Run) -> None:
    """Measure returns to conversations on the device by `bench.held`, in a separate process."""
    for record in alone(
        run, "held", 60, "bench.held", ["--tokens", *map(str, sorted(run.options.sizes))]
    ):
        run.results.add("held", "return", **record)


def copies(run: Run) -> None:
    """Measure rows and state by `bench.kv`, in a separate process."""
    sizes = [n // 512 * 512 for n in (min(run.options.sizes), max(run.options.sizes))]
    for rate in alone(run, "kv", 40, "bench.kv", ["--tokens", *map(str, sizes)]):
        run.results.add(
            "kv",
            "copy",
            what=rate["what"],
            tokens=rate["n"],
            mb=rate["size"] / 1e6,
            copy_out=rate["copy_out"],
            out=rate["out"],
            out_share=rate["out"] / rate["copy_out"],
            copy_in=rate["copy_in"],
            back=rate["back"],
            back_share=rate["back"] / rate["copy_in"],
        )


def memory(run: Run) -> None:
    """Measure the memory of pyctl over many prompts, without writes to disk."""
    server = pyctl(["-m", str(run.model), *run.flags()], None, run.work / f"{run.shape}-memory.log")
    vram = vram_mib()
    available = available_mib()
    with tried(run, "memory", "prompts", server):
        server.start()
        visit = Visit(run, "memory", server)
        server.request(Conversation("warm", 1200).messages, N_FIRST)
        visit.memory("loaded", vram, available)
        size = min(PROMPT_TOKENS, *run.options.sizes)
        for number in range(1, N_PROMPTS + 1):
            if not run.clock.fits(run.clock.prefill(size)):
                return run.results.skip(
                    "memory", f"{N_PROMPTS - number + 1} prompts", "no time left"
                )
            server.request(Conversation(f"{run.shape} {number}", size).messages, N_FIRST)
            if number % 10 == 0:
                visit.memory(f"{number} prompts", vram, available)


def exact(run: Run) -> None:
    """Measure logits by `bench.exact`, in a separate process."""
    for record in alone(
        run, "exact", 60, "bench.exact", ["--tokens", str(run.options.exact_tokens)]
    ):
        run.results.add("exact", "exact", tokens=run.options.exact_tokens, **record)


def alone(
    run: Run, section: str, seconds: float, module: str, arguments: list[str]
) -> list[dict[str, Any]]:
    """Return the results of a script with --json; none, and a record of that, if time runs out or
    the script fails.
    """
    if not run.clock.fits(seconds):
        run.results.skip(section, section, "no time left")
        return []
    try:
        return measured(module, ["-m", str(run.model), *arguments], REPOSITORY)
    except MeasurementError as error:
        run.results.skip(section, section, f"failed: {str(error)[-300:]}")
        return []


@contextmanager
def small_card(left_mib: int = CARD_MIB) -> Iterator[None]:
    """Leave ``left_mib`` of device memory, by default as a card of 24 GB. Raises OSError if it
    cannot.
    """
    arguments = [*module_command("bench.cuda"), str(left_mib)]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise OSError("the memory of the GPU could not be taken")
            yield
        finally:
            process.stdin.close()


def card_lines(shape: str) -> dict[str, tuple[list[str], tuple[str, ...]]]:
    """Return by name the flags after `-m FILE` on a card of 24 GB (docs/24gb.md), and the program:
    heads have random weights here, so `CARD_SHARE` of their drafts are accepted by chance.
    """
    quantised = ["-c", "131072", "-ctk", "q8_0", "-ctv", "q8_0"]
    lines: dict[str, tuple[list[str], tuple[str, ...]]] = {"defaults": ([], PYCTL_SERVE)}
    if not shape.endswith("-nextn"):
        return {**lines, "expert": (quantised, PYCTL_SERVE)}

    def drafting(n: int) -> tuple[str, ...]:
        return (*CHANCE_DRAFTS, f"{sum(CARD_SHARE**i for i in range(n + 1)):g}", str(n))

    if shape.startswith("35b"):
        quantised[1] = "98304"
    quantised += ["-np", "1", "--spec-type", "draft-mtp"]
    return {
        "defaults": ([], drafting(AUTOMATIC_LENGTH)),
        "defaults, no drafts": (["--spec-type", "none"], PYCTL_SERVE),
        "expert": (quantised, drafting(3)),
    }


def card(run: Run) -> None:
    """Measure the defaults and an expert's line with the memory of a 24 GB card: a long prompt, one
    more turn, and a reply.
    """
    n = min(run.options.long, CARD_PROMPT)
    if vram_mib() is None:
        return run.results.skip("card", "24 GB", "no GPU")
    for number, (name, (flags, program)) in enumerate(card_lines(run.shape).items()):
        if not run.clock.fits(run.loading + run.clock.prefill(n) + 15):
            run.results.skip("card", name, "no time left")
            continue
        log = run.work / f"{run.shape}-card-{number}.log"
        server = pyctl(["-m", str(run.model), *flags], None, log, program)
        with (
            tried(run, "card", name, server),
            small_card(),
            closing(Conversation(run.shape, n).ask(COLD, n)) as steps,
        ):
            before = vram_mib() or 0.0
            available = available_mib()
            server.start()
            step = next(steps)
            cold = server.request(step.messages, N_FIRST)
            following = [*step.messages, {"role": "assistant", "content": cold.text}, QUESTION]
            warm = server.request(following, N_FIRST)
            reply = server.request(following, N_DECODE, ignore_eos=True)
            run.results.add(
                "card",
                "small card",
                name=name,
                flags=" ".join(flags),
                limit_mib=CARD_MIB,
                vram_mib=(vram_mib() or 0.0) - before,
                ram_mib=available - available_mib(),
                context=server.get("/props")["default_generation_settings"]["n_ctx"],
                load_s=server.load_seconds,
                prompt=cold.cached + cold.evaluated,
                first_ms=cold.first_ms,
                next_ms=warm.first_ms,
                next_evaluated=warm.evaluated,
                tokens_per_second=(reply.n_predicted - 1) / reply.decode_ms * 1e3
                if reply.decode_ms
                else None,
            )
            server.kill()  # before the card is whole again


def base(run: Run) -> None:
    side_by_side(run, "base", run.options.sizes, thorough=True)


def long(run: Run) -> None:
    side_by_side(run, "long", [run.options.long, min(2048, run.options.sizes[-1])], thorough=False)


WORK: dict[str, Callable[[Run], None]] = {
    "defaults": defaults,
    "base": base,
    "held": held,
    "kv": copies,
    "memory": memory,
    "long": long,
    "exact": exact,
    "card": card,
}
"""Functions by section, the most telling first."""


def jobs(runs: Sequence[Run], only: Sequence[str]) -> list[tuple[str, Run, Callable[[Run], None]]]:
    """Return (section, model, function) of each job, the most telling first."""
    return [
        (section, run, work) for section, work in WORK.items() if section in only for run in runs
    ]


def wait_for(model: Path, clock: Clock) -> bool:
    """Wait for the model file; False when the time is up, or at once if its writer has ended."""
    writer = model.with_suffix(".pid")
    while not model.exists():
        alive = writer.exists() and Path(f"/proc/{writer.read_text()}").exists()
        if not (alive or model.exists()) or not clock.fits(20):
            return False
        time.sleep(0.5)
    return True


def main() -> None:
    """Measure each section on all models, the most telling section first, until the budget ends.
    Each finding is written at once.
    """
    parser = options_of(__doc__, 3600)
    parser.add_argument("directory", type=Path, help="the directory of prepare.py")
    parser.add_argument("--only", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--models", nargs="+", metavar="SHAPE", help="default: the prepared ones")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[32768, 8192], help="conversations of base, tokens"
    )
    parser.add_argument(
        "--long", type=int, default=100_000, help="conversation of long and card, tokens"
    )
    parser.add_argument("--ctx", type=int, default=120_000, help="-c of both servers")
    parser.add_argument("--exact-tokens", type=int, default=3000)
    options = parser.parse_args()
    prepared = prepared_in(options.directory)
    work = options.directory / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()

    began = time.monotonic()
    runs = []
    for shape in options.models or prepared["models"]:
        clock = Clock(began + options.budget, PREFILL.get(shape, 4000.0))
        results = Results(options.results, shape, describe(weights_of(shape)))
        runs.append(
            Run(
                shape,
                Path(prepared["models"][shape]),
                prepared["llama_server"],
                options,
                results,
                clock,
                work,
            )
        )
    for section, run, work_on in jobs(runs, options.only):
        print(f"{run.clock.elapsed:8.1f} s  {run.shape}: {section}", flush=True)
        run.results.begin(section)
        if wait_for(run.model, run.clock):
            work_on(run)
        else:
            run.results.skip(section, section, "the model is not there")
    print(f"\n{time.monotonic() - began:.0f} s; tables in {options.results}")


if __name__ == "__main__":
    main()

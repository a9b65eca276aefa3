"""Both servers through the same conversations: first tokens, decoding, memory, and restarts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

from bench.gpu.drive import cached_share, direct_rate, evict, settle
from bench.gpu.machine import available_mib, storage_reads, vram_mib
from bench.gpu.report import BARE, ONE_MESSAGE, OURS, PEER, RESTART, WARM_RESTART
from bench.gpu.servers import Server, llama_server, pyctl
from bench.gpu.visit import N_FIRST, Run, Visit
from bench.gpu.workloads import Conversation, alternate, cut, grow, once, restarted
from tools.generator import SHAPES

__all__ = ["side_by_side"]

STREAMS = (1, 4, 16)
"""Blocks read at a time when the drive is measured alone."""


def side_by_side(run: Run, section: str, sizes: Sequence[int], *, thorough: bool) -> None:
    """Both servers, one after the other, through the same conversations.

    ``thorough`` adds a cold prompt of one message, prompts that pyctl does not cache, and llama-server after a restart,
    which knows nothing then and evaluates everything.
    """
    for name in (OURS, PEER):
        if name not in run.options.servers or (name == PEER and run.llama_server is None):
            continue
        if not run.clock.fits(run.loading + run.clock.prefill(sizes[-1])):
            run.results.skip(section, name, "no time left")
            continue
        with tempfile.TemporaryDirectory(prefix="cache-", dir=run.work) as directory:
            cache, log = Path(directory), run.work / f"{run.shape}-{section}-{name}.log"
            flags = ["-m", str(run.model), *run.flags()]
            server = pyctl(flags, cache, log) if name == OURS else llama_server(str(run.llama_server), flags, log)
            try:
                one_server(run, section, server, sizes, cache, thorough=thorough)
            except (OSError, HTTPException, ValueError) as error:
                run.results.skip(section, name, f"failed: {str(error)[:200]}")
            finally:
                server.kill()


def one_server(run: Run, section: str, server: Server, sizes: Sequence[int], cache: Path, *, thorough: bool) -> None:
    vram, available = vram_mib(), available_mib()
    server.start()
    run.loading = server.load_seconds + 1
    run.results.add(section, "flags", server=server.name, flags=" ".join(run.flags()))
    print(f"    {run.clock.elapsed:6.1f} s  {server.name} loaded in {server.load_seconds:.1f} s", flush=True)
    visit = Visit(run, section, server)
    visit.memory("loaded", vram, available)
    # The first evaluation of a process also loads kernels, on both.
    server.ask(Conversation("warm", 1200).messages, N_FIRST)

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


def restart_ours(run: Run, section: str, visit: Visit, conversations: Sequence[Conversation], cache: Path) -> None:
    """Kill and start again, once with the cache's files out of the page cache and once with them in it."""
    server, results = visit.server, run.results
    written = settle(cache)
    files: list[Path] = []
    for way in (RESTART, WARM_RESTART):
        if not run.clock.fits(run.loading + 3):
            results.skip(section, way, "no time left")
            return
        server.kill()
        files = [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > 2**16]
        share = None
        if way == RESTART:
            evict(files)
            share = cached_share(files)
        server.start()
        results.add(section, "restart", way=way, load_s=server.load_seconds, files_bytes=written, page_cache=share)
        for conversation in conversations:
            before = storage_reads(server.pid)
            if not visit.follow(restarted([conversation], way)):
                return
            last = results.records_of("first token")[-1]
            shape = SHAPES[run.shape]
            size = last["cached"] * shape.row_bytes() + shape.state_bytes
            results.add(
                section, "disk restore", way=way, size=conversation.size, bytes=size, restore_ms=last["restore_ms"],
                read=storage_reads(server.pid) - before, source=last["source"],
            )  # fmt: skip
        settle(cache)
    server.kill()
    for streams in STREAMS:
        if run.clock.fits(5):
            rate = direct_rate(files, streams)
            if rate is not None:
                results.add(section, "drive", streams=streams, gb_per_second=rate)

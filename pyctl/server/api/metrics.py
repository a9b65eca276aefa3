"""Numbers for Prometheus: llama-server's own, by their names, and the cache's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from pyctl.cache import CacheView
from pyctl.engine.engine_stats import EngineStats
from pyctl.errors import NotSupportedError
from pyctl.server.memory import resident_bytes
from pyctl.server.service import Service

__all__ = ["prometheus_text", "show"]

_STARTED = int(time.time())


class Metric(NamedTuple):
    """One metric; ``values`` are by what stands in braces after the name."""

    name: str
    kind: str
    help: str
    values: Mapping[str, float]


async def show(service: Service, request: Request) -> Response:
    """GET /metrics in Prometheus' text format 0.0.4; rates are those since the scrape before."""
    if not service.shared.settings.show_metrics:
        raise NotSupportedError("This server does not support metrics endpoint. Start it with `--metrics`")
    stats = await asyncio.wrap_future(service.admin.stats())
    headers = {"content-type": "text/plain; version=0.0.4", "process-start-time-unix": str(_STARTED)}
    text = prometheus_text(stats, {"resident": resident_bytes(), **service.counted_bytes(stats.memory)})
    return Response(text, headers=headers)


def prometheus_text(stats: EngineStats, memory: Mapping[str, int]) -> str:
    """All metrics, as Prometheus reads them; ``memory`` are bytes by what they are for, and those that are resident."""
    return "".join(
        _lines(metric)
        for metric in (*_llama(stats), *_company(stats), *_pool(stats), *_cache(stats.cache), *_memory(memory))
    )


def _lines(metric: Metric) -> str:
    head = f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
    return head + "".join(f"{metric.name}{labels} {value:.12g}\n" for labels, value in metric.values.items())


def _llama(stats: EngineStats) -> Iterator[Metric]:
    total, recent = stats.total, stats.recent
    drafts = total.drafts
    for name, text, value in (
        ("prompt_tokens_total", "Number of prompt tokens processed, excluding cached tokens", total.n_evaluated),
        ("prompt_tokens_cached_total", "Number of prompt tokens reused from the cache", total.n_cached),
        ("prompt_seconds_total", "Total time spent processing prompts", total.prompt_ms / 1e3),
        ("tokens_predicted_total", "Number of generation tokens processed", total.n_predicted),
        ("tokens_predicted_seconds_total", "Total time spent generating tokens", total.predicted_ms / 1e3),
        ("n_decode_total", "Total number of llama_decode() calls", total.n_calls),
        ("n_tokens_max", "Largest observed sequence length (prompt + generation)", total.n_longest),
        ("spec_decode_num_draft_tokens_total", "Speculative: Total draft tokens generated", drafts.n_drafted),
        ("spec_decode_num_accepted_tokens_total", "Speculative: Total draft tokens accepted", drafts.n_accepted),
        ("spec_decode_num_drafts_total", "Speculative: Total verification steps", drafts.n_drafts),
    ):
        yield Metric(f"llamacpp:{name}", "counter", text, {"": value})
    for name, text, value in (
        ("prompt_tokens_seconds", "Average prompt throughput in tokens/s", _rate(recent.n_evaluated, recent.prompt_ms)),
        (
            "predicted_tokens_seconds",
            "Average generation throughput in tokens/s",
            _rate(recent.n_predicted, recent.predicted_ms),
        ),
        ("requests_processing", "Number of requests processing", stats.n_processing),
        ("requests_deferred", "Number of requests deferred", stats.n_waiting),
        (
            "n_busy_slots_per_decode",
            "Average number of busy slots per llama_decode() call",
            total.n_busy / max(total.n_calls, 1),
        ),
    ):
        yield Metric(f"llamacpp:{name}", "gauge", text, {"": value})
    if drafts.by_position:
        name, text = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total", "Accepted tokens per draft position"
        yield Metric(name, "counter", text, {f'{{position="{i}"}}': n for i, n in enumerate(drafts.by_position)})


def _company(stats: EngineStats) -> Iterator[Metric]:
    suspensions = {"": stats.total.n_suspended}
    yield Metric("pyctl:suspensions_total", "counter", "Replies that had to give their cells to others", suspensions)
    yield Metric("pyctl:suspended", "gauge", "Such replies that wait now", {"": stats.n_suspended})
    held = {"": stats.suspended_bytes}
    yield Metric("pyctl:suspended_bytes", "gauge", "Bytes that these need, part of the cache's", held)
    yield Metric("pyctl:cells", "gauge", "Tokens that fit into the context", {"": stats.n_cells})
    yield Metric("pyctl:cells_used", "gauge", "Tokens in the context", {"": stats.n_cells_used})
    held = {"": stats.n_cells_held}
    yield Metric("pyctl:cells_held", "gauge", "Cells that rows of snapshots take, and no sequence", held)
    device = {f'{{event="{name}"}}': n for name, n in asdict(stats.device).items()}
    yield Metric(
        "pyctl:device_rows_total", "counter", "Rows of snapshots on the device, by what became of them", device
    )


def _pool(stats: EngineStats) -> Iterator[Metric]:
    if stats.streamed is not None:
        n_bytes, seconds = {"": stats.streamed.n_bytes}, {"": stats.streamed.wait_ms / 1e3}
        yield Metric("pyctl:streamed_bytes_total", "counter", "Bytes of K and V that were read from RAM", n_bytes)
        yield Metric("pyctl:stream_wait_seconds_total", "counter", "Seconds that evaluation waited for them", seconds)
        selected, fetched = {"": stats.streamed.n_selected}, {"": stats.streamed.n_fetched}
        yield Metric("pyctl:selected_chunks_total", "counter", "Chunks that generated tokens attended to", selected)
        yield Metric("pyctl:fetched_chunks_total", "counter", "Of these, those that were read from RAM", fetched)


def _cache(view: CacheView) -> Iterator[Metric]:
    totals, disk = view.totals, view.disk
    by_source = {f'{{source="{source}"}}': n for source, n in totals.hits.items()}
    restored = {f'{{source="{source}"}}': n for source, n in totals.n_cached.items()}
    evaluated = {"": totals.n_evaluated}
    yield Metric("pyctl:cache_requests_total", "counter", "Requests served", {"": totals.requests})
    yield Metric("pyctl:cache_hits_total", "counter", "Requests resumed from a prefix, by its place", by_source)
    yield Metric("pyctl:cache_restored_tokens_total", "counter", "Prompt tokens restored, by source", restored)
    yield Metric("pyctl:cache_evaluated_tokens_total", "counter", "Prompt tokens evaluated", evaluated)
    warmed = {"": totals.n_warmed}
    yield Metric("pyctl:warmed_tokens_total", "counter", "Tokens evaluated before a request needed them", warmed)
    used = {"": totals.n_warmed_used}
    yield Metric("pyctl:warmed_tokens_used_total", "counter", "Such tokens that a request then resumed from", used)
    yield Metric("pyctl:warm_ups_total", "counter", "Prompts evaluated before a request came", {"": totals.n_warm_ups})
    yield Metric("pyctl:cache_saves_total", "counter", "Snapshots taken", {"": totals.n_saved})
    yield Metric("pyctl:cache_evictions_total", "counter", "Snapshots evicted from RAM", {"": view.n_evicted})
    refused = {"": view.n_refused}
    yield Metric("pyctl:cache_refused_total", "counter", "Snapshots that could not fit into the budget", refused)
    failed = {"": totals.failed_restores}
    yield Metric("pyctl:cache_failed_restores_total", "counter", "Snapshots that could not be restored", failed)
    yield Metric("pyctl:cache_snapshots", "gauge", "Snapshots in RAM", {"": len(view.snapshots)})
    yield Metric("pyctl:cache_slots", "gauge", "Places for snapshots in RAM", {"": view.n_slots})
    yield Metric("pyctl:cache_ram_bytes", "gauge", "Bytes of the snapshots in RAM", {"": view.n_bytes})
    yield Metric("pyctl:cache_ram_budget_bytes", "gauge", "What they may take, -1 for no limit", {"": view.budget})
    if disk is not None:
        yield Metric("pyctl:cache_disk_snapshots", "gauge", "Lengths with a snapshot on disk", {"": disk.in_use})
        yield Metric("pyctl:cache_disk_bytes", "gauge", "Bytes of the snapshots on disk", {"": disk.n_bytes})
        yield Metric("pyctl:cache_disk_budget_bytes", "gauge", "What they may take, -1 for no limit", {"": disk.budget})
        yield Metric("pyctl:cache_disk_reads_total", "counter", "Snapshots read from disk", {"": disk.hits})
        yield Metric("pyctl:cache_disk_written_bytes_total", "counter", "Bytes written to disk", {"": disk.written})
        yield Metric("pyctl:cache_disk_waiting", "gauge", "Snapshots that wait to be written", {"": disk.waiting})
        spilled, n_bytes = {"": disk.spilled}, {"": disk.spilled_bytes}
        yield Metric("pyctl:cache_disk_spilled_total", "counter", "Snapshots written as they left RAM", spilled)
        yield Metric("pyctl:cache_disk_spilled_bytes_total", "counter", "Bytes written as they left RAM", n_bytes)
        given_up = {"": disk.given_up}
        yield Metric("pyctl:cache_disk_given_up_total", "counter", "Snapshots not written for want of time", given_up)
        failed = {"": disk.failed}
        yield Metric("pyctl:cache_disk_failed_writes_total", "counter", "Snapshots that could not be written", failed)
        yield Metric("pyctl:cache_disk_damaged_total", "counter", "Files found damaged", {"": disk.damaged})


def _memory(memory: Mapping[str, int]) -> Iterator[Metric]:
    resident = {"": memory["resident"]}
    yield Metric("pyctl:memory_resident_bytes", "gauge", "Bytes of this process in the machine's memory", resident)
    counted = {f'{{part="{part}"}}': n for part, n in memory.items() if part != "resident"}
    yield Metric(
        "pyctl:memory_bytes", "gauge", "Bytes by what they are for; blocks are in arena or in addition to it", counted
    )


def _rate(count: float, ms: float) -> float:
    return count * 1e3 / ms if ms > 0 else 0.0

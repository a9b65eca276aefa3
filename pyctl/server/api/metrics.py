"""Numbers for Prometheus: llama-server's own, by their names, and the cache's."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from pyctl.cache.cache_stats import CacheView
from pyctl.cache.ports import DiskView
from pyctl.engine.canary.canary_counts import CanaryView
from pyctl.engine.engine_stats import EngineStats
from pyctl.engine.histograms import Histogram, ReplyHistograms
from pyctl.errors import NotSupportedError
from pyctl.processes.process_memory import resident_bytes
from pyctl.receipts.receipt_store import ReceiptCounts
from pyctl.server.app_state import AppState, HttpService
from pyctl.server.models import Models
from pyctl.server.request_span import SpanCounts
from pyctl.server.threads import ThreadCounts

__all__ = ["canary_metrics", "engine_metrics", "prometheus_text", "show", "show_all"]

_STARTED = int(time.time())


class Metric(NamedTuple):
    """A metric; ``values`` are by the rest of the name, such as ``{source="ram"}`` or
    ``_sum``.
    """

    name: str
    kind: str
    help: str
    values: Mapping[str, float]


async def show(service: HttpService, request: Request) -> Response:
    """Answer GET /metrics in Prometheus' text format 0.0.4; rates are those since the previous
    scrape.
    """
    _check(service.shared)
    return _response(await _collect_metrics(service, request))


async def show_all(models: Models, request: Request) -> Response:
    """Answer GET /metrics of all models that have been loaded, each with the label ``model``."""
    _check(models.shared)
    merged: dict[str, Metric] = {}
    for model in models:
        loaded = _gauge(
            "pyctl_model_loaded",
            "Whether the model is loaded",
            float(models.order.is_loaded(model.name)),
        )
        metrics = [loaded]
        if model.service is not None:
            metrics += await _collect_metrics(model.service, request)
        for metric in metrics:
            earlier = merged[metric.name].values if metric.name in merged else {}
            labelled = _labelled(model.name, metric.values)
            merged[metric.name] = metric._replace(values={**earlier, **labelled})
    return _response(merged.values())


def _check(shared: AppState) -> None:
    if not shared.settings.show_metrics:
        raise NotSupportedError(
            "This server does not support metrics endpoint. Start it with `--metrics`"
        )


async def _collect_metrics(service: HttpService, request: Request) -> list[Metric]:
    stats = await asyncio.wrap_future(service.admin.stats())
    memory = {"resident": resident_bytes(), **service.counted_bytes(stats.memory)}
    canary = await asyncio.wrap_future(service.admin.canary())
    metrics = [*engine_metrics(stats, memory), *canary_metrics(canary)]
    metrics += _threads(service.shared.threads.counts())
    if service.shared.settings.otel:
        metrics += _spans(service.shared.span_counts)
    if service.receipts is not None:
        storage = service.shared.pool.storage
        counts = await storage.run(request, service.receipts.store.counts)
        metrics += _receipts(counts, service.receipts.n_dropped)
    return metrics


def _receipts(counts: ReceiptCounts, n_dropped: int) -> list[Metric]:
    """Return the metrics of receipts, by the files of their directory."""
    return [
        _gauge("pyctl_receipts", "Receipts of the last day in the cache directory", counts.kept),
        _gauge("pyctl_receipts_bytes", "Bytes of their files", counts.n_bytes),
        _gauge("pyctl_receipts_verified", "Receipts that were evaluated again", counts.verified),
        _gauge("pyctl_receipts_differing", "Those with other logits", counts.differing),
        _counter(
            "pyctl_receipts_dropped_total",
            "Exact replies without a receipt, as it could not be written",
            n_dropped,
        ),
    ]


def _threads(counts: ThreadCounts) -> list[Metric]:
    """Return the metrics of conversations that clients continue by id, of all models together."""
    return [
        _gauge("pyctl_threads", "Conversations that clients continue by id", counts.n_kept),
        _gauge("pyctl_threads_bytes", "Bytes of their texts", counts.n_bytes),
        _counter("pyctl_threads_created_total", "Such conversations created", counts.n_created),
        _counter("pyctl_threads_continued_total", "Turns that continued one", counts.n_continued),
        _counter(
            "pyctl_threads_forgotten_total",
            "Those forgotten when there was no more room",
            counts.n_forgotten,
        ),
        _counter("pyctl_threads_lost_total", "Turns of one that was not here", counts.n_lost),
    ]


def _spans(counts: SpanCounts) -> list[Metric]:
    """Return the metrics of spans of requests, of all models together."""
    results = {
        "exported": counts.n_exported,
        "failed": counts.n_failed,
        "dropped": counts.n_dropped,
    }
    return [
        _counter(
            "pyctl_spans_total", "Spans of requests, by what became of them", _by("result", results)
        ),
        _gauge("pyctl_spans_waiting", "Spans that wait for the collector", counts.n_waiting),
    ]


def _response(metrics: Iterable[Metric]) -> Response:
    headers = {
        "content-type": "text/plain; version=0.0.4",
        "process-start-time-unix": str(_STARTED),
    }
    return Response(prometheus_text(metrics), headers=headers)


def prometheus_text(metrics: Iterable[Metric]) -> str:
    """Return ``metrics`` in Prometheus' text format 0.0.4."""
    return "".join(map(_lines, metrics))


def engine_metrics(stats: EngineStats, memory: Mapping[str, int]) -> list[Metric]:
    """Return all metrics of one model; ``memory`` are bytes by use, and the resident ones."""
    return [
        *_llama(stats),
        *_scheduling(stats),
        *_cache(stats.cache),
        *_disk(stats.cache.disk),
        *_memory(memory),
    ]


def _labelled(model: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return ``values`` with the label ``model`` first in their braces."""
    name = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    labelled = {}
    for rest, value in values.items():
        suffix, _, labels = rest.removesuffix("}").partition("{")
        labelled[suffix + "{" + ",".join(filter(None, (f'model="{name}"', labels))) + "}"] = value
    return labelled


def _lines(metric: Metric) -> str:
    head = f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
    return head + "".join(
        f"{metric.name}{labels} {value:.12g}\n" for labels, value in metric.values.items()
    )


def _counter(name: str, text: str, values: float | Mapping[str, float]) -> Metric:
    return Metric(name, "counter", text, values if isinstance(values, Mapping) else {"": values})


def _gauge(name: str, text: str, values: float | Mapping[str, float]) -> Metric:
    return Metric(name, "gauge", text, values if isinstance(values, Mapping) else {"": values})


def _histogram(name: str, text: str, of: Histogram | Mapping[str, Histogram]) -> Metric:
    """Return cumulative counts by upper bound, as Prometheus' text format has them; of several
    histograms, each with its labels, such as ``source="ram"``.
    """
    labelled = {"": of} if isinstance(of, Histogram) else of
    values: dict[str, float] = {}
    for labels, histogram in labelled.items():
        before = f"{labels}," if labels else ""
        after = f"{{{labels}}}" if labels else ""
        counts = itertools.accumulate(histogram.counts)
        bounds = (*(f"{bound:g}" for bound in histogram.bounds), "+Inf")
        for bound, n in zip(bounds, counts, strict=True):
            values[f'_bucket{{{before}le="{bound}"}}'] = n
        values[f"_sum{after}"] = histogram.total
        values[f"_count{after}"] = sum(histogram.counts)
    return Metric(name, "histogram", text, values)


def _by(label: str, values: Mapping[Any, float]) -> dict[str, float]:
    """Return ``values`` by the labels in braces that follow the name."""
    return {f'{{{label}="{name}"}}': n for name, n in values.items()}


def _llama(stats: EngineStats) -> Iterator[Metric]:
    """Yield llama-server's metrics, under its names: counters since the start, rates since the
    previous scrape.
    """
    total = stats.total
    recent = stats.recent
    drafts = total.drafts
    busy = total.n_busy / max(total.n_calls, 1)
    prompt_rate = _rate(recent.n_evaluated, recent.prompt_ms)
    rate = _rate(recent.n_predicted, recent.predicted_ms)
    for name, text, value in (
        (
            "prompt_tokens_total",
            "Number of prompt tokens processed, excluding cached tokens",
            total.n_evaluated,
        ),
        (
            "prompt_tokens_cached_total",
            "Number of prompt tokens reused from the cache",
            total.n_cached,
        ),
        ("prompt_seconds_total", "Total time spent processing prompts", total.prompt_ms / 1e3),
        ("tokens_predicted_total", "Number of generation tokens processed", total.n_predicted),
        (
            "tokens_predicted_seconds_total",
            "Total time spent generating tokens",
            total.predicted_ms / 1e3,
        ),
        ("n_decode_total", "Total number of llama_decode() calls", total.n_calls),
        ("n_tokens_max", "Largest observed sequence length (prompt + generation)", total.n_longest),
        (
            "spec_decode_num_draft_tokens_total",
            "Speculative: Total draft tokens generated",
            drafts.n_drafted,
        ),
        (
            "spec_decode_num_accepted_tokens_total",
            "Speculative: Total draft tokens accepted",
            drafts.n_accepted,
        ),
        ("spec_decode_num_drafts_total", "Speculative: Total verification steps", drafts.n_drafts),
    ):
        yield _counter(f"llamacpp:{name}", text, value)
    for name, text, value in (
        ("prompt_tokens_seconds", "Average prompt throughput in tokens/s", prompt_rate),
        ("predicted_tokens_seconds", "Average generation throughput in tokens/s", rate),
        ("requests_processing", "Number of requests processing", stats.n_processing),
        ("requests_deferred", "Number of requests deferred", stats.n_waiting),
        ("n_busy_slots_per_decode", "Average number of busy slots per llama_decode() call", busy),
    ):
        yield _gauge(f"llamacpp:{name}", text, value)
    if drafts.by_position:
        name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
        text = "Accepted tokens per draft position"
        yield _counter(
            name, text, _by("position", {str(i): n for i, n in enumerate(drafts.by_position)})
        )


def _scheduling(stats: EngineStats) -> Iterator[Metric]:
    """Yield the metrics of the scheduler: first tokens, suspended replies, and cells."""
    text = "Seconds from the arrival of a request to its first token"
    yield _histogram("pyctl_first_token_seconds", text, stats.total.replies.all_first_tokens)
    yield from _replies(stats.total.replies)
    yield _counter(
        "pyctl_suspensions_total",
        "Replies that had to give their cells to others",
        stats.total.n_suspended,
    )
    yield _gauge("pyctl_suspended", "Such replies that wait now", stats.n_suspended)
    yield _counter("pyctl_loops_total", "Replies that repeat themselves", stats.total.n_loops)
    yield _counter(
        "pyctl_loops_ended_total",
        "Replies that --loop-guard ended",
        stats.total.n_loops_ended,
    )
    turns = "Turns with --exact that ended for another request"
    yield _counter("pyctl_turns_yielded_total", turns, stats.total.n_turns_yielded)
    yield _gauge(
        "pyctl_suspended_bytes", "Bytes that these need, part of the cache's", stats.suspended_bytes
    )
    yield _gauge("pyctl_context_tokens", "Tokens that fit into the context", stats.n_cells)
    yield _gauge("pyctl_context_tokens_used", "Tokens in the context", stats.n_cells_used)
    yield _gauge(
        "pyctl_context_tokens_held",
        "Cells that rows of snapshots take, and no sequence",
        stats.n_cells_held,
    )
    device = _by("event", asdict(stats.device))
    yield _counter(
        "pyctl_device_rows_total", "Rows of snapshots on the device, by their outcome", device
    )


def _replies(replies: ReplyHistograms) -> Iterator[Metric]:
    """Yield the histograms of replies: OpenTelemetry's of GenAI servers, as Prometheus spells their
    names, and those that it does not define.
    """
    first_tokens = {
        f'source="{source}"': histogram for source, histogram in replies.first_tokens.items()
    }
    for name, text, of in (
        (
            "gen_ai_server_time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token, by where it resumed",
            first_tokens,
        ),
        (
            "gen_ai_server_time_per_output_token_seconds",
            "Seconds per token after the first one",
            replies.token_seconds,
        ),
        (
            "gen_ai_server_request_duration_seconds",
            "Seconds from the arrival of a request to its end",
            replies.durations,
        ),
        (
            "pyctl_queue_seconds",
            "Seconds from the arrival of a request to the start of its work",
            replies.queued,
        ),
        ("pyctl_reply_tokens_per_second", "Tokens per second after the first one", replies.rates),
    ):
        yield _histogram(name, text, of)


def _cache(view: CacheView) -> Iterator[Metric]:
    """Yield the metrics of the prefix cache in RAM; sizes are bytes."""
    totals = view.totals
    for name, text, values in (
        ("cache_requests_total", "Requests served", totals.requests),
        (
            "cache_hits_total",
            "Requests resumed from a prefix, by its place",
            _by("source", totals.hits),
        ),
        (
            "cache_restored_tokens_total",
            "Prompt tokens restored, by source",
            _by("source", totals.n_cached),
        ),
        ("cache_evaluated_tokens_total", "Prompt tokens evaluated", totals.n_evaluated),
        (
            "cache_saved_seconds_total",
            "Seconds that clients did not wait, estimated",
            totals.saved_seconds,
        ),
        (
            "prewarmed_tokens_total",
            "Tokens evaluated before a request needed them",
            totals.n_prewarmed,
        ),
        (
            "prewarmed_tokens_used_total",
            "Such tokens that a request then resumed from",
            totals.n_prewarmed_used,
        ),
        ("prewarms_total", "Prompts evaluated before their request arrived", totals.n_prewarms),
        ("cache_saves_total", "Snapshots taken", totals.n_saved),
        ("cache_evictions_total", "Snapshots evicted from RAM", view.n_evicted),
        (
            "cache_early_evictions_total",
            "Such snapshots that a client had announced to need again by then",
            view.n_evicted_early,
        ),
        ("cache_refused_total", "Snapshots that could not fit into the budget", view.n_refused),
        (
            "cache_failed_restores_total",
            "Snapshots that could not be restored",
            totals.failed_restores,
        ),
    ):
        yield _counter(f"pyctl_{name}", text, values)
    yield _counter(
        "pyctl_cache_evicted_wanted_tokens_total",
        "Prompt tokens that RAM had evicted before: more --cache-ram would have had them",
        _by("result", {"evaluated": view.wanted.n_evaluated, "read": view.wanted.n_read}),
    )
    yield _gauge("pyctl_cache_snapshots", "Snapshots in RAM", len(view.snapshots))
    yield _gauge("pyctl_cache_slots", "Places for snapshots in RAM", view.n_slots)
    yield _gauge("pyctl_cache_ram_bytes", "Bytes of the snapshots in RAM", view.n_bytes)
    yield _gauge("pyctl_cache_ram_budget_bytes", "Their maximum, -1 for no limit", view.budget)


def _disk(disk: DiskView | None) -> Iterator[Metric]:
    """Yield the metrics of the cache on disk; sizes are bytes. There are none without it."""
    if disk is None:
        return
    yield _gauge("pyctl_cache_disk_snapshots", "Lengths with a snapshot on disk", disk.in_use)
    yield _gauge("pyctl_cache_disk_bytes", "Bytes of the snapshots on disk", disk.n_bytes)
    yield _gauge("pyctl_cache_disk_budget_bytes", "Their maximum, -1 for no limit", disk.budget)
    yield _counter("pyctl_cache_disk_reads_total", "Snapshots read from disk", disk.hits)
    yield _counter(
        "pyctl_cache_disk_written_bytes_total", "Bytes written to disk", disk.written.n_bytes
    )
    yield _gauge("pyctl_cache_disk_waiting", "Snapshots that wait to be written", disk.waiting)
    yield _counter(
        "pyctl_cache_disk_spilled_total", "Snapshots written as they left RAM", disk.spilled.n
    )
    yield _counter(
        "pyctl_cache_disk_spilled_bytes_total",
        "Bytes written as they left RAM",
        disk.spilled.n_bytes,
    )
    yield _counter(
        "pyctl_cache_disk_interim_total",
        "Snapshots written while their prompts were evaluated",
        disk.interim.n,
    )
    yield _counter(
        "pyctl_cache_disk_interim_bytes_total",
        "Bytes written while their prompts were evaluated",
        disk.interim.n_bytes,
    )
    yield _counter(
        "pyctl_cache_disk_given_up_total",
        "Snapshots not written for lack of time",
        disk.given_up,
    )
    yield _counter(
        "pyctl_cache_disk_failed_writes_total",
        "Snapshots that could not be written",
        disk.failed,
    )
    yield _counter("pyctl_cache_disk_damaged_total", "Files found damaged", disk.damaged)


def canary_metrics(view: CanaryView) -> Iterator[Metric]:
    """Yield the results of checks: snapshots by place, or by the reason for no check."""
    for name, text, values in (
        (
            "verified",
            "Snapshots equal to the bit to their evaluation again",
            _by("place", {"device": 0, "ram": 0, "disk": 0, **view.verified}),
        ),
        (
            "differing",
            "Snapshots that differ from it, and are quarantined",
            _by("place", {"device": 0, "ram": 0, "disk": 0, **view.differing}),
        ),
        ("skipped", "Snapshots that could not be checked", _by("reason", view.skipped)),
        ("interrupted", "Checks that a request ended", view.interrupted),
        ("seconds", "Seconds of these checks", view.seconds),
    ):
        yield _counter(f"pyctl_canary_{name}_total", text, values)


def _memory(memory: Mapping[str, int]) -> Iterator[Metric]:
    resident = memory["resident"]
    counted = {part: n for part, n in memory.items() if part != "resident"}
    yield _gauge(
        "pyctl_memory_resident_bytes", "Bytes of this process in the machine's memory", resident
    )
    text = "Bytes by their use; blocks are in arena or in addition to it"
    yield _gauge("pyctl_memory_bytes", text, _by("part", counted))


def _rate(count: float, ms: float) -> float:
    return count * 1e3 / ms if ms > 0 else 0.0

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pyctl.cache.cache_stats import CacheStats, CacheView, SnapshotView
from pyctl.cache.device_tier import DeviceCounts
from pyctl.cache.ports import DiskView, Written
from pyctl.cache.snapshot import BlockBytes
from pyctl.engine.canary.canary_counts import CanaryView
from pyctl.engine.engine_stats import EngineCounters, EngineMemory, EngineStats
from pyctl.engine.loop_detector import ReplyLoop
from pyctl.engine.request import DraftCounts, Timings
from pyctl.requests.reply_settings import ReplySettings
from pyctl.server.api.metrics import canary_metrics, engine_metrics, prometheus_text
from pyctl.server.server_settings import ServerSettings
from tests.unit.server.fake import Bench

LLAMA = {
    "prompt_tokens_total": 60,
    "prompt_tokens_cached_total": 40,
    "prompt_seconds_total": 0.5,
    "tokens_predicted_total": 20,
    "tokens_predicted_seconds_total": 0.25,
    "n_decode_total": 10,
    "n_tokens_max": 90,
    "spec_decode_num_draft_tokens_total": 0,
    "spec_decode_num_accepted_tokens_total": 0,
    "spec_decode_num_drafts_total": 0,
    "prompt_tokens_seconds": 120,
    "predicted_tokens_seconds": 80,
    "requests_processing": 1,
    "requests_deferred": 2,
    "n_busy_slots_per_decode": 1.2,
}


def values_of(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_numbers_for_prometheus() -> None:
    """The metrics have llama-server's names and values, and pyctl's own, in text that the official
    parser reads with the right types.
    """
    total = EngineCounters(
        10, 12, 90, n_cached=40, n_evaluated=60, prompt_ms=500.0, n_predicted=20, predicted_ms=250.0
    )
    snapshot = SnapshotView("100-aa", "", 100, 10, 20, 3, 1.5, 0.5, False, ())
    view = CacheView(
        4,
        3000,
        -1,
        1,
        CacheStats(requests=7, hits={"live": 2, "ram": 3, "disk": 0}),
        (snapshot,) * 2,
    )
    memory = EngineMemory(3000, BlockBytes(0, 0, 0), 0)
    stats = EngineStats(
        total, total, 1, 2, 1, 4096, 1024, 300, 200, DeviceCounts(kept=9, lost=4), view, memory
    )
    text = prometheus_text(engine_metrics(stats, {"resident": 5, "arena": 4}))
    values = values_of(text)
    assert {name: values[f"llamacpp:{name}"] for name in LLAMA} == LLAMA
    assert values['pyctl_cache_hits_total{source="ram"}'] == 3
    assert values["pyctl_cache_requests_total"] == 7
    assert values["pyctl_cache_snapshots"] == 2
    rows = {
        name: values[f'pyctl_device_rows_total{{event="{name}"}}']
        for name in ("kept", "returned", "lost")
    }
    assert values["pyctl_context_tokens_held"] == 200
    assert rows == {"kept": 9, "returned": 0, "lost": 4}
    assert values["pyctl_cache_ram_bytes"] == 3000
    assert values["pyctl_cache_evictions_total"] == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["llamacpp:prompt_tokens"].type == "counter"
    assert families["llamacpp:requests_processing"].type == "gauge"
    assert all(family.samples and family.documentation for family in families.values())


def test_checks_of_snapshots_are_counted_by_place_and_reason() -> None:
    canary = CanaryView(3600, {"ram": 5}, {"disk": 1}, {"no_room": 2}, 3, 1.5)
    assert values_of(prometheus_text(canary_metrics(canary))) == {
        'pyctl_canary_verified_total{place="device"}': 0,
        'pyctl_canary_verified_total{place="ram"}': 5,
        'pyctl_canary_verified_total{place="disk"}': 0,
        'pyctl_canary_differing_total{place="device"}': 0,
        'pyctl_canary_differing_total{place="ram"}': 0,
        'pyctl_canary_differing_total{place="disk"}': 1,
        'pyctl_canary_skipped_total{reason="no_room"}': 2,
        "pyctl_canary_interrupted_total": 3,
        "pyctl_canary_seconds_total": 1.5,
    }


def test_rates_are_those_since_the_last_scrape() -> None:
    bench = Bench(settings=ServerSettings(show_metrics=True))
    bench.post("/completion", {"prompt": "x" * 50, "n_predict": 20, "ignore_eos": True})
    response = bench.client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4"
    assert int(response.headers["process-start-time-unix"]) > 1_600_000_000
    values = values_of(response.text)
    assert values["llamacpp:prompt_tokens_total"] == 50
    assert values["llamacpp:tokens_predicted_total"] == 20
    assert values["llamacpp:predicted_tokens_seconds"] > 0
    again = bench.client.get("/metrics").text
    assert "llamacpp:predicted_tokens_seconds 0\n" in again
    assert "llamacpp:tokens_predicted_total 20\n" in again


def test_first_tokens_are_a_histogram() -> None:
    """Times to the first token are cumulative buckets up to infinity, with their count and sum, as
    Prometheus defines a histogram.
    """
    bench = Bench(settings=ServerSettings(show_metrics=True))
    for _ in range(3):
        bench.post("/completion", {"prompt": "x" * 50, "n_predict": 2})
    for ms in (7000.0, 1_000_000.0):
        bench.engine.counters.count_reply(Timings(0, 1, 1.0, 1, 1.0, first_token_ms=ms))
    text = bench.client.get("/metrics").text
    (family,) = (
        each
        for each in text_string_to_metric_families(text)
        if each.name == "pyctl_first_token_seconds"
    )
    assert family.type == "histogram"
    values = {
        (each.name.removeprefix(family.name), each.labels.get("le")): each.value
        for each in family.samples
    }
    assert values["_count", None] == 5
    assert values["_bucket", "+Inf"] == 5
    assert values["_bucket", "500"] == 4
    assert values["_bucket", "10"] - values["_bucket", "5"] == 1
    assert values["_sum", None] > 1007
    counts = [value for (kind, _), value in values.items() if kind == "_bucket"]
    assert counts == sorted(counts)


def test_first_tokens_are_histograms_by_source() -> None:
    """Sources that no request has used have one as well, so that rates start at 0."""
    bench = Bench(settings=ServerSettings(show_metrics=True))
    timings = Timings(40, 10, 1.0, 11, 500.0, first_token_ms=300.0, queued_ms=20.0)
    bench.engine.counters.count_reply(timings, "disk")
    values = values_of(bench.client.get("/metrics").text)
    name = "gen_ai_server_time_to_first_token_seconds"
    assert values[f'{name}_bucket{{source="disk",le="0.2"}}'] == 0
    assert values[f'{name}_bucket{{source="disk",le="0.5"}}'] == 1
    assert values[f'{name}_sum{{source="disk"}}'] == 0.3
    sources = ("live", "device", "ram", "disk", "none")
    counts = [values[f'{name}_count{{source="{source}"}}'] for source in sources]
    assert counts == [0, 0, 0, 1, 0]
    assert values['pyctl_queue_seconds_bucket{le="0.01"}'] == 0
    assert values['pyctl_queue_seconds_bucket{le="0.05"}'] == 1
    assert values["gen_ai_server_time_per_output_token_seconds_sum"] == 0.05
    assert values["pyctl_reply_tokens_per_second_sum"] == 20
    assert values["gen_ai_server_request_duration_seconds_sum"] == 0.8


def test_loops_count_with_those_that_the_guard_ended() -> None:
    bench = Bench(settings=ServerSettings(show_metrics=True))
    plain = Timings(40, 10, 1.0, 11, 500.0, first_token_ms=300.0)
    for loop in (None, ReplyLoop(3, 400), ReplyLoop(3, 400), ReplyLoop(3, 400, is_ended=True)):
        bench.engine.counters.count_reply(replace(plain, loop=loop))
    values = values_of(bench.client.get("/metrics").text)
    assert values["pyctl_loops_total"] == 3
    assert values["pyctl_loops_ended_total"] == 1


def test_only_names_of_llama_server_have_colons() -> None:
    """A colon is for recording rules; llama-server's names have one. OpenTelemetry's begin with
    gen_ai_server_.
    """
    bench = Bench(settings=ServerSettings(show_metrics=True))
    names = re.findall(r"^# TYPE (\S+)", bench.client.get("/metrics").text, re.MULTILINE)
    assert len(names) > 30
    assert all(name.startswith(("llamacpp:", "pyctl_", "gen_ai_server_")) for name in names)


def test_pages_of_other_origins_get_none() -> None:
    """Counts of drafts and of cached tokens step with the texts of all clients."""
    client = Bench(settings=ServerSettings(show_metrics=True)).client
    origins = {"http://evil.example": 403, "http://localhost:8080": 200}
    answers = {
        each: client.get("/metrics", headers={"Host": "localhost:8080", "Origin": each})
        for each in origins
    }
    assert {each: answer.status_code for each, answer in answers.items()} == origins


def test_only_with_the_flag() -> None:
    response = Bench().client.get("/metrics")
    assert response.status_code == 501
    assert response.json()["error"]["type"] == "not_supported_error"
    assert "--metrics" in response.json()["error"]["message"]


def test_embedded_texts_count() -> None:
    bench = Bench(
        settings=ServerSettings(show_metrics=True),
        replies=ReplySettings(embeddings=True),
        pooling="mean",
    )
    assert bench.post("/v1/embeddings", {"input": ["abc", "de"]}).status_code == 200
    values = values_of(bench.client.get("/metrics").text)
    assert values["llamacpp:prompt_tokens_total"] == 5
    assert values["llamacpp:n_decode_total"] == 2
    assert values["llamacpp:prompt_seconds_total"] > 0


def test_resident_bytes_stand_beside_counted_ones() -> None:
    """The parts of the memory that `/metrics` and `/cache` count are equal, with the resident bytes
    next to them, so that memory that nothing accounts for shows up.
    """
    # What is made ready after the reply would be counted in one answer and not in the other.
    bench = Bench(
        settings=ServerSettings(show_metrics=True), replies=ReplySettings(warm_next=False)
    )
    bench.post("/completion", {"prompt": "x" * 200, "n_predict": 2})
    values = values_of(bench.client.get("/metrics").text)
    counted = {
        name[len('pyctl_memory_bytes{part="') : -2]: n
        for name, n in values.items()
        if "memory_bytes" in name
    }
    assert set(counted) == {
        *("snapshots", "blocks", "in_flight", "arena"),
        *("recent_prompts", "draft_texts", "images", "tokenizer", "replies"),
        *("threads", "request_records"),
    }
    assert counted["snapshots"] == values["pyctl_cache_ram_bytes"] > 0
    assert min(counted["recent_prompts"], counted["tokenizer"]) > 0
    assert values["pyctl_memory_resident_bytes"] > 20 * 2**20
    shown = bench.client.get("/cache").json()["memory"]
    assert {**shown, "resident": 0} == {**counted, "resident": 0}
    assert shown["resident"] > 20 * 2**20
    assert values["pyctl_cache_refused_total"] == 0


BOARD = Path(__file__).resolve().parents[4] / "deploy" / "grafana.json"


def test_the_board_of_grafana_shows_metrics_that_exist() -> None:
    """Each query of deploy/grafana.json names a metric that the server has, counters by their rate
    and gauges without one.
    """
    drafts = DraftCounts(2, 6, 3, by_position=(2, 1))
    total = EngineCounters(10, 12, 90, drafts=drafts)
    disk = DiskView("auto", 1, 2, 3, 4, Written(1, 5), 0)
    view = CacheView(4, 3000, -1, 1, CacheStats(), (), disk=disk)
    stats = EngineStats(
        *(total, total, 1, 2, 1, 4096, 1024, 300, 200, DeviceCounts(), view),
        EngineMemory(3000, BlockBytes(0, 0, 0), 0),
    )
    text = prometheus_text(engine_metrics(stats, {"resident": 5, "arena": 4}))
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    # Prometheus' rule for names.
    assert all(re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name) for name in names)
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in board["templating"]["list"]]
    shown = {
        name
        for each in expressions
        for name in re.findall(r"\b(?:llamacpp:|pyctl_|gen_ai_)\w+", each)
    }
    shown = {name.removesuffix("_bucket") for name in shown}
    assert len(shown) > 20
    assert sorted(shown - names) == []
    for panel in board["panels"]:
        is_counter = [
            len(re.findall("_total|_bucket", target["expr"])) for target in panel["targets"]
        ]
        rates = [
            len(re.findall(r"\b(?:rate|increase)\(", target["expr"])) for target in panel["targets"]
        ]
        assert is_counter == rates, f"{panel['title']}: a counter is shown by its rate"

"""Reports about a pool: properties, slots, timings, counters, the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.engine.pool import PoolPlan, StreamCounts
from pyctl.engine.request import Done, Event, Piece, Request, Timings
from pyctl.engine.selection import SelectSettings
from pyctl.server import ServerSettings
from tests.unit.server.fake import Bench

MIB = 2**20
POOL = PoolPlan.of(11, 4096, 16, 16 * MIB)


def pooled(n_bytes: int = 640 * MIB) -> Bench:
    """A server whose engine has read so many bytes for every reply, which restored 1,024 tokens."""

    def script(_: Request) -> Iterable[Event]:
        yield Piece("a", (97,))
        timings = Timings(1024, 21, 2.0, 1, 3.0, 2.5, streamed=StreamCounts(n_bytes, 45.5))
        yield Done("eos", "", timings, RequestStats(1045, "ram", 1024, 21, n_loaded=512), seq=0)

    bench = Bench(script, settings=ServerSettings(show_slots=True, show_metrics=True), pool=POOL)
    bench.engine.backend.streamed = StreamCounts(n_bytes, 45.5)
    return bench


def test_properties_and_slots() -> None:
    bench, plain = pooled(), Bench(settings=ServerSettings(show_slots=True))
    assert bench.client.get("/props").json()["kv_pool"] == {
        "mode": "exact",
        "rows": 4096,
        "resident_layers": 9,
        "streamed_layers": 7,
        "gpu_bytes": 11 * 16 * MIB,
        "stage_bytes": 2 * 16 * MIB,
        "host_bytes": 7 * 16 * MIB,
    }
    (slot,) = bench.client.get("/slots").json()
    assert slot["kv_pool"] == {"n_rows": 0, "bytes_per_pass": 0}
    assert "kv_pool" not in plain.client.get("/props").json()
    assert "kv_pool" not in plain.client.get("/slots").json()[0]


def test_timings_and_counters() -> None:
    bench, plain = pooled(), Bench(settings=ServerSettings(show_metrics=True))
    timings = bench.chat()["timings"]
    assert (timings["streamed_bytes"], timings["stream_wait_ms"]) == (640 * MIB, 45.5)
    assert timings.keys() - plain.chat()["timings"].keys() == {"streamed_bytes", "stream_wait_ms"}
    text = bench.client.get("/metrics").text
    assert f"\npyctl:streamed_bytes_total {640 * MIB}\n" in text
    assert "\npyctl:stream_wait_seconds_total 0.0455\n" in text
    assert "stream" not in plain.client.get("/metrics").text


def test_the_log_tells_what_went_where(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    pooled().chat()
    assert "  K and V: 18 MiB to the device, 14 MiB in RAM" in caplog.text
    assert "  640 MiB read from RAM, waited 45.5 ms" in caplog.text
    caplog.clear()
    pooled(0).chat()
    assert "read from RAM" not in caplog.text


SELECTING = replace(POOL, select=SelectSettings(1000, 64, 256), select_bytes=77)


def asked(pool: PoolPlan | None, **fields: object) -> Request:
    """The request to the engine for a chat with a head of 220 letters, each a token."""
    requests: list[Request] = []

    def script(request: Request) -> Iterable[Event]:
        requests.append(request)
        yield Done("eos", "", Timings(0, 9, 2.0, 1, 3.0, 2.5), RequestStats(9, "none", 0, 9), seq=0)

    bench = Bench(script, pool=pool)
    messages = [{"role": "system", "content": "x" * 200}, {"role": "user", "content": "y" * 300}]
    bench.chat(messages=messages, **fields)
    (request,) = requests
    return request


def test_what_is_selected_is_told() -> None:
    def script(_: Request) -> Iterable[Event]:
        yield Piece("a", (97,))
        counts = StreamCounts(0, 0.0, 96, 40)
        yield Done("eos", "", Timings(9, 1, 2.0, 2, 3.0, 2.5, streamed=counts), RequestStats(10), seq=0)

    bench = Bench(script, settings=ServerSettings(show_metrics=True), pool=SELECTING)
    bench.engine.backend.streamed = StreamCounts(0, 0.0, 96, 40)
    shown = bench.client.get("/props").json()["kv_pool"]
    assert shown["mode"] == "selected"
    assert [shown[name] for name in ("select", "chunk", "sinks", "tail", "pin")] == [1024, 64, 64, 256, "head"]
    assert shown["gpu_bytes"] == POOL.device_bytes + 77
    timings = bench.chat()["timings"]
    assert (timings["selected_chunks"], timings["fetched_chunks"]) == (96, 40)
    text = bench.client.get("/metrics").text
    assert "\npyctl:selected_chunks_total 96\n" in text
    assert "\npyctl:fetched_chunks_total 40\n" in text


def test_the_log_tells_what_was_selected(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    def script(_: Request) -> Iterable[Event]:
        counts = StreamCounts(0, 0.0, 96, 40)
        yield Done("eos", "", Timings(9, 1, 2.0, 2, 3.0, 2.5, streamed=counts), RequestStats(10), seq=0)

    Bench(script, pool=SELECTING).chat()
    assert "  96 chunks selected, 40 from RAM" in caplog.text


def test_the_head_is_pinned_and_what_a_request_names() -> None:
    (end,) = asked(SELECTING).prompt.boundaries[:1]
    assert 192 < end <= 256
    assert asked(SELECTING).pins == ((64, 256),)
    assert asked(SELECTING, kv_pin=[[300, 310]]).pins == ((64, 320),)
    assert asked(SELECTING, kv_pin=[[450, 10_000]]).pins == ((64, 256), (448, 576))
    assert asked(replace(SELECTING, select=SelectSettings(1000, pinned="none"))).pins == ()


@pytest.mark.parametrize("pool", [None, POOL])
def test_pins_without_selection_are_ignored_and_the_log_says_so(
    pool: PoolPlan | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert asked(pool, kv_pin=[[0, 9]]).pins == ()
    assert "kv_pin has no effect without --kv-select" in caplog.text


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([[0, 2000]], "'kv_pin' has 576 tokens in whole chunks of 64: there is room for 448 (--kv-select 512)"),
        ("head", "'kv_pin' must be a list of pairs"),
        ([[1, 2, 3]], "'kv_pin' must be a list of pairs"),
        ([7], "'kv_pin' must be a list of pairs"),
        ([[9, 9]], "'kv_pin' has an empty range from 9 to 9"),
        ([[-1, 9]], "kv_pin"),
        ([[0, "9"]], "kv_pin"),
        ([[0, 1]] * 65, "kv_pin"),
    ],
)
def test_pins_that_leave_no_room_or_mean_nothing_are_refused(value: object, why: str) -> None:
    bench = Bench(pool=replace(POOL, select=SelectSettings(512)))
    body = {"messages": [{"role": "user", "content": "y" * 600}], "kv_pin": value}
    response = bench.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert why in response.json()["error"]["message"]

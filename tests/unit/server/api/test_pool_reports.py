"""Reports about a pool: properties and slots."""

from __future__ import annotations

from collections.abc import Iterable

from pyctl.cache.cache_stats import RequestStats
from pyctl.engine.pool import PoolPlan
from pyctl.engine.request import Done, Event, Piece, Request, Timings
from pyctl.server import ServerSettings
from tests.unit.server.fake import Bench

MIB = 2**20
POOL = PoolPlan.of(11, 4096, 16, 16 * MIB)


def pooled() -> Bench:
    """A server whose replies restored 1,024 tokens."""

    def script(_: Request) -> Iterable[Event]:
        yield Piece("a", (97,))
        timings = Timings(1024, 21, 2.0, 1, 3.0, 2.5)
        yield Done("eos", "", timings, RequestStats(1045, "ram", 1024, 21, n_loaded=512), seq=0)

    return Bench(script, settings=ServerSettings(show_slots=True), pool=POOL)


def test_properties_and_slots() -> None:
    bench, plain = pooled(), Bench(settings=ServerSettings(show_slots=True))
    assert bench.client.get("/props").json()["kv_pool"] == {
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

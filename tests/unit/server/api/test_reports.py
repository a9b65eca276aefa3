"""Reports about drafts and about a pool: timings, counters, properties, slots, the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.engine.pool_plan import PoolPlan
from pyctl.engine.request import MAX_POSITIONS, Done, DraftCounts, Event, Piece, Request, Timings
from pyctl.server.server_settings import ServerSettings
from tests.unit.server.fake import HI, Bench

COUNTS = DraftCounts.of(3, 2) + DraftCounts.of(3, 0) + DraftCounts.of(2, 1)


def drafting(counts: DraftCounts = COUNTS, **settings: Any) -> Bench:
    """Return a server whose engine reports for every reply drafts with these counts."""

    def script(_: Request) -> Iterable[Event]:
        bench.engine.handles[-1].drafts = counts
        yield Piece("a", (97,))
        yield Piece("b", (98,))
        timings = Timings(0, 21, 2.0, 2, 3.0, 2.5, counts)
        bench.engine.counters.count_reply(timings)
        yield Done("eos", "", timings, RequestStats(21, "none", 0, 21), seq=0)

    bench = Bench(
        script, settings=ServerSettings(**settings), draft_types=("ngram-mod", "draft-mtp")
    )
    return bench


def test_counts_add_up() -> None:
    assert DraftCounts(3, 8, 3, (2, 1, 0)) == COUNTS
    assert DraftCounts() + COUNTS == COUNTS
    long = DraftCounts.of(1000, 900)
    assert (long.n_drafted, long.n_accepted, long.by_position) == (1000, 900, (1,) * MAX_POSITIONS)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/completion", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x"}),
    ],
)
def test_timings_tell_of_drafts(path: str, body: dict[str, Any]) -> None:
    timings = drafting().post(path, body).json()["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (8, 3)
    without = drafting(DraftCounts()).post(path, body).json()["timings"]
    assert timings.keys() - without.keys() == {"draft_n", "draft_n_accepted"}


def test_a_stream_tells_of_them_as_it_goes_on() -> None:
    for event in drafting().chat_stream(timings_per_token=True)[:-1]:
        if event["choices"] and event["choices"][0]["delta"].get("content"):
            assert (event["timings"]["draft_n"], event["timings"]["draft_n_accepted"]) == (8, 3)


def test_counters() -> None:
    bench = drafting(show_metrics=True)
    assert "per_pos" not in bench.client.get("/metrics").text, (
        "as llama-server, before the first draft"
    )
    for _ in range(2):
        bench.chat()
    values = dict(
        line.rsplit(" ", 1)
        for line in bench.client.get("/metrics").text.splitlines()
        if line[0] != "#"
    )
    assert values["llamacpp:spec_decode_num_draft_tokens_total"] == "16"
    assert values["llamacpp:spec_decode_num_accepted_tokens_total"] == "6"
    assert values["llamacpp:spec_decode_num_drafts_total"] == "6"
    places = [
        values[f'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}']
        for i in range(3)
    ]
    assert places == ["4", "2", "0"]


def test_properties_name_what_drafts() -> None:
    bench = drafting(show_slots=True)
    assert bench.client.get("/props").json()["default_generation_settings"]["params"][
        "speculative.types"
    ] == ("ngram-mod,draft-mtp")
    assert bench.post("/completion", {"prompt": "x"}).json()["generation_settings"][
        "speculative.types"
    ] == ("ngram-mod,draft-mtp")
    assert [each["speculative"] for each in bench.client.get("/slots").json()] == [True]
    bare = Bench(settings=ServerSettings(show_slots=True))
    assert [each["speculative"] for each in bare.client.get("/slots").json()] == [False]
    assert (
        bare.client.get("/props").json()["default_generation_settings"]["params"][
            "speculative.types"
        ]
        == "none"
    )


MIB = 2**20
POOL = PoolPlan.of(11, 4096, 16, 16 * MIB)


def test_properties_and_slots_tell_of_the_pool() -> None:
    settings = ServerSettings(show_slots=True)
    bench = Bench(settings=settings, pool=POOL)
    plain = Bench(settings=settings)
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


def test_the_log_has_the_share(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    drafting().chat()
    assert "  3 of 8 drafts accepted\n" in caplog.text
    caplog.clear()
    drafting(DraftCounts()).chat()
    assert "drafts" not in caplog.text

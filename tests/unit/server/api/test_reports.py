"""Reports about drafts and about a pool: timings, counters, properties, slots, the log."""

from __future__ import annotations

from pyctl.engine.pool_plan import PoolPlan
from pyctl.engine.request import MAX_POSITIONS, DraftCounts
from pyctl.server.server_settings import ServerSettings
from tests.unit.server.fake import Bench
from tests.unit.server.parts import COUNTS, drafting


def test_counts_add_up() -> None:
    assert DraftCounts(3, 8, 3, (2, 1, 0)) == COUNTS
    assert DraftCounts() + COUNTS == COUNTS
    long = DraftCounts.of_draft(1000, 900)
    assert long.n_drafted == 1000
    assert long.n_accepted == 900
    assert long.by_position == (1,) * MAX_POSITIONS


def test_counters() -> None:
    """The counters of drafts have llama-server's names and sum over requests, and the ones by
    position come with the first draft.
    """
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
POOL = PoolPlan.for_layers(11, 4096, 16, 16 * MIB)


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

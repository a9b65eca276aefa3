from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pyctl.server.service import Settings
from tests.server.fake import Bench, FakeEngine, play

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


def test_numbers_for_prometheus() -> None:
    client = Bench(play(), settings=Settings(engine=FakeEngine(), show_metrics=True)).client
    response = client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4"
    assert int(response.headers["process-start-time-unix"]) > 1_600_000_000
    lines = [line.rpartition(" ") for line in response.text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, _, value in lines}
    assert {name: values[f"llamacpp:{name}"] for name in LLAMA} == LLAMA
    assert values['pyctl:cache_hits_total{source="ram"}'] == 3
    assert (values["pyctl:cache_requests_total"], values["pyctl:cache_snapshots"]) == (7, 2)
    assert (values["pyctl:cache_ram_bytes"], values["pyctl:cache_evictions_total"]) == (3000, 1)
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families["llamacpp:prompt_tokens"].type == "counter"
    assert families["llamacpp:requests_processing"].type == "gauge"
    assert all(family.samples and family.documentation for family in families.values())
    # Rates are those since the last scrape.
    again = client.get("/metrics").text
    assert "llamacpp:predicted_tokens_seconds 0\n" in again
    assert "llamacpp:tokens_predicted_total 20\n" in again


def test_only_with_the_flag() -> None:
    response = Bench(play(), settings=Settings(engine=FakeEngine())).client.get("/metrics")
    assert response.status_code == 501
    assert response.json()["error"]["type"] == "not_supported_error"
    assert "--metrics" in response.json()["error"]["message"]

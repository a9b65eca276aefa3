from __future__ import annotations

from pyctl.engine.sampling import Sampling
from pyctl.requests.reply_settings import ReplySettings
from tests.unit.chat import toy
from tests.unit.server.fake import N_CTX, Bench, play


def test_health() -> None:
    client = Bench(play()).client
    for path in ("/health", "/v1/health"):
        assert client.get(path).json() == {"status": "ok"}


def test_models() -> None:
    client = Bench(play()).client
    body = client.get("/v1/models").json()
    assert client.get("/models").json().keys() == body.keys() == {"models", "object", "data"}
    (model,) = body["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("toy-1", "model", "llamacpp")
    assert model["meta"] == {
        "vocab_type": 0,
        "n_vocab": 262,
        "n_ctx": N_CTX,
        "n_ctx_train": 8192,
        "n_embd": 64,
        "n_params": 1000,
        "size": 2000,
        "ftype": "F16",
    }
    assert body["models"][0]["name"] == "toy-1"


def test_props() -> None:
    replies = ReplySettings(Sampling(temperature=0.25), n_predict=9)
    body = Bench(template=toy.THINKING, replies=replies).client.get("/props").json()
    defaults = body["default_generation_settings"]
    assert defaults["n_ctx"] == N_CTX
    assert (defaults["params"]["temperature"], defaults["params"]["n_predict"]) == (0.25, 9)
    assert defaults["params"]["reasoning_format"] == "none"
    assert body["total_slots"] == 1
    assert body["model_alias"] == "toy-1"
    assert body["model_path"] == "/models/toy.gguf"
    assert (body["cache_type_k"], body["cache_type_v"]) == ("f16", "f16")
    assert (body["n_layers"], body["n_gpu_layers"], body["n_placement_rules"]) == (0, 0, 0)
    assert body["chat_template"] == toy.THINKING
    assert body["chat_template_caps"]["supports_system_role"] is True
    assert body["modalities"] == {"vision": False, "video": False, "audio": False}
    assert body["build_info"] == "b1-toy"
    assert body["eos_token"] == "<|im_end|>"
    assert body["is_sleeping"] is False
    assert (body["endpoint_slots"], body["endpoint_props"], body["endpoint_metrics"]) == (
        True,
        False,
        False,
    )


def test_props_tell_what_the_cache_holds() -> None:
    bench = Bench()
    empty = {"capacity": 4, "in_use": 0, "resident_bytes": 0, "lifetime_hits": 0}
    assert bench.client.get("/props").json()["prefix_cache"] == empty
    for _ in range(2):
        bench.post("/completion", {"prompt": "x" * 200, "n_predict": 2})
    held = bench.client.get("/props").json()["prefix_cache"]
    view = bench.service.admin.view().result()
    assert (held["in_use"], held["resident_bytes"]) == (len(view.snapshots), view.n_bytes)
    assert held["in_use"] > 0
    assert held["lifetime_hits"] == 1


def test_all_names_and_tags_are_listed() -> None:
    client = Bench(model_alias="a", model_aliases=("a", "b"), model_tags=("small",)).client
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["aliases"], model["tags"]) == ("a", ["a", "b"], ["small"])

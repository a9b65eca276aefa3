from __future__ import annotations

from pyctl.engine.sampling import Sampling
from pyctl.requests.reply_settings import ReplySettings
from tests.unit.chat import toy
from tests.unit.server.fake import N_CTX, Bench


def test_props() -> None:
    """`GET /props` has llama-server's fields with the values of this server, which clients and the
    page read.
    """
    replies = ReplySettings(Sampling(temperature=0.25), n_predict=9)
    body = Bench(template=toy.THINKING, replies=replies).client.get("/props").json()
    defaults = body["default_generation_settings"]
    assert defaults["n_ctx"] == N_CTX
    assert defaults["params"]["temperature"] == 0.25
    assert defaults["params"]["n_predict"] == 9
    assert defaults["params"]["reasoning_format"] == "none"
    assert body["total_slots"] == 1
    assert body["model_alias"] == "toy-1"
    assert body["model_path"] == "/models/toy.gguf"
    assert body["cache_type_k"] == "f16"
    assert body["cache_type_v"] == "f16"
    assert body["n_layers"] == 0
    assert body["n_gpu_layers"] == 0
    assert body["n_placement_rules"] == 0
    assert body["chat_template"] == toy.THINKING
    assert body["chat_template_caps"]["supports_system_role"] is True
    assert body["modalities"] == {"vision": False, "video": False, "audio": False}
    assert body["build_info"] == "b1-toy"
    assert body["eos_token"] == "<|im_end|>"
    assert body["is_sleeping"] is False
    assert body["endpoint_slots"] is True
    assert body["endpoint_props"] is False
    assert body["endpoint_metrics"] is False


def test_props_tell_what_the_cache_holds() -> None:
    bench = Bench()
    empty = {"capacity": 4, "in_use": 0, "resident_bytes": 0, "lifetime_hits": 0}
    assert bench.client.get("/props").json()["prefix_cache"] == empty
    for _ in range(2):
        bench.post("/completion", {"prompt": "x" * 200, "n_predict": 2})
    held = bench.client.get("/props").json()["prefix_cache"]
    view = bench.service.admin.view().result()
    assert held["in_use"] == len(view.snapshots)
    assert held["resident_bytes"] == view.n_bytes
    assert held["in_use"] > 0
    assert held["lifetime_hits"] == 1

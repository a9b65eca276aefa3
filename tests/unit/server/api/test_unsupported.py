from __future__ import annotations

import pytest

from pyctl.server import ServerSettings
from tests.unit.server.fake import HI, Bench, Client, play


@pytest.fixture
def client() -> Client:
    return Bench(play()).client


@pytest.mark.parametrize(
    "path",
    ["/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/audio/transcriptions", "/v1/audio/transcriptions"],
)
def test_what_no_model_here_can(client: Client, path: str) -> None:
    error = client.post(path, json={}).json()["error"]
    assert (error["code"], error["type"]) == (501, "not_supported_error")


@pytest.mark.parametrize("path", ["/tools", "/cors-proxy"])
def test_features_that_are_off(client: Client, path: str) -> None:
    for response in (client.get(path), client.post(path, json={})):
        assert response.status_code == 403
        assert response.json() == {"error": {"message": "this feature is disabled", "type": "feature_disabled"}}


def test_no_stream_is_kept_unless_its_client_names_a_conversation(client: Client) -> None:
    client.post("/v1/chat/completions", json={"messages": HI, "stream": True})
    assert client.get("/v1/stream").status_code == 400
    assert client.get("/v1/stream?conv_id=x").status_code == 404
    assert client.request("DELETE", "/v1/stream").status_code == 400
    assert client.request("DELETE", "/v1/stream?conv_id=x").status_code == 204
    assert client.post("/v1/streams/lookup", json={"conversation_ids": ["x"]}).json() == []


def test_lora_adapters(client: Client) -> None:
    assert client.get("/lora-adapters").json() == []
    assert client.post("/lora-adapters", json=[]).json() == {"success": True}
    for body in (b"{}", b"x", b"[" * 9999):
        assert client.post("/lora-adapters", content=body).status_code == 400


def test_props_change_only_with_the_flag() -> None:
    for allowed, status in ((False, 501), (True, 200)):
        settings = ServerSettings(change_props=allowed)
        assert Bench(play(), settings=settings).client.post("/props", json={}).status_code == status


def test_scales_of_adapters_stay() -> None:
    bench = Bench(play("x"), lora=(("a.gguf", 0.5),))
    assert bench.client.get("/lora-adapters").json()[0] == {
        "id": 0,
        "path": "a.gguf",
        "scale": 0.5,
        "task_name": "",
        "prompt_prefix": "",
    }
    for scale, status in ((0.5, 200), (1.0, 501)):
        entries = [{"id": 0, "scale": scale}, {"id": 7, "scale": 1.0}]
        assert bench.client.post("/lora-adapters", json=entries).status_code == status
        assert bench.post("/completion", {"prompt": "x", "lora": entries}).status_code == status

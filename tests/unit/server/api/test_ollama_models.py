"""Models as Ollama's API lists and shows them."""

from __future__ import annotations

from tests.pictures import GridReader
from tests.unit.chat import toy
from tests.unit.server.fake import N_CTX, Bench, play

TOOLS = "{{ tools | tojson if tools }}" + toy.CHATML


def test_facts() -> None:
    """Ollama's routes about models have the facts that its clients read, and the routes that change
    models are refused with 501.
    """
    client = Bench(play("x"), TOOLS, images=GridReader()).client
    (model,) = client.get("/api/tags").json()["models"]
    assert model["name"] == "toy-1:latest"
    assert model["model"] == "toy-1:latest"
    assert model["size"] == 2000
    assert model["details"]["parameter_size"] == "1.0K"
    (loaded,) = client.get("/api/ps").json()["models"]
    assert loaded["digest"] == model["digest"]
    assert loaded["context_length"] == N_CTX
    shown = client.post("/api/show", {"model": "anything"}).json()
    assert {"completion", "tools", "vision"} <= set(shown["capabilities"])
    assert shown["model_info"]["qwen35.context_length"] == N_CTX
    assert all(part.isdecimal() for part in client.get("/api/version").json()["version"].split("."))
    for method, path in (
        ("HEAD", "blobs/sha256:0"),
        ("POST", "blobs/sha256:0"),
        ("DELETE", "delete"),
        ("POST", "copy"),
        ("POST", "embeddings"),
        ("GET", "chat"),
        ("POST", "of/a/later/release"),
    ):
        assert client.request(method, f"/api/{path}").status_code == 501

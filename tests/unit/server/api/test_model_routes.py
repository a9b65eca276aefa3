"""The list of models, and the health of the process."""

from __future__ import annotations

from tests.unit.server.fake import N_CTX, Bench, play


def test_health() -> None:
    client = Bench(play()).client
    for path in ("/health", "/v1/health"):
        assert client.get(path).json() == {"status": "ok"}


def test_models() -> None:
    """The list is that of OpenAI and that of Ollama in one body."""
    client = Bench(play()).client
    body = client.get("/v1/models").json()
    assert client.get("/models").json().keys() == body.keys() == {"models", "object", "data"}
    (model,) = body["data"]
    assert model["id"] == "toy-1"
    assert model["object"] == "model"
    assert model["owned_by"] == "llamacpp"
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


def test_all_names_and_tags_are_listed() -> None:
    client = Bench(model_alias="a", model_aliases=("a", "b"), model_tags=("small",)).client
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "a"
    assert model["aliases"] == ["a", "b"]
    assert model["tags"] == ["small"]

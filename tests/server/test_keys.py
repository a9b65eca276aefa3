from __future__ import annotations

import pytest

from pyctl.server.service import Settings
from tests.server.fake import HI, Bench, play


@pytest.fixture
def bench() -> Bench:
    return Bench(play("x"), settings=Settings(api_keys=("one", "zwö")))


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer one"},
        {"Authorization": "one"},
        {"X-Api-Key": "one"},
        {"Authorization": "Bearer zwö".encode()},
    ],
)
def test_known_keys(bench: Bench, headers: dict[str, str | bytes]) -> None:
    assert bench.post("/v1/chat/completions", {"messages": HI}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer two"}, {"X-Api-Key": ""}, {"Authorization": "Bearer "}]
)
def test_unknown_keys(bench: Bench, headers: dict[str, str]) -> None:
    for path in ("/v1/chat/completions", "/completion", "/no/such/path"):
        response = bench.post(path, {"messages": HI, "prompt": "x"}, headers=headers)
        assert response.status_code == 401
        assert response.json() == {"error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}}
    assert not bench.worker.requests


def test_health_is_public(bench: Bench) -> None:
    assert bench.client.get("/health").status_code == 200
    assert bench.client.get("/v1/health").status_code == 200
    assert bench.client.get("/v1/models").status_code == 401


def test_a_prefix_stands_before_every_path() -> None:
    client = Bench(settings=Settings(api_keys=("one",), api_prefix="/llm")).client
    assert client.get("/llm/health").status_code == 200
    assert client.get("/llm/props").status_code == 401
    assert client.get("/llm/props", headers={"X-Api-Key": "one"}).status_code == 200
    assert client.get("/props", headers={"X-Api-Key": "one"}).status_code == 404

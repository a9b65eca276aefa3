from __future__ import annotations

import pytest

from pyctl.server.settings import Settings
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


def test_browsers_of_any_origin_may_ask(bench: Bench) -> None:
    asked = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    response = bench.client.options("/v1/chat/completions", headers=asked)  # without a key, as browsers do
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert response.headers["access-control-allow-credentials"] == "true"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"]
    for key, status in (("one", 200), ("two", 401)):
        headers = {"Origin": "https://app.example", "X-Api-Key": key}
        response = bench.client.get("/v1/models", headers=headers)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == "https://app.example"

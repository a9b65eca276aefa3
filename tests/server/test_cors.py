from __future__ import annotations

import pytest

from pyctl.server.server_settings import Cors
from pyctl.server.service import Settings
from tests.server.fake import Bench, Client, play

PAGE = "https://app.example"


def client_of(cors: Cors | None = None) -> Client:
    return Bench(play("x"), settings=Settings(api_keys=("one",), cors=cors or Cors())).client


def test_browsers_of_any_origin_may_ask() -> None:
    client = client_of()
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    response = client.options("/v1/chat/completions", headers=asked)  # without a key, as browsers do
    assert response.status_code == 200
    assert response.content == b""
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["access-control-allow-credentials"] == "true"
    assert response.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert response.headers["access-control-allow-headers"] == "authorization,content-type"
    for key, status in (("one", 200), ("two", 401)):
        response = client.get("/v1/models", headers={"Origin": PAGE, "X-Api-Key": key})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.headers["access-control-expose-headers"] == "x-pyctl-cache"


def test_options_is_answered_on_any_path_without_an_origin() -> None:
    response = client_of().options("/nowhere")
    assert response.status_code == 200
    assert response.headers["access-control-allow-headers"] == "*"
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("cors", "origin", "allowed"),
    [
        (Cors(), PAGE, PAGE),
        (Cors(credentials=False), PAGE, "*"),
        (Cors("localhost"), "http://localhost:3000", "http://localhost:3000"),
        (Cors("localhost"), "http://[::1]:3000", "http://[::1]:3000"),
        (Cors("localhost"), PAGE, None),
        (Cors("localhost"), "http://[bad", None),
        (Cors(f"https://b.example, {PAGE}"), PAGE, PAGE),
        (Cors(f"https://b.example, {PAGE}"), "https://app.example.evil", None),
        (Cors("https://b.example"), "", None),
    ],
)
def test_which_pages_may_ask(cors: Cors, origin: str, allowed: str | None) -> None:
    response = client_of(cors).get("/health", headers={"Origin": origin} if origin else {})
    assert response.status_code == 200
    assert response.headers.get("access-control-allow-origin") == allowed


def test_configured_methods_and_headers() -> None:
    cors = Cors(methods="GET", headers="X-One", credentials=False)
    response = client_of(cors).options("/props", headers={"Origin": PAGE, "Access-Control-Request-Headers": "x-two"})
    assert response.headers["access-control-allow-methods"] == "GET"
    assert response.headers["access-control-allow-headers"] == "X-One"
    assert response.headers["access-control-allow-credentials"] == "false"

"""Middleware before every endpoint: keys, CORS."""

from __future__ import annotations

import re

import pytest
from starlette.routing import Route

from pyctl.server.server_settings import Cors, ServerSettings
from tests.client import HI, Client
from tests.unit.server.fake import Bench, play


@pytest.fixture
def bench() -> Bench:
    return Bench(play("x"), settings=ServerSettings(api_keys=("one", "zwö")))


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer one"},
        {"Authorization": "Bearer  one"},
        {"Authorization": "bearer one"},
        {"Authorization": "one"},
        {"X-Api-Key": "one"},
        {"Authorization": "Bearer zwö".encode()},
    ],
)
def test_known_keys(bench: Bench, headers: dict[str, str | bytes]) -> None:
    assert bench.post("/v1/chat/completions", {"messages": HI}, headers=headers).status_code == 200


PUBLIC = {"/health", "/v1/health", "/", "/index.html"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer two"},
        {"X-Api-Key": ""},
        {"Authorization": "Bearer "},
        {"X-Api-Key": "one1"},
    ],
)
def test_without_a_known_key_only_the_public_paths_answer(
    bench: Bench, headers: dict[str, str]
) -> None:
    routes = [route for route in bench.app.routes if isinstance(route, Route)]
    asked = [(route.path, method) for route in routes for method in route.methods or ()]
    assert len(asked) > 20
    for path, method in (*asked, ("/no/such/path", "GET"), ("http://test//props", "GET")):
        response = bench.client.request(method, re.sub(r"\{[^}]*\}", "0", path), headers=headers)
        assert response.status_code == (200 if path in PUBLIC else 401), f"{method} {path}"
        if method != "HEAD" and path not in PUBLIC:
            error = response.json()["error"]
            assert (error if path.startswith("/api/") else error["message"]) == "Invalid API Key"
    assert not bench.worker.requests


def test_a_prefix_stands_before_every_path() -> None:
    client = Bench(settings=ServerSettings(api_keys=("one",), api_prefix="/llm")).client
    assert client.get("/llm/health").status_code == 200
    assert client.get("/llm/props").status_code == 401
    assert client.get("/llm/props", headers={"X-Api-Key": "one"}).status_code == 200
    assert client.get("/props", headers={"X-Api-Key": "one"}).status_code == 404


PAGE = "https://app.example"


def client_of(cors: Cors | None = None) -> Client:
    return Bench(play("x"), settings=ServerSettings(api_keys=("one",), cors=cors or Cors())).client


def test_browsers_of_any_origin_may_ask() -> None:
    """A preflight needs no key, as browsers send none, and each answer has the headers of its
    origin, errors too: a page could not read them otherwise.
    """
    client = client_of()
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    response = client.options(
        "/v1/chat/completions", headers=asked
    )  # without a key, as browsers do
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
    response = client_of(cors).options(
        "/props", headers={"Origin": PAGE, "Access-Control-Request-Headers": "x-two"}
    )
    assert response.headers["access-control-allow-methods"] == "GET"
    assert response.headers["access-control-allow-headers"] == "X-One"
    assert response.headers["access-control-allow-credentials"] == "false"

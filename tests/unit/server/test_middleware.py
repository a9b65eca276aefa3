"""Middleware before every endpoint: keys, CORS, the limit of bodies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pyctl.errors import PyctlError, TooLargeError
from pyctl.server.http import JsonResponse, error_response
from pyctl.server.middleware import BodyLimitMiddleware
from pyctl.server.server_settings import Cors, ServerSettings
from tests.client import HI, Client
from tests.unit.server.fake import Bench, play
from tests.unit.server.parts import in_loop


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


LIMIT = 1000


async def counting(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the size of the body."""
    n_bytes = 0
    more = True
    try:
        while more:
            message = await receive()
            n_bytes += len(message.get("body", b""))
            more = message.get("more_body", False)
    except TooLargeError as error:
        return await error_response(error)(scope, receive, send)
    await JsonResponse({"n": n_bytes})(scope, receive, send)


async def chunks(n_bytes: int, size: int) -> AsyncIterator[bytes]:
    for start in range(0, n_bytes, size):
        yield b"x" * min(size, n_bytes - start)


def post(n_bytes: int, size: int) -> httpx.Response:
    return Client.to_app(BodyLimitMiddleware(counting, LIMIT)).post(
        "/", content=chunks(n_bytes, size)
    )


@pytest.mark.parametrize("size", [1, 333, 5000])
def test_a_body_of_the_limit_passes_and_one_byte_more_does_not(size: int) -> None:
    assert post(LIMIT, size).json() == {"n": LIMIT}
    response = post(LIMIT + 1, size)
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"


@in_loop
async def test_large_bodies_share_what_they_may_take() -> None:
    """A body that does not fit beside those that are still being answered comes again later; small
    ones always pass.
    """
    read = asyncio.Event()
    answered = asyncio.Event()

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await request.body()
        except PyctlError as error:
            return await error_response(error)(scope, receive, send)
        if scope["path"] == "/slow":
            read.set()
            await answered.wait()
        await JsonResponse({"n": len(body)})(scope, receive, send)

    transport = httpx.ASGITransport(BodyLimitMiddleware(waiting, 800, small=100, together=1000))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        slow = asyncio.ensure_future(client.post("/slow", content=chunks(700, 50)))
        await read.wait()
        found = [
            (await client.post("/", content=chunks(n, 50))).status_code for n in (100, 300, 301)
        ]
        answered.set()
        found.append((await slow).status_code)
        found += [(await client.post("/", content=chunks(n, 50))).status_code for n in (800, 801)]
    assert found == [200, 200, 503, 200, 200, 413]


def test_a_client_that_asks_before_it_sends_is_refused_unread() -> None:
    sent: list[int] = []

    async def scarce() -> AsyncIterator[bytes]:
        sent.append(1)
        yield b"x"

    headers = {"expect": "100-continue", "content-length": str(LIMIT + 1)}
    client = Client.to_app(BodyLimitMiddleware(counting, LIMIT))
    assert client.post("/", content=scarce(), headers=headers).status_code == 413
    assert not sent

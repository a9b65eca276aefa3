"""Bodies beyond the limit, at the middleware alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from pyctl.errors import TooLargeError
from pyctl.server.http import JsonResponse, error_response
from pyctl.server.middleware import BodyLimitMiddleware

LIMIT = 1000


async def counting(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the size of the body."""
    n_bytes, more = 0, True
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


def post(n_bytes: int, size: int, headers: dict[str, str] | None = None) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(BodyLimitMiddleware(counting, LIMIT))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/", content=chunks(n_bytes, size), headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize("size", [1, 333, 5000])
def test_a_body_of_the_limit_passes_and_one_byte_more_does_not(size: int) -> None:
    assert post(LIMIT, size).json() == {"n": LIMIT}
    response = post(LIMIT + 1, size)
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_client_that_asks_before_it_sends_is_refused_unread() -> None:
    sent: list[int] = []

    async def scarce() -> AsyncIterator[bytes]:
        sent.append(1)
        yield b"x"

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(BodyLimitMiddleware(counting, LIMIT))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"expect": "100-continue", "content-length": str(LIMIT + 1)}
            return await client.post("/", content=scarce(), headers=headers)

    assert asyncio.run(ask()).status_code == 413
    assert not sent

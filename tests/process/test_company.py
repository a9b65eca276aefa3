"""Two clients and one context of 1,024 tokens: no request of one makes a request of the other fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.process.conftest import Server


def ids(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(1, 250), k=n)


def ask(server: Server, prompt: list[int] | list[list[int]], n: int, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "return_tokens": True, **fields}
    return httpx.post(f"{server.url}/completion", json=body, timeout=120)


@pytest.mark.parametrize(("flags", "n_ctx"), [((), 1024), (("--no-kv-unified",), 512)])
def test_each_client_is_told_what_it_may_send(start: Callable[..., Server], flags: tuple[str, ...], n_ctx: int) -> None:
    server = start("tiny-hybrid", "-np", "2", "-c", "1024", *flags)
    get = lambda path: httpx.get(server.url + path).json()  # noqa: E731
    assert get("/props")["default_generation_settings"]["n_ctx"] == n_ctx
    assert [slot["n_ctx"] for slot in get("/slots")] == [n_ctx, n_ctx]
    assert get("/v1/models")["data"][0]["meta"]["n_ctx"] == n_ctx
    assert ask(server, ids(9, n_ctx - 10), 4).status_code == 200
    assert ask(server, ids(9, n_ctx + 10), 4).json()["error"]["n_ctx"] == n_ctx
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda seed: ask(server, ids(seed, n_ctx - 10), -1), (1, 2)))
    assert [reply.json()["tokens_predicted"] for reply in replies] == [10, 10]

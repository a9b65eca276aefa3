"""Two clients and one context of 1,024 tokens: no request of one makes a request of the other fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.process.conftest import Server


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start("tiny-hybrid", "-np", "2", "-c", "1024", "--metrics")


def ids(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(1, 250), k=n)


def ask(server: Server, prompt: list[int] | list[list[int]], n: int, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "return_tokens": True, **fields}
    return httpx.post(f"{server.url}/completion", json=body, timeout=120)


def test_one_after_the_other(server: Server) -> None:
    prompts = [ids(seed, 600) for seed in (1, 2)]
    replies = [ask(server, prompts[number], 20) for number in (0, 1, 0, 1, 0, 1)]
    assert [reply.status_code for reply in replies] == [200] * 6
    texts = [reply.json()["tokens"] for reply in replies]
    assert texts == texts[:2] * 3
    cached = [reply.json()["timings"]["cache_n"] for reply in replies[2:]]
    assert min(cached) > 400, f"nothing may be lost for want of room: {cached}"


def test_both_want_three_quarters_at_once(server: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda seed: ask(server, ids(seed, 768), 200), (3, 4)))
    assert [reply.status_code for reply in replies] == [200, 200]
    assert [reply.json()["tokens_predicted"] for reply in replies] == [200, 200]


def test_replies_that_outgrow_the_context_together_take_turns(server: Server) -> None:
    reply = ask(server, [ids(5, 300), ids(6, 300)], 700)  # in one request, so that neither is over before the other
    assert reply.status_code == 200
    assert [len(each["tokens"]) for each in reply.json()] == [700, 700]
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "pyctl:suspensions_total 0\n" not in metrics
    assert "pyctl:suspended_bytes 0\n" in metrics


@pytest.mark.parametrize("stream", [False, True])
def test_what_can_never_fit_is_refused_before_anything_is_sent(server: Server, stream: bool) -> None:
    reply = ask(server, ids(7, 1100), 8, stream=stream)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "exceed_context_size_error")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (1100, 1024)


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


@pytest.mark.parametrize(("n_seqs", "who_stays"), [(2, 1), (4, 3)])
def test_side_requests_leave_conversations_where_they_are(
    start: Callable[..., Server], n_seqs: int, who_stays: int
) -> None:
    """As many conversations as there are sequences but one, and two requests of six tokens after each turn."""
    server = start("tiny-hybrid", "-np", str(n_seqs), "-c", "4096", "--no-cache-idle-slots", "--metrics")
    said = [ids(20 + who, 500) for who in range(who_stays)]
    places: list[set[int]] = [set() for _ in said]
    titles: set[int] = set()
    for turn in range(4):
        for who, prompt in enumerate(said):
            reply = ask(server, prompt, 8).json()
            places[who].add(reply["id_slot"])
            assert reply["timings"]["prompt_n"] <= (500 if turn == 0 else 31), "what is new, and the last token said"
            said[who] = [*prompt, *reply["tokens"], *ids(100 * turn + who, 30)]
            for seed in (1000, 2000):
                slot = ask(server, ids(seed + 100 * turn + who, 6), 4).json()["id_slot"]
                titles |= {slot} if turn else set()
    assert sorted(len(each) for each in places) == [1] * who_stays
    assert len(titles) == 1
    assert not titles & set.union(*places)
    metrics = httpx.get(f"{server.url}/metrics").text
    for event in ("returned", "to_ram", "lost"):
        assert f'pyctl:device_rows_total{{event="{event}"}} 0\n' in metrics, "no rows had to move"

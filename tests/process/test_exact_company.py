"""A reply with --exact depends on its request alone: four clients at once get the replies of a
cold, idle server.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.client import CHAT, HI, ChatReply
from tests.process.conftest import Server

N_CLIENTS = 4

Messages = list[dict[str, str]]


BITS: dict[str, Any] = {"max_tokens": 24, "logprobs": True, "top_logprobs": 2}
"""Fields of replies whose probabilities are compared."""


def talk(server: Server, number: int) -> list[tuple[Messages, ChatReply]]:
    """Return three turns of one client; what was asked, with the answers."""
    messages: Messages = []
    found = []
    for turn in range(3):
        text = " ".join(f"word{number}{turn}{i}" for i in range(60 + 20 * number))
        messages.append({"role": "user", "content": text})
        answer = server.chat(messages, **BITS)
        found.append((list(messages), answer))
        messages.append({"role": "assistant", "content": answer.text})
    return found


def test_four_clients_at_once_get_the_bits_of_a_cold_server(start: Callable[..., Server]) -> None:
    flags = ("--exact", "-np", str(N_CLIENTS), "-c", "16384")
    server = start("tiny-hybrid", *flags)
    with ThreadPoolExecutor(N_CLIENTS) as clients:
        talks = list(clients.map(lambda number: talk(server, number), range(N_CLIENTS)))
    answers = [each for found in talks for each in found]
    cold = start("tiny-hybrid", *flags, "--no-kv-cache")
    for messages, answer in answers:
        again = cold.chat(messages, **BITS, cache_prompt=False)
        assert answer.logprobs
        assert answer.logprobs == again.logprobs
    n_cached = sum(answer.timings["cache_n"] for _, answer in answers)
    n_known = sum(talks[i][k][1].timings["prompt_n"] for i in range(N_CLIENTS) for k in range(2))
    assert n_cached > n_known / 2, "the prompts before are reused"


def test_a_client_that_waits_sees_its_place(start: Callable[..., Server]) -> None:
    """A stream behind another one reports its place in the queue, then its progress; without
    progress its headers come once the cached part is known.
    """
    server = start("tiny-hybrid", "--exact", "-np", "1")
    # It goes on for as long as the others take, whatever the machine; its client ends it.
    long = {"messages": HI, "max_tokens": 7000, "ignore_eos": True}
    short = {"messages": [{"role": "user", "content": "b"}], "max_tokens": 2}
    with server.client.open_stream(CHAT, long) as first:
        next(event for event in first if event["choices"][0]["delta"].get("content"))
        with server.client.open_stream(CHAT, {**short, "return_progress": True}) as second:
            shown = [event["prompt_progress"] for event in second if "prompt_progress" in event]
        with server.client.open_stream(CHAT, short) as third:
            assert third.headers["x-pyctl-cache"], "it begins when the cache's part is known"
    assert shown[0]["waiting"] == 1
    assert "waiting" not in shown[-1]
    assert shown[-1]["processed"] == shown[-1]["total"]

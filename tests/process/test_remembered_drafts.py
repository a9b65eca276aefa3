"""The draft source `cache` behind a real server, before and after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyctl.engine.draft.token_index import TokenIndex
from tests.process.conftest import Server
from tests.waiting import until

Start = Callable[..., Server]

TEXTS = 'pyctl_memory_bytes{part="draft_texts"} '

FLAGS = ("--spec-type", "cache", "--exact", "--metrics", "-np", "1", "--kv-cache-min-tokens", "16")
"""Flags of the server. With --exact neither length nor pauses depend on how long steps take."""


def reply(
    server: Server,
    prompt: list[int],
    n: int = 60,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> tuple[list[int], int]:
    """Return the greedy reply's tokens, and how many of them were drafted."""
    body = {
        "prompt": prompt,
        "n_predict": n,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        **more,
    }
    found = server.client.post_json("/completion", body, headers=headers or {})
    return found["tokens"], found["timings"].get("draft_n_accepted", 0)


def n_bytes(server: Server) -> int:
    """Return bytes of the texts that drafts are copied from."""
    lines = server.client.get("/metrics").text.splitlines()
    (found,) = (line.removeprefix(TEXTS) for line in lines if line.startswith(TEXTS))
    return int(float(found))


def until_taken_in(server: Server, n_tokens: int) -> None:
    """Wait for the thread that takes in texts."""
    index = TokenIndex()
    index.n_added = n_tokens
    until(lambda: n_bytes(server) >= index.n_bytes)


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-hybrid-nextn"])
def test_a_file_that_was_seen_is_drafted_before_and_after_a_restart(
    start: Start, model: str, tmp_path: Path
) -> None:
    """A reply that repeats a cached text is drafted from it, also after a restart from the files
    alone, and drafts change no token.
    """
    flags = (*FLAGS, "--kv-cache-dir", str(tmp_path), "--spec-draft-n-max", "3")
    if model == "tiny-hybrid-nextn":
        flags = (*flags, "--spec-type", "draft-mtp,cache")
    server = start(model, *flags)
    told, other = (
        server.client.tokenize(f"{text} in the garden behind the house " * 12)
        for text in ("Ada", "Bob")
    )
    without = start(model, "--exact", "-np", "1") if model == "tiny-dense" else None
    said, _ = reply(server, told)
    # The conversation goes on, so that the cache remembers the reply; then the first prompt is sent
    # again.
    reply(server, [*told, *said, *other])
    until_taken_in(server, len([*told, *told, *said, *other]))
    again, n_again = reply(server, told)
    assert again == said
    assert n_again > 20
    if without is not None:
        assert reply(without, told) == (said, 0)
    assert server.stop() == 0
    server = start(model, *flags)
    until_taken_in(server, len([*told, *said, *other]))
    after, n_after = reply(server, told, cache_prompt=True)
    assert after == said
    assert n_after > 20


OF_A_PAGE = {"Origin": "http://evil.example"}


@pytest.mark.parametrize("headers", [OF_A_PAGE, {"X-Forwarded-For": "192.168.1.20"}])
def test_who_sees_no_texts_is_not_drafted_from_them(start: Start, headers: dict[str, str]) -> None:
    """Else the counts of its drafts tell a text of another client, a token for some tens of
    guesses.
    """
    server = start("tiny-dense", *FLAGS)
    secret = server.client.tokenize("My password is a lamp in the garden behind the house " * 8)
    reply(server, secret, 1)
    until_taken_in(server, len(secret))

    def guess(index: int, token: int, headers: dict[str, str] | None = None) -> dict[str, Any]:
        known = secret[index - 14 : index]
        bias = [[token, 100.0]]
        body = {
            "prompt": known,
            "n_predict": 4,
            "temperature": 0,
            "logit_bias": bias,
            "ignore_eos": True,
        }
        found = server.client.post_json("/completion", body, headers=headers or {})
        return {name: n for name, n in found["timings"].items() if name.startswith("draft")}

    places = range(40, 56)
    assert [guess(i, token, headers) for i in places for token in (secret[i], 7)] == [{}] * 32
    assert [guess(i, secret[i]) for i in places if guess(i, secret[i])], (
        "who may read texts is drafted from them"
    )


def test_who_does_not_share_is_not_drafted_from(start: Start) -> None:
    """A request with `cache_prompt: false` neither leaves text for drafts nor is drafted from
    others'; once all is deleted, the texts are gone, too.
    """
    server = start("tiny-dense", *FLAGS)
    told = server.client.tokenize("Ada in the garden behind the house " * 12)
    said, alone = reply(server, told, cache_prompt=False)
    assert alone == 0
    hidden = [*told[-20:], *said, *told[:20]]
    reply(server, hidden, 1, cache_prompt=False)
    assert n_bytes(server) == 0
    secret, n_secret = reply(server, told, cache_prompt=False)
    assert secret == said
    assert n_secret == 0
    # Shared, it is drafted from, but not for those who do not share.
    reply(server, hidden, 1)
    until_taken_in(server, len(hidden))
    assert reply(server, told, cache_prompt=False)[1] == 0
    assert reply(server, told)[1] > 35
    assert n_bytes(server) > 0
    assert server.client.delete("/cache").status_code == 200
    until(lambda: n_bytes(server) == 0)

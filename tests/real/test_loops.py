"""Loops of a real model: small models repeat themselves at temperature 0 on open prompts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pyctl.engine.loop_detector import MAX_PERIOD, MIN_REPEATS, MIN_TOKENS
from tests.process.conftest import Server

OPEN_PROMPTS = ("The", "My favourite things are", "Once upon a time", "It was")
"""Prompts without an end in view; the later ones are for processors that round differently."""

COUNTING = "1, 2, 3,"
"""A prompt whose reply repeats a pattern, but never the same tokens."""

N_TOKENS = 600
"""Tokens of a reply; SmolLM2's loop on the first prompt is complete after 418."""


@dataclass(frozen=True)
class Reply:
    """The tokens of a greedy reply, and the reason for its end."""

    tokens: list[int]
    stop_type: str


@dataclass
class Servers:
    """Two servers that differ in --loop-guard only."""

    counting: Server
    guarded: Server


def complete(server: Server, prompt: str) -> Reply:
    """Return a greedy reply of at most N_TOKENS tokens."""
    body = {
        "prompt": prompt,
        "n_predict": N_TOKENS,
        "temperature": 0,
        "cache_prompt": False,
        "return_tokens": True,
    }
    reply = server.client.post_json("/completion", body)
    return Reply(reply["tokens"], reply["stop_type"])


def ends_in_loop(tokens: list[int]) -> bool:
    """Return whether ``tokens`` end in a loop by the rule, whose slow form this is."""
    for period in range(1, MAX_PERIOD + 1):
        n = max(MIN_REPEATS * period, MIN_TOKENS)
        if len(tokens) >= n + period and tokens[-n:] == tokens[-n - period : -period]:
            return True
    return False


def n_loops(server: Server) -> tuple[int, int]:
    """Return the loops that /metrics counts, and those of them that the guard ended."""
    text = server.client.get("/metrics").text
    values = dict(re.findall(r"^(pyctl_loops\w*) (\d+)$", text, re.MULTILINE))
    return int(values["pyctl_loops_total"]), int(values["pyctl_loops_ended_total"])


@pytest.fixture(scope="module")
def servers(start: Callable[..., Server]) -> Servers:
    flags = ("-np", "1", "--spec-type", "none", "--metrics")
    return Servers(start("smollm2", *flags), start("smollm2", *flags, "--loop-guard"))


@pytest.fixture(scope="module")
def looping(servers: Servers) -> tuple[str, Reply]:
    """Return the first prompt whose reply loops, and that reply, which no guard ended."""
    for prompt in OPEN_PROMPTS:
        reply = complete(servers.counting, prompt)
        if ends_in_loop(reply.tokens):
            return prompt, reply
    raise AssertionError("no reply loops")


def test_without_the_guard_a_loop_is_only_counted(
    servers: Servers, looping: tuple[str, Reply]
) -> None:
    _, reply = looping
    assert len(reply.tokens) == N_TOKENS
    assert n_loops(servers.counting) == (1, 0)
    assert "a loop, not ended without --loop-guard" in servers.counting.log()


def test_the_guard_ends_a_loop_at_the_token_that_completes_it(
    servers: Servers, looping: tuple[str, Reply]
) -> None:
    """The reply has the tokens of the one that no guard ended, up to there."""
    prompt, unguarded = looping
    n_before, n_ended_before = n_loops(servers.guarded)
    reply = complete(servers.guarded, prompt)
    n = len(reply.tokens)
    print(f"{prompt!r}: the guard ends the reply after {n} tokens")
    assert reply.tokens == unguarded.tokens[:n]
    assert ends_in_loop(reply.tokens)
    assert not ends_in_loop(reply.tokens[:-1])
    assert reply.stop_type == "limit"
    assert n_loops(servers.guarded) == (n_before + 1, n_ended_before + 1)
    assert "a loop, ended by --loop-guard" in servers.guarded.log()


def test_the_guard_lets_a_model_count(servers: Servers) -> None:
    before = n_loops(servers.guarded)
    reply = complete(servers.guarded, COUNTING)
    assert len(reply.tokens) == N_TOKENS
    assert n_loops(servers.guarded) == before

"""Anthropic's SDK for Node.js in a session with threads, a prewarm and a diagnosis."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.process.conftest import Server
from tests.process.node_sdk import run_session
from tests.process.reduced_server import without_threads

KEY = "secret"
SCRIPT = "anthropic_session.mjs"
PACKAGE = "@anthropic-ai/sdk"
UNTHREADED = ["", "user"]
"""The thread type of a request, which has none, and the roles of its messages."""


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start("tiny-hybrid", "-c", "16384", "--alias", "tiny", "--api-key", KEY, is_f32=True)


def test_a_session_of_the_sdk_for_node(server: Server) -> None:
    """Its tool runner and its thread send each message once, ``max_tokens`` 0 answers nothing, and
    a changed message is named.
    """
    assert run_session(SCRIPT, PACKAGE, server.url, KEY) == {
        "threads": [
            ["create", "user"],
            ["continue", "user"],
            ["create", "user"],
            ["continue", "user"],
            *[UNTHREADED] * 3,
        ],
        "first_stop": "tool_use",
        "continued": True,
        "filled": [0, "max_tokens", 0],
        "diagnosed": [None, "messages_changed"],
    }


def test_the_sdk_sends_everything_where_threads_are_refused(server: Server) -> None:
    """After one refusal each, the tool runner and the thread send all messages of a turn."""
    with without_threads(server.url) as url:
        session = run_session(SCRIPT, PACKAGE, url, KEY)
    refused = ["create", "user"]
    second_turn = ["", "user,assistant,user"]
    assert session["threads"] == [
        *[refused, UNTHREADED, second_turn],
        *[refused, UNTHREADED, second_turn],
        *[UNTHREADED] * 3,
    ]
    assert session["first_stop"] == "tool_use"
    assert session["continued"]

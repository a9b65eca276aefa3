"""OpenAI's SDK for Node.js drives the options of the cache and predicted outputs, and does without
them on a server that ignores them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.process.conftest import Server
from tests.process.node_sdk import run_session
from tests.process.reduced_server import without_fields

KEY = "secret"
CACHE_FIELDS = (
    "prompt_cache_options",
    "prompt_cache_key",
    "prompt_cache_breakpoint",
    "prediction",
)


DRAFTS = ("--exact", "--spec-type", "ngram-mod", "--spec-draft-n-max", "3", "-np", "1")
"""Drafts of one width, which are tried on a model of any speed."""


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    flags = ("-c", "16384", "--alias", "tiny", "--api-key", KEY, *DRAFTS)
    return start("tiny-dense", *flags, is_f32=True)


@pytest.fixture(scope="module")
def session(server: Server) -> Any:
    """Return what the SDK received in one session on pyctl."""
    return run_session("openai_session.mjs", "openai", server.url, KEY)


@pytest.fixture(scope="module")
def plain_session(server: Server) -> Any:
    """Return what it received in the same session on a server that ignores the fields."""
    with without_fields(server.url, *CACHE_FIELDS) as url:
        return run_session("openai_session.mjs", "openai", url, KEY)


def test_a_prewarm_fills_the_cache_and_generates_nothing(session: Any) -> None:
    warmed = session["prewarm"]
    assert warmed["status"] == "completed"
    assert warmed["n_items"] == 0
    assert warmed["usage"]["output_tokens"] == 0
    assert warmed["usage"]["input_tokens_details"]["cache_write_tokens"] > 0
    n_cached = warmed["next_usage"]["input_tokens_details"]["cached_tokens"]
    assert n_cached >= warmed["usage"]["input_tokens"] - 1, "but for the token that is evaluated"


def test_a_prewarm_as_a_stream_has_no_item(session: Any) -> None:
    events = [name for name in session["prewarm"]["events"] if name != "response.in_progress"]
    assert events == ["response.created", "response.completed"]


def test_a_response_has_the_diagnosis_of_its_miss(session: Any) -> None:
    """A comparison ends in a hit, in a miss with its reason and tokens, or at an unknown id."""
    diagnosis = session["diagnosis"]
    assert diagnosis["first"] is None
    assert diagnosis["hit"] == {"type": "cache_hit"}
    missed = diagnosis["missed"]
    assert missed["type"] == "cache_miss"
    assert missed["reason"] == "input_changed"
    assert 0 < missed["cache_missed_tokens"] <= missed["comparison_reusable_tokens"]
    assert diagnosis["unknown"] == {"type": "comparison_response_not_found"}
    assert diagnosis["is_compared"]
    assert diagnosis["key"] == "mine"


def test_breakpoints_are_served_and_wrong_ones_refused(session: Any) -> None:
    breakpoints = session["breakpoints"]
    assert breakpoints["usage"]["prompt_tokens_details"]["cache_write_tokens"] > 0
    assert breakpoints["next_usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert breakpoints["refusal"]["status"] == 400
    assert "prompt_cache_breakpoint" in breakpoints["refusal"]["message"]


def test_a_prediction_is_counted_and_changes_no_text(session: Any) -> None:
    """The counts are those of a streamed reply; one without a prediction has none."""
    prediction = session["prediction"]
    assert prediction["is_equal"]
    details = prediction["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] >= 0
    plain = prediction["plain_usage"].get("completion_tokens_details") or {}
    assert "accepted_prediction_tokens" not in plain


def test_the_session_works_without_the_features(plain_session: Any) -> None:
    """A server that ignores the fields answers a prewarm with a reply, and adds no member."""
    assert plain_session["prewarm"]["usage"]["output_tokens"] > 0
    assert plain_session["prewarm"]["n_items"] > 0
    assert "response.output_text.delta" in plain_session["prewarm"]["events"]
    found = plain_session["diagnosis"]
    diagnoses = [found[name] for name in ("first", "hit", "missed", "unknown")]
    assert diagnoses == [None] * 4
    assert found["key"] is None
    assert plain_session["breakpoints"]["refusal"] is None
    assert plain_session["prediction"]["is_equal"]
    details = plain_session["prediction"]["usage"].get("completion_tokens_details") or {}
    assert "accepted_prediction_tokens" not in details

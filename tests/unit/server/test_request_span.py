"""The facts of a request for its span."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from starlette.routing import Route

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.prompt_comparison import PromptComparison
from pyctl.cache.request_kind import RequestKind
from pyctl.engine.loop_detector import ReplyLoop
from pyctl.engine.request import Done, DraftCounts, Request, Timings
from pyctl.errors import EngineError, RequestError
from pyctl.prompt import Prompt
from pyctl.server.request_span import (
    OPERATIONS,
    SPAN,
    AttributeValue,
    RequestSpan,
    SpanCounts,
    operation_of,
    span_of,
)
from tests.client import CHAT
from tests.unit.server.fake import Bench, play

TIMINGS = Timings(1000, 200, 50.0, 11, 500.0, 1234.0, queued_ms=20.0)
STATS = RequestStats(1200, "ram", 1000, 200, kind=RequestKind.APPEND, n_covered=1150)
DONE = Done("eos", "", TIMINGS, STATS, seq=0)
SECRET = Request(Prompt.from_ids([1, 2, 3]), stop=("a secret",), max_tokens=7)


def of_replies(*replies: Done, **fields: Any) -> dict[str, AttributeValue]:
    """Return the attributes of a span with ``replies``."""
    return RequestSpan("chat", replies=list(replies), **fields).attributes()


def test_usage_and_cache_of_a_reply() -> None:
    """The expected tokens are those of DONE, seconds are milliseconds by a thousand."""
    attributes = of_replies(DONE, model="toy", status=200)
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pyctl",
        "gen_ai.request.model": "toy",
        "gen_ai.response.model": "toy",
        "gen_ai.usage.input_tokens": 1200,
        "gen_ai.usage.cache_read.input_tokens": 1000,
        "gen_ai.usage.cache_creation.input_tokens": 150,
        "gen_ai.usage.output_tokens": 11,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 1.234,
        "pyctl.usage.evaluated_tokens": 200,
        "pyctl.cache.source": "ram",
        "pyctl.queue.seconds": 0.02,
        "pyctl.request.kind": "append",
        "http.response.status_code": 200,
    }


def test_several_replies_are_summed() -> None:
    cut = replace(DONE, stop_type="limit")
    attributes = of_replies(DONE, cut, requests=[SECRET, SECRET])
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.usage.input_tokens"] == 2400
    assert attributes["gen_ai.usage.output_tokens"] == 22
    assert attributes["gen_ai.response.finish_reasons"] == ["stop", "length"]


def test_the_section_that_differs_is_named() -> None:
    stats = replace(STATS, comparison=PromptComparison(1000, 1300, section="tools"))
    assert of_replies(replace(DONE, stats=stats))["pyctl.cache.differing_section"] == "tools"


def test_drafts_and_a_loop_are_named() -> None:
    timings = replace(TIMINGS, drafts=DraftCounts.of_draft(8, 5), loop=ReplyLoop(3, 400))
    attributes = of_replies(replace(DONE, timings=timings))
    assert attributes["pyctl.drafts.tokens"] == 8
    assert attributes["pyctl.drafts.accepted_tokens"] == 5
    assert attributes["pyctl.reply.loop_period"] == 3


def test_a_prefill_without_a_reply_has_no_first_token() -> None:
    timings = replace(TIMINGS, n_predicted=0)
    assert "gen_ai.response.time_to_first_chunk" not in of_replies(replace(DONE, timings=timings))


def test_no_attribute_has_a_text_of_the_client() -> None:
    attributes = of_replies(DONE, requests=[SECRET], error=RequestError("a secret in an error"))
    assert "secret" not in repr(attributes)
    assert attributes["gen_ai.request.max_tokens"] == 7
    assert attributes["error.type"] == "RequestError"


def test_a_reply_without_a_limit_has_no_maximum() -> None:
    attributes = of_replies(DONE, requests=[replace(SECRET, max_tokens=-1)])
    assert "gen_ai.request.max_tokens" not in attributes


@pytest.mark.parametrize(
    ("status", "error", "failure"),
    [
        (200, None, None),
        (400, RequestError("too long"), None),
        (401, None, None),
        (500, EngineError("broken"), "broken"),
        (503, None, "HTTP 503"),
        (200, EngineError("broken within the stream"), "broken within the stream"),
    ],
)
def test_only_the_server_s_own_errors_are_failures(
    status: int, error: Exception | None, failure: str | None
) -> None:
    assert RequestSpan("chat", status=status, error=error).failure == failure


def test_a_status_without_an_exception_is_the_type_of_the_error() -> None:
    assert RequestSpan("chat", status=401).attributes()["error.type"] == "401"


def test_a_span_ends_with_its_last_holder() -> None:
    ended: list[RequestSpan] = []
    span = RequestSpan("chat", on_end=ended.append)
    connection = span.hold()
    kept_stream = span.hold()
    connection.__enter__()
    kept_stream.__enter__()
    connection.__exit__(None, None, None)
    assert ended == []
    kept_stream.__exit__(None, None, None)
    assert ended == [span]


def test_embeddings_count_their_tokens() -> None:
    attributes = RequestSpan("embeddings", n_embedded=12).attributes()
    assert attributes["gen_ai.usage.input_tokens"] == 12


def test_every_path_with_an_operation_is_an_endpoint() -> None:
    app = Bench(play("a")).app
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    assert OPERATIONS.keys() - paths == set()


@pytest.mark.parametrize(
    ("scope", "operation"),
    [
        ({"type": "http", "method": "POST", "path": f"/llm{CHAT}"}, "chat"),
        ({"type": "http", "method": "OPTIONS", "path": f"/llm{CHAT}"}, None),
        ({"type": "http", "method": "POST", "path": "/llm/tokenize"}, None),
        ({"type": "lifespan"}, None),
    ],
)
def test_requests_to_a_model_have_an_operation(
    scope: dict[str, Any], operation: str | None
) -> None:
    assert operation_of(scope, "/llm") == operation


def test_the_span_of_a_scope() -> None:
    span = RequestSpan("chat")
    assert span_of({SPAN: span}) is span
    assert span_of({}) is not span_of({})


def test_spans_that_reached_no_collector_are_lost() -> None:
    counts = SpanCounts(n_queued=10, n_dropped=3, n_taken=8, n_exported=6, n_failed=1)
    assert counts.n_waiting == 2
    assert counts.n_lost == 7

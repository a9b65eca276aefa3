from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.chat.reply import ReplyDelta
from pyctl.engine.request import Done, DraftCounts, Event, Failed, Piece, Progress, Timings
from pyctl.engine.sampling import Sampling
from pyctl.errors import EngineError, UnavailableError
from pyctl.requests.reply_settings import ReplySettings
from pyctl.terminal.conversation import PromptProgress, ReplyStats
from pyctl.terminal.local import LocalBackend
from tests.client import HI
from tests.unit.server.fake import Bench, Pause, close_workers

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- endif %}"""
DONE = Done(
    "eos",
    "",
    Timings(12, 34, 5.0, 10, 250.0, 42.0, DraftCounts(2, 6, 4)),
    RequestStats(46, source="ram"),
    0,
)


@pytest.fixture(autouse=True)
def workers() -> Iterator[None]:
    yield
    close_workers()


def bench_of(*events: Event | Pause, **settings: Any) -> Bench:
    """Return a server that answers every request with the same events."""
    return Bench(lambda request: events, TEMPLATE, replies=ReplySettings(**settings))


def said(bench: Bench) -> list[ReplyDelta]:
    return [each for each in LocalBackend(bench.service).stream(HI) if isinstance(each, ReplyDelta)]


def piece(text: str) -> Piece:
    return Piece(text, (1,))


def test_reasoning_is_told_apart_from_content() -> None:
    """A chat without a server splits reasoning from content as the server does, wherever the pieces
    end, and passes on the progress of the prompt.
    """
    events = [
        *(
            Progress(46, 12, 46, 1.0, "live"),
            piece("I th"),
            piece("ink</thi"),
            piece("nk>\n\nYes"),
            piece("."),
            DONE,
        )
    ]
    bench = bench_of(*events)
    assert PromptProgress(46, 46) in LocalBackend(bench.service).stream(HI)
    assert bench.worker.requests[0].return_progress
    deltas = said(bench_of(*events))
    assert "".join(delta.reasoning for delta in deltas) == "I think"
    assert "".join(delta.content for delta in deltas) == "Yes."
    plain = said(bench_of(*events, reasoning_format="none"))
    assert "".join(delta.content for delta in plain) == "<think>\nI think</think>\n\nYes."


SETTINGS = {
    "sampling": Sampling(temperature=0.3, top_k=7, seed=5),
    "n_predict": 9,
    "cache_prompt": False,
    "reasoning_budget": 3,
    "reasoning_budget_message": "So:",
    "reasoning_format": "none",
}


@pytest.mark.parametrize("name", [*SETTINGS, ""])
def test_what_is_set_for_the_server_holds_for_a_chat_in_this_process(name: str) -> None:
    """Each setting leads to the same request to the engine as through the HTTP API, so that both
    ways give the same reply.
    """
    given = {key: value for key, value in SETTINGS.items() if name in ("", key)}
    local = bench_of(DONE, **given)
    served = bench_of(DONE, **given)
    said(local)
    served.chat()
    (asked,), (reference,) = local.worker.requests, served.worker.requests
    assert asked.prompt.tokens.tolist() == reference.prompt.tokens.tolist()
    for member in (
        "sampling",
        "max_tokens",
        "cache_prompt",
        "reasoning",
        "disk_policy",
        "stop",
        "n_probs",
    ):
        assert getattr(asked, member) == getattr(reference, member), member


def test_the_figures_come_last() -> None:
    *_, stats = LocalBackend(bench_of(piece("a"), DONE).service).stream(HI)
    assert isinstance(stats, ReplyStats)
    assert stats.n_cached == 12
    assert stats.n_evaluated == 34
    assert stats.n_predicted == 10
    assert stats.source == "ram"
    assert stats.first_token_ms == 42.0
    assert stats.tokens_per_second == 40.0
    assert stats.truncated is False
    assert stats.n_drafted == 6
    assert stats.n_accepted == 4


def test_closing_cancels_the_work() -> None:
    bench = bench_of(piece("a</think>b"), Pause(None))
    stream = LocalBackend(bench.service).stream(HI)
    assert next(stream) == ReplyDelta("a", "b")
    assert not bench.worker.handles[0].cancelled
    stream.close()
    assert bench.worker.handles[0].cancelled


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (UnavailableError("shutting down"), UnavailableError, "shutting down"),
        (MemoryError(), EngineError, "MemoryError"),
        (ValueError("odd"), EngineError, "odd"),
    ],
)
def test_failures_are_our_own_errors(error: Exception, kind: type[Exception], text: str) -> None:
    bench = bench_of(piece("a"), Failed(error))
    with pytest.raises(kind, match=text):
        said(bench)
    assert bench.worker.handles[0].cancelled


def test_name() -> None:
    bench = bench_of()
    backend = LocalBackend(bench.service)
    assert backend.name() == bench.service.model == "toy-1"
    assert not backend.supports_images()

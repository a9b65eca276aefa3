"""The log of requests: a line for each that was served, and why others ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pyctl.cache.cache_stats import Divergence, RequestStats
from pyctl.cache.prompt_comparison import PromptComparison
from pyctl.cache.request_kind import RequestKind
from pyctl.engine.loop_detector import ReplyLoop
from pyctl.engine.request import Done, DraftCounts, Progress, Timings
from pyctl.errors import NotFoundError, RequestError
from pyctl.server.app_state import HttpService
from pyctl.server.request_log import log_disconnect, log_done, log_error
from tests.client import CHAT
from tests.unit.server.fake import Bench
from tests.unit.server.parts import drafting
from tests.waiting import until

TIMINGS = Timings(1000, 200, 50.0, 11, 500.0, 1234.0)
STATS = RequestStats(1200, "ram", 1000, 200)
DONE = Done("eos", "", TIMINGS, STATS, seq=0)


@pytest.fixture(autouse=True)
def service(caplog: pytest.LogCaptureFixture) -> Iterator[HttpService]:
    """Yield a service; its own lines of the log are gone, and all later ones are kept."""
    service = Bench().service
    with caplog.at_level(logging.DEBUG, "pyctl.server"):
        caplog.clear()
        yield service


def test_a_reply_is_a_line_with_its_tokens_and_speed(
    service: HttpService, caplog: pytest.LogCaptureFixture
) -> None:
    log_done(CHAT, DONE, service)
    (record,) = caplog.records
    assert " ".join(record.getMessage().split()) == (
        "chat 1,200 tokens 1,000 from RAM 200 evaluated first 1.23 s 11 at 20.0/s"
    )
    assert record.__dict__["strong"] == "1,000 from RAM"


def test_a_prompt_that_was_not_cached_has_nothing_in_bold(
    service: HttpService, caplog: pytest.LogCaptureFixture
) -> None:
    done = replace(DONE, stats=RequestStats(1200, "none", 0, 1200))
    log_done("/completion", done, service)
    (record,) = caplog.records
    assert record.getMessage().startswith("completion ")
    assert "0 cached" in record.getMessage()
    assert record.__dict__["strong"] == ""


@pytest.mark.parametrize(
    ("n_predicted", "ms", "shown"),
    [(1, 10.0, "     1"), (0, 0.0, "     0"), (2, 0.0, "     2"), (1001, 1000.0, "at 1000/s")],
)
def test_a_speed_needs_two_tokens_and_a_time(
    n_predicted: int, ms: float, shown: str, service: HttpService, caplog: pytest.LogCaptureFixture
) -> None:
    timings = replace(TIMINGS, n_predicted=n_predicted, predicted_ms=ms)
    log_done(CHAT, replace(DONE, timings=timings), service)
    assert caplog.messages[0].endswith(shown)


def test_a_miss_is_a_second_line_with_the_texts(
    service: HttpService, caplog: pytest.LogCaptureFixture
) -> None:
    miss = Divergence(900, 0, tuple(b"at noon"), tuple(b"at nine"))
    log_done(CHAT, replace(DONE, stats=replace(STATS, miss=miss)), service)
    until(lambda: len(caplog.messages) == 2)
    assert caplog.messages[1].endswith(
        "token 900 differs from a recent prompt  nearest snapshot 0  was 'at noon'  is 'at nine'"
    )


def test_a_miss_by_chance_is_not_logged(
    service: HttpService, caplog: pytest.LogCaptureFixture
) -> None:
    chance = replace(STATS, miss=Divergence(3, 0))
    log_done(CHAT, replace(DONE, stats=chance), service)
    service.post_reply.add(lambda: logging.getLogger("pyctl.server").info("later"))
    until(lambda: "later" in caplog.messages)
    assert len(caplog.messages) == 2


def test_the_log_has_the_share_of_accepted_drafts(caplog: pytest.LogCaptureFixture) -> None:
    drafting().chat()
    assert "  3 of 8 drafts accepted\n" in caplog.text
    caplog.clear()
    drafting(DraftCounts()).chat()
    assert "drafts" not in caplog.text


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (RequestError("no"), logging.WARNING),
        (NotFoundError("no"), logging.INFO),
        (ValueError("no"), logging.ERROR),
    ],
)
def test_an_error_has_the_level_of_its_kind(
    error: Exception, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    log_error(CHAT, error)
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage() == (
        "chat: unexpected error" if level == logging.ERROR else "chat: no"
    )
    assert bool(record.exc_info) == (level == logging.ERROR), "a traceback of what is unexpected"


def test_a_client_that_left_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    log_disconnect(CHAT, None, 7)
    log_disconnect(CHAT, Progress(1200, 1000, 1000, 0.5, "ram"), 0)
    first, second = (" ".join(message.split()) for message in caplog.messages)
    assert first == "chat cancelled: the client disconnected 7 generated"
    assert second == (
        "chat cancelled: the client disconnected 1,000 of 1,200 tokens cached 0 generated"
    )


def test_the_log_names_the_section_that_differs(
    service: HttpService, caplog: pytest.LogCaptureFixture
) -> None:
    changed = PromptComparison(600, 1200, is_same_conversation=True, section="tools")
    stats = replace(STATS, kind=RequestKind.REWRITE, comparison=changed)
    log_done(CHAT, replace(DONE, stats=stats), service)
    assert " ".join(caplog.messages[1].split()) == (
        "chat rewrite: change in tools: 600 tokens evaluated again "
        "(send the same tools in the same order in all requests of a conversation)"
    )


@pytest.mark.parametrize(
    ("is_ended", "outcome"),
    [(True, "ended by --loop-guard"), (False, "not ended without --loop-guard")],
)
def test_a_loop_is_a_warning_with_its_period_and_its_end(
    is_ended: bool, outcome: str, service: HttpService, caplog: pytest.LogCaptureFixture
) -> None:
    timings = replace(TIMINGS, loop=ReplyLoop(12, 1400, is_ended))
    log_done(CHAT, replace(DONE, timings=timings), service)
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
    assert " ".join(caplog.messages[1].split()) == (
        f"chat the reply repeats 12 tokens for 1,400 more: a loop, {outcome}"
    )

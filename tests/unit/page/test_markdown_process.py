"""The process that renders Markdown: it is bounded in time, and replaced when it hangs or dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from pyctl.page.markdown import to_html
from pyctl.page.markdown_process import MAX_TEXT_BYTES, MarkdownProcess, plain_html


@pytest.fixture
def process() -> Iterator[MarkdownProcess]:
    process = MarkdownProcess(seconds=60.0, all_seconds=600.0)
    yield process
    process.close()


def test_what_takes_too_long_is_plain_and_delays_nothing_else(process: MarkdownProcess) -> None:
    """A text that stops the renderer or is too long is shown plain, and the others are rendered:
    Markdown of a model must not hang the page.
    """
    slow = "slow"
    long = "x" * (MAX_TEXT_BYTES + 1)

    def texts() -> Iterator[str]:
        for text in ("*a*", slow, "*b*", long, "\udcff*c*"):
            if text == slow:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGSTOP)  # never answers
            process.seconds = 0.1 if text == slow else 60.0
            yield text

    found = process.render(texts())
    assert found == [
        to_html("*a*"),
        plain_html(slow),
        to_html("*b*"),
        plain_html(long),
        to_html("?*c*"),
    ]


def test_a_process_that_dies_is_replaced(process: MarkdownProcess) -> None:
    assert process.render(["*a*"]) == [to_html("*a*")]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # until it has ended
    assert process.render(["*b*"]) == [to_html("*b*")]


def test_texts_after_the_time_of_a_request_are_plain_and_start_nothing() -> None:
    process = MarkdownProcess(seconds=60.0, all_seconds=0.0)
    assert process.render(["*a*", "<b>"]) == [plain_html("*a*"), plain_html("<b>")]
    assert process.pid is None


def test_a_closed_process_starts_again_with_the_next_text(process: MarkdownProcess) -> None:
    process.render(["*a*"])
    first = process.pid
    process.close()
    assert process.pid is None
    assert process.render(["*b*"]) == [to_html("*b*")]
    assert process.pid not in (None, first)

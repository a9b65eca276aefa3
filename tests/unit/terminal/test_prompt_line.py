from __future__ import annotations

import pytest

from pyctl.terminal.conversation import PromptProgress
from pyctl.terminal.prompt_line import PromptLine, progress_text
from tests.unit.terminal.screen import Screen


@pytest.mark.parametrize(
    ("n_read", "left", "ago", "end"),
    [
        (0, 0.0, 9.0, "0 of 7,474 tokens (0%)"),
        (4096, 58.4, 0.0, "4,096 of 7,474 tokens (55%), 59 s to go"),
        (4096, 58.4, 57.0, "55%), 2 s to go"),
        (4096, 58.4, 99.0, "55%), 1 s to go"),
        (4096, 300.0, 0.0, "55%), 5 min to go"),
    ],
)
def test_its_words(n_read: int, left: float, ago: float, end: str) -> None:
    assert progress_text(PromptProgress(7474, n_read, left), ago).endswith(end)


def test_a_request_that_waits_shows_its_place() -> None:
    assert progress_text(PromptProgress(7474, 0, queue_position=3)) == "waiting: number 3 in line"


def test_a_prompt_that_is_soon_read_shows_nothing() -> None:
    screen = Screen()
    line = PromptLine(screen, pause=3600.0)
    line.show(PromptProgress(7474, 0))
    line.close()
    line.show(PromptProgress(7474, 7474))  # from a server that says so within its reply
    assert screen.rows() == []
    assert screen.n_erased == 0

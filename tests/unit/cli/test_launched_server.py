"""The server of `pyctl launch`: its address, and the progress of its prompts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from pyctl.cli.arguments import parse_launch
from pyctl.cli.launched_server import follow, server_address


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ([], "http://127.0.0.1:8080"),
        (["--host", "0.0.0.0", "--port", "99"], "http://127.0.0.1:99"),
        (["--host", "/tmp/a.sock,::", "--api-prefix", "/llm"], "http://[::1]:8080/llm"),
    ],
)
def test_the_address_that_a_program_on_this_machine_uses(flags: list[str], address: str) -> None:
    assert server_address(parse_launch("claude", flags, {})[0]) == address


class Steps:
    """An event that is set after the ``steps``, which run one at each wait."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = [*steps]

    def wait(self, _: float) -> bool:
        if not self._steps:
            return True
        self._steps.pop(0)()
        return False


def test_a_program_without_a_screen_shows_how_far_its_prompt_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Progress lines that are appended to the log are shown, joined where the log wraps them. Lines
    of before the start and other lines are not shown.
    """
    log = tmp_path / "log"
    log.write_text("10:00:00 prefill      1 of 2 tokens evaluated\n")  # of before

    def add(text: str) -> Callable[[], object]:
        def write() -> None:
            with log.open("a") as file:
                file.write(text)

        return write

    steps = Steps(
        add("10:00:05 prefill       4,096 of 39,293 tokens evaluated   10 %   819 tok/s"),
        add("    43 s to go  request 1\n10:00:06 ready\n"),
        add("10:00:07 chat  39,293 tokens\n"),
    )
    follow(log, cast(threading.Event, steps))
    assert capsys.readouterr().err.splitlines() == [
        "pyctl: prompt: 4,096 of 39,293 tokens evaluated 10 % 819 tok/s 43 s to go request 1"
    ]

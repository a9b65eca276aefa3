"""Messages of llama.cpp: the level at which they are logged, and the thread that gets an error."""

from __future__ import annotations

import logging
import threading

import pytest

from pyctl.llama.library.library_log import LibraryLog

DEBUG = 1
INFO = 2
WARN = 3
ERROR = 4
CONTINUED = 5


def test_messages_are_logged_one_level_quieter(caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp's messages appear one level below their own, a continuation at that of its line,
    and empty ones not at all: its warnings are ordinary information for a user.
    """
    caplog.set_level(logging.DEBUG, "llama.cpp")
    said = LibraryLog()
    for level, text in (
        (INFO, b"a"),
        (WARN, b"b"),
        (CONTINUED, b"c\n"),
        (ERROR, b"d"),
        (ERROR, b" \n"),
    ):
        said.receive(level, text)
    levels = [(record.levelno, record.message) for record in caplog.records]
    assert levels == [
        (logging.DEBUG, "a"),
        (logging.INFO, "b"),
        (logging.INFO, "c"),
        (logging.WARNING, "d"),
    ]


def test_the_first_error_is_the_cause() -> None:
    said = LibraryLog()
    assert said.last_error("nothing") == "nothing"
    with said.captured() as lines:
        said.receive(ERROR, b"load: model: not enough\n")
        said.receive(ERROR, b"giving up\n")
    assert lines == ["load: model: not enough", "giving up"]
    assert said.last_error("nothing") == "not enough"
    assert said.last_error("nothing") == "nothing"
    said.receive(ERROR, b"load: they differ\nhint: take another\n")
    assert said.last_error("nothing") == "they differ; hint: take another"
    said.receive(ERROR, b"an evaluation was interrupted\n")
    said.forget_errors()
    said.receive(ERROR, b"load: not a model\n")
    assert said.last_error("nothing") == "not a model"


def test_threads_take_turns_at_capturing() -> None:
    """Threads that capture messages at the same time each get their own lines and no others, else
    an error would be reported to the wrong request.
    """
    said = LibraryLog()
    found = {}

    def capture(name: str) -> None:
        for turn in range(50):
            with said.captured() as lines:
                for _ in range(3):
                    said.receive(INFO, name.encode())
            found[name, turn] = lines

    threads = [threading.Thread(target=capture, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    assert all(lines == [name] * 3 for (name, _), lines in found.items())

from __future__ import annotations

import contextlib
import io
import logging

import pytest

from pyctl.cli import logs
from pyctl.cli.logs import LoadProgress


class Terminal(io.StringIO):
    """A stream on which escapes have an effect."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    for seconds, expected in (
        (60.0, []),
        (0.0, ["loading big.gguf: 25 %", "loading big.gguf: 100 %"]),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO), LoadProgress("/models/big.gguf", seconds) as progress:
            progress.show(0.25)
            progress.show(1.0)
        assert [record.getMessage() for record in caplog.records] == expected


def test_on_a_terminal_it_stays_in_place_and_away_once_it_has_ended() -> None:
    with contextlib.redirect_stderr(Terminal()) as shown:
        with LoadProgress("/models/big.gguf") as progress:
            progress.show(0.5)
        progress.show(0.25)  # a model that is loaded again after a sleep
    assert shown.getvalue() == "loading big.gguf: 50%\x1b[K\r\x1b[K"


def test_a_log_file_on_a_full_disk_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = logging.Logger("full")
    handler = logs.LogFile("/dev/full")
    logger.addHandler(handler)
    for _ in range(3):
        logger.info("a line")
    with contextlib.suppress(OSError):
        handler.close()
    assert capsys.readouterr().err == "cannot write --log-file /dev/full: No space left on device\n"


def test_log_message_stays_in_its_line_with_indented_traceback() -> None:
    """Control characters in arguments are escaped and further lines are indented, so that a path or
    a name cannot forge a line of the log or a command to the terminal.
    """
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setFormatter(logs.LineFormatter(with_time=False))
    logger = logging.Logger("odd")
    logger.addHandler(handler)
    logger.info("%s: '%s', %d of %.1f", "/a\x1b]0;x\x07\nforged", "b\n", 3, 2.5)
    logger.info("%(what)s", {"what": "c\u202e\n"})
    logger.info("a table:\nforged\x1b\nrows")
    try:
        raise ValueError("d\nforged \x9b")
    except ValueError:
        logger.exception("%s", ValueError("e\nf"))
    lines = said.getvalue().split("\n")
    assert lines[:4] == [
        "/a\\x1b]0;x\\x07\\nforged: 'b\\n', 3 of 2.5",
        "c\\u202e\\n",
        "a table:",
        "  forged",
    ]
    assert lines[5:7] == ["error: e\\nf", "  Traceback (most recent call last):"]
    assert lines[-3:] == ["  ValueError: d", "  forged ", ""]


def test_colours_are_for_terminals_and_forged_ones_are_shown() -> None:
    """Only the formatter adds colours, and only for a terminal. An escape sequence in an argument
    is shown as text in both cases.
    """
    record = logging.makeLogRecord(
        {
            "msg": "chat  9 from disk  %s",
            "args": ("\x1b[31m",),
            "levelno": 20,
            "strong": "9 from disk",
        }
    )
    plain = logs.LineFormatter(with_time=False).format(record)
    assert plain == "chat  9 from disk  \\x1b[31m"
    coloured = logs.LineFormatter(with_time=False, is_coloured=True)
    assert coloured.format(record) == "chat  \x1b[32m9 from disk\x1b[0m  \\x1b[31m"
    warning = logging.makeLogRecord(
        {"msg": "full", "levelno": logging.WARNING, "levelname": "WARNING"}
    )
    assert coloured.format(warning) == "\x1b[33mwarning: \x1b[0mfull"
    assert (
        logs.LineFormatter(with_time=True, is_coloured=True).format(warning).startswith("\x1b[2m")
    )


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "escapes"), [(True, "", 2), (True, "1", 0), (False, "", 0)]
)
def test_no_color_and_pipes_are_respected(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, no_color: str, escapes: int
) -> None:
    said = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setenv("NO_COLOR", no_color)
    given: dict[str, list[logging.Handler]] = {}
    monkeypatch.setattr(
        logging, "basicConfig", lambda level, handlers: given.update(handlers=handlers)
    )
    with contextlib.redirect_stderr(said):
        logs.start_log(logs.LogSettings(timestamps=False), [])
    given["handlers"][0].handle(
        logging.makeLogRecord({"msg": "no", "levelno": 30, "levelname": "WARNING"})
    )
    assert said.getvalue().count("\x1b") == escapes

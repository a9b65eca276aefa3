from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from rich.console import Console

from pyctl.chat.reply import CallDelta, ReplyDelta
from pyctl.errors import RequestError
from pyctl.terminal.console import (
    CommandCompleter,
    PipeReader,
    PlainView,
    RichView,
    shorten_history,
    stats_line,
)
from pyctl.terminal.conversation import ReplyStats
from pyctl.terminal.interactive import COMMANDS, WITH_PATH
from tests.unit.terminal.screen import Screen


class ScreenText(io.StringIO):
    def isatty(self) -> bool:
        return True


def rich_view(*, stats: bool = True) -> tuple[RichView, Screen]:
    screen = Screen()
    console = Console(
        file=screen,
        force_terminal=True,
        force_interactive=True,
        color_system="standard",
        width=40,
        height=12,
    )
    return RichView(console, stats=stats), screen


def test_stats_line() -> None:
    assert stats_line(ReplyStats(12345, 67, 8, 123.4, 31.25, "disk", truncated=True)) == (
        "cut at the token limit | 12,345 cached (disk) | 67 evaluated | first 123 ms | 8 tokens | "
        "31.2/s"
    )
    assert stats_line(ReplyStats(0, 5, source="none")) == "0 cached | 5 evaluated"
    assert stats_line(ReplyStats(first_token_ms=1234.5)) == "first 1.23 s"
    assert stats_line(ReplyStats(n_drafted=8, n_accepted=3)) == "3 of 8 drafts accepted (38%)"
    assert stats_line(ReplyStats()) == ""


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80])
def test_the_figures_take_one_line_of_any_width(width: int) -> None:
    line = stats_line(
        full := ReplyStats(39134, 17, 212, 310.0, 52.1, "disk", n_drafted=20, n_accepted=3), width
    )
    assert 0 < len(line) <= width
    assert stats_line(full).startswith(line)
    assert width < 80 or "212 tokens" in line


def test_plain_writes_replies_to_out_and_the_rest_to_err() -> None:
    out = io.StringIO()
    err = io.StringIO()
    view = PlainView(out, err)
    view.delta(ReplyDelta("hm", ""))
    view.delta(ReplyDelta("", "one "))
    view.delta(ReplyDelta("", "two"))
    view.end(ReplyStats(1, 2))
    view.info("saved")
    assert out.getvalue() == "one two\n"
    assert err.getvalue() == "hm\n1 cached | 2 evaluated\nsaved\n"


def test_plain_adds_no_second_line_end_and_errors_begin_a_line() -> None:
    out = io.StringIO()
    err = io.StringIO()
    view = PlainView(out, err, stats=False)
    view.delta(ReplyDelta(content="one\n"))
    view.end(ReplyStats(1, 2))
    view.delta(ReplyDelta(content="two"))
    view.error("broken")
    assert out.getvalue() == "one\ntwo\n"
    assert err.getvalue() == "error: broken\n"


def test_plain_leaves_control_characters_alone_except_on_a_terminal() -> None:
    for out, text in ((io.StringIO(), "a\x1b[31m\tb\n"), (ScreenText(), "a[31m\tb\n")):
        view = PlainView(out, io.StringIO())
        view.delta(ReplyDelta(content="a\x1b[31m\tb"))
        view.end(None)
        assert out.getvalue() == text


def test_rich_dims_thoughts_and_numbers() -> None:
    view, screen = rich_view()
    view.delta(ReplyDelta("hm", ""))
    view.delta(ReplyDelta("", "yes"))
    view.end(ReplyStats(1, 2))
    assert screen.rows() == ["hm", "", "yes", "", "1 cached | 2 evaluated", ""]
    assert [screen.style(row) for row in (0, 2, 4)] == ["2", "", "2"]


def test_rich_obeys_neither_its_markup_nor_escapes() -> None:
    view, screen = rich_view()
    view.delta(ReplyDelta("[red]why", "[bold]x[/bold] :smile: \x1b[31m\x07\x9b1m"))
    view.error("\x1b]0;title\x07")
    assert screen.rows() == ["[red]why", "", "[bold]x[/bold] :smile: [31m1m", "error: ]0;title"]
    assert screen.style(3) == "31"


CALLS = [
    ReplyDelta(content="Let me see.", calls=(CallDelta(0, "a", "weather", '{"city":'),)),
    ReplyDelta(calls=(CallDelta(0, arguments=' "Oslo"}'), CallDelta(1, "b", "time", "{}"))),
]


def test_rich_shows_each_tool_call_on_a_line_of_its_own() -> None:
    view, screen = rich_view()
    for delta in (ReplyDelta("hm"), *CALLS):
        view.delta(delta)
    view.end(ReplyStats(1, 2))
    calls = ['call weather {"city": "Oslo"}', "call time {}"]
    assert screen.rows() == ["hm", "", "Let me see.", "", *calls, "", "1 cached | 2 evaluated", ""]
    assert screen.style(4) == "33"


def test_plain_keeps_tool_calls_out_of_the_reply() -> None:
    out = io.StringIO()
    err = io.StringIO()
    view = PlainView(out, err, stats=False)
    for delta in CALLS:
        view.delta(delta)
    view.end(ReplyStats(1, 2))
    assert out.getvalue() == "Let me see.\n"
    assert err.getvalue() == 'call weather {"city": "Oslo"}\ncall time {}\n'


def test_a_long_history_keeps_its_newest_entries(tmp_path: Path) -> None:
    """A history above its size keeps the newest half of its entries, whole and private. One that
    fits is left alone, and one entry above the size leaves none.
    """
    from prompt_toolkit.history import FileHistory

    path = tmp_path / "history"
    history = FileHistory(path)
    for number in range(100):
        history.store_string(f"line {number}\nand # more")
    before = list(history.load_history_strings())
    size = path.stat().st_size
    shorten_history(path, size)
    assert path.stat().st_size == size
    shorten_history(path, size - 1)
    kept = list(FileHistory(path).load_history_strings())
    assert kept == before[: len(kept)]
    assert 40 <= len(kept) <= 50
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"+" + b"x" * 3000)
    shorten_history(path, 1000)
    assert path.read_bytes() == b""


def test_all_of_a_pipe() -> None:
    marked = "\ufeffone \ufeff".encode()
    for data, said in ((b"one\r\ntwo\n\n", "one\r\ntwo"), (b"", ""), (marked, "one \ufeff")):
        output, source = os.pipe()
        os.write(source, data)
        os.close(source)
        with open(output, encoding="utf-8") as file:
            assert PipeReader(file).read_all() == said
    with (
        open("/dev/zero", encoding="utf-8") as file,
        pytest.raises(RequestError, match="more than 4,194,304 bytes"),
    ):
        PipeReader(file).read_all()


def test_a_byte_order_mark_before_the_lines_of_a_pipe() -> None:
    output, source = os.pipe()
    os.write(source, "\ufeffone\n\ufefftwo\n".encode())
    os.close(source)
    with open(output, encoding="utf-8") as file:
        reader = PipeReader(file)
        assert [reader.read(), reader.read()] == ["one", "\ufefftwo"]


def test_tab_completes_commands_and_paths(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    completer = CommandCompleter(dict.fromkeys(COMMANDS, ""), WITH_PATH)

    def completed(text: str) -> list[str]:
        return [found.text for found in completer.get_completions(Document(text), CompleteEvent())]

    assert completed("/s") == ["/system", "/set", "/save"]
    assert completed(f"/file {tmp_path}/no") == ["tes.txt"]
    assert completed("say /s") == completed("/system /s") == completed("") == []

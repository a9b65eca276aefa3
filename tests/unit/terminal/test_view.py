from __future__ import annotations

import io
import re

from rich.console import Console

from pyctl.chat.reply import CallDelta
from pyctl.terminal.console import PlainView, RichView, stats_line
from pyctl.terminal.conversation import ChatDelta, ReplyStats


class ScreenText(io.StringIO):
    def isatty(self) -> bool:
        return True


def rich_view(*, stats: bool = True) -> tuple[RichView, io.StringIO]:
    out = ScreenText()
    return RichView(Console(file=out, force_terminal=True, color_system="standard", width=40), stats=stats), out


def test_stats_line() -> None:
    assert stats_line(ReplyStats(12345, 67, 8, 123.4, 31.25, "disk", truncated=True)) == (
        "12,345 cached (disk) | 67 evaluated | first token 123 ms | 8 tokens | 31.2 tokens/s | cut at the token limit"
    )
    assert stats_line(ReplyStats(0, 5, source="none")) == "0 cached | 5 evaluated"
    assert stats_line(ReplyStats(first_token_ms=1234.5)) == "first token 1.23 s"
    assert stats_line(ReplyStats(n_drafted=8, n_accepted=3)) == "3 of 8 drafted accepted (38%)"
    assert stats_line(ReplyStats(streamed_bytes=3 * 2**30)) == "3,072 MiB of K and V from RAM"
    assert stats_line(ReplyStats(streamed_bytes=0)) == ""
    assert stats_line(ReplyStats(selected_chunks=1200)) == "1,200 chunks selected"
    assert stats_line(ReplyStats()) == ""


def test_plain_writes_replies_to_out_and_the_rest_to_err() -> None:
    out, err = io.StringIO(), io.StringIO()
    view = PlainView(out, err)
    view.delta(ChatDelta("hm", ""))
    view.delta(ChatDelta("", "one "))
    view.delta(ChatDelta("", "two"))
    view.end(ReplyStats(1, 2))
    view.info("saved")
    assert out.getvalue() == "one two\n"
    assert err.getvalue() == "hm\n1 cached | 2 evaluated\nsaved\n"


def test_plain_adds_no_second_line_end_and_errors_begin_a_line() -> None:
    out, err = io.StringIO(), io.StringIO()
    view = PlainView(out, err, stats=False)
    view.delta(ChatDelta(content="one\n"))
    view.end(ReplyStats(1, 2))
    view.delta(ChatDelta(content="two"))
    view.error("broken")
    assert out.getvalue() == "one\ntwo\n"
    assert err.getvalue() == "error: broken\n"


def test_plain_leaves_control_characters_alone_except_on_a_terminal() -> None:
    for out, text in ((io.StringIO(), "a\x1b[31m\tb\n"), (ScreenText(), "a[31m\tb\n")):
        view = PlainView(out, io.StringIO())
        view.delta(ChatDelta(content="a\x1b[31m\tb"))
        view.end(None)
        assert out.getvalue() == text


def test_rich_dims_thoughts_and_numbers() -> None:
    view, out = rich_view()
    view.delta(ChatDelta("hm", ""))
    view.delta(ChatDelta("", "yes"))
    view.end(ReplyStats(1, 2))
    assert out.getvalue() == "\x1b[2mhm\x1b[0m\n\nyes\n\x1b[2m1 cached | 2 evaluated\x1b[0m\n"


def test_rich_says_when_a_reply_was_stopped_and_can_leave_out_numbers() -> None:
    view, out = rich_view(stats=False)
    view.delta(ChatDelta(content="one"))
    view.end(None)
    view.delta(ChatDelta(content="two"))
    view.end(ReplyStats(1, 2))
    assert out.getvalue() == "one\n\x1b[2mstopped\x1b[0m\ntwo\n"


def test_rich_obeys_neither_markup_nor_escapes_nor_the_width() -> None:
    view, out = rich_view()
    text = "[bold]x[/bold] :smile: " + "word " * 20
    view.delta(ChatDelta(content=text + "\x1b[31m\x07\x9b1m"))
    view.error("\x1b]0;title\x07")
    assert out.getvalue() == f"{text}[31m1m\n\x1b[31merror: ]0;title\x1b[0m\n"


CALLS = [
    ChatDelta(content="Let me see.", calls=(CallDelta(0, "a", "weather", '{"city":'),)),
    ChatDelta(calls=(CallDelta(0, arguments=' "Oslo"}'), CallDelta(1, "b", "time", "{}"))),
]


def test_rich_shows_each_tool_call_on_a_line_of_its_own() -> None:
    view, out = rich_view()
    for delta in (ChatDelta("hm"), *CALLS):
        view.delta(delta)
    view.end(ReplyStats(1, 2))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert plain == ('hm\n\nLet me see.\n\ncall weather {"city": "Oslo"}\ncall time {}\n1 cached | 2 evaluated\n')
    assert "\x1b[33mcall weather" in out.getvalue()


def test_plain_keeps_tool_calls_out_of_the_reply() -> None:
    out, err = io.StringIO(), io.StringIO()
    view = PlainView(out, err, stats=False)
    for delta in CALLS:
        view.delta(delta)
    view.end(ReplyStats(1, 2))
    assert out.getvalue() == "Let me see.\n"
    assert err.getvalue() == 'call weather {"city": "Oslo"}\ncall time {}\n'

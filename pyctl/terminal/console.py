"""Reading lines and showing replies, at a terminal or through pipes."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.text import Text

from pyctl.atomic_file import make_private, open_private
from pyctl.chat.reply import CallDelta
from pyctl.errors import RequestError
from pyctl.terminal.conversation import ChatDelta, ReplyStats
from pyctl.text import clean

__all__ = [
    "PipeReader",
    "PlainView",
    "Reader",
    "RichView",
    "TerminalReader",
    "View",
    "accepted_share",
    "history_path",
    "selected_count",
    "stats_line",
    "streamed_size",
]


_POLL_SECONDS = 0.2


class Reader(Protocol):
    """A source of messages and commands."""

    def read(self, default: str = "") -> str:
        """The next one; ``default`` is there to be edited. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""


class PipeReader:
    """One line at a time, unchanged, read from the descriptor of ``file``."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._read = bytearray()
        self._is_open = True

    def read(self, default: str = "") -> str:
        if default:
            raise RequestError("no terminal to edit in; give the new text after /edit")
        while b"\n" not in self._read and self._is_open:
            # A signal may come just before a read blocks: its handler runs when the poll ends.
            if select.select([self._file], [], [], _POLL_SECONDS)[0]:
                part = os.read(self._file.fileno(), 2**16)
                self._read += part
                self._is_open = bool(part)
        if not self._read:
            raise EOFError
        n = self._read.find(b"\n") + 1 or len(self._read)
        line = bytes(self._read[:n])
        del self._read[:n]
        try:
            return line.decode(self._file.encoding).rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise RequestError(f"the input is not {error.encoding} text") from error


class TerminalReader:
    """Enter sends; Alt-Enter, or Enter after a backslash, begins a new line. History is kept in ``history``."""

    def __init__(self, history: Path | None = None) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(history), key_bindings=_keys(), multiline=True, prompt_continuation=". "
        )

    def read(self, default: str = "") -> str:
        return self._session.prompt("> ", default=default)


def history_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the lines typed earlier are kept."""
    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "pyctl" / "history"


def _history(path: Path | None) -> History:
    if path is None:
        return InMemoryHistory()
    try:
        make_private(path.parent)
        os.close(open_private(path, os.O_RDWR))
    except OSError:  # a chat without a memory is better than none
        return InMemoryHistory()
    return FileHistory(path)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


CALL_STYLE = "yellow"


class View(Protocol):
    """A place for replies and remarks."""

    def delta(self, delta: ChatDelta) -> None:
        """The next bit of the reply, at once."""

    def end(self, stats: ReplyStats | None) -> None:
        """The reply is over; ``stats`` is None when it was cut short."""

    def info(self, text: str) -> None:
        """An answer to a command."""

    def error(self, text: str) -> None:
        """One line that says what went wrong."""


def call_text(call: CallDelta) -> str:
    """More of a tool call: its name first, then its arguments as they come."""
    return f"call {call.name} {call.arguments}" if call.name else call.arguments


def stats_line(stats: ReplyStats) -> str:
    """The known numbers of a reply in one line."""
    parts = []
    if stats.n_cached is not None:
        parts.append(f"{stats.n_cached:,} cached" + (f" ({stats.source})" if stats.source not in ("", "none") else ""))
    if stats.n_evaluated is not None:
        parts.append(f"{stats.n_evaluated:,} evaluated")
    if stats.first_token_ms is not None:
        ms = stats.first_token_ms
        parts.append(f"first token {ms:.0f} ms" if ms < 1000.0 else f"first token {ms / 1000.0:.2f} s")
    if stats.n_predicted is not None:
        parts.append(f"{stats.n_predicted:,} tokens")
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.n_drafted and stats.n_accepted is not None:
        parts.append(accepted_share(stats.n_drafted, stats.n_accepted))
    if stats.streamed_bytes:
        parts.append(streamed_size(stats.streamed_bytes))
    if stats.selected_chunks:
        parts.append(selected_count(stats.selected_chunks))
    if stats.truncated:
        parts.append("cut at the token limit")
    return " | ".join(parts)


def accepted_share(n_drafted: int, n_accepted: int) -> str:
    """How many of the tokens that were drafted are part of replies."""
    return f"{n_accepted:,} of {n_drafted:,} drafted accepted ({n_accepted / n_drafted:.0%})"


def streamed_size(n_bytes: int) -> str:
    """How much was read from RAM by attention."""
    return f"{n_bytes / 2**20:,.0f} MiB of K and V from RAM"


def selected_count(n_chunks: int) -> str:
    """How much attention read where it did not read everything."""
    return f"{n_chunks:,} chunks selected"


class PlainView:
    """Replies to ``out``; thoughts, tool calls, numbers, remarks and errors to ``err``.

    Nothing but text is written: only a reply that goes into a file or a pipe is left as it came.
    """

    def __init__(self, out: TextIO, err: TextIO, *, stats: bool = True) -> None:
        self._out = out
        self._err = err
        self._stats = stats
        self._open: TextIO | None = None
        self._last = ""

    def delta(self, delta: ChatDelta) -> None:
        self._write(self._err, delta.reasoning)
        self._write(self._out, delta.content)
        for call in delta.calls:
            if call.name:
                self._break()
            self._write(self._err, call_text(call))

    def end(self, stats: ReplyStats | None) -> None:
        self._break()
        if stats is not None and self._stats:
            self.info(stats_line(stats))

    def info(self, text: str) -> None:
        print(clean(text), file=self._err, flush=True)

    def error(self, text: str) -> None:
        self._break()
        print(clean(f"error: {text}"), file=self._err, flush=True)

    def _write(self, file: TextIO, text: str) -> None:
        if not text:
            return
        if self._open is not file:
            self._break()
            self._open = file
        file.write(clean(text) if file.isatty() else text)
        file.flush()
        self._last = text[-1]

    def _break(self) -> None:
        if self._open is not None and self._last != "\n":
            self._open.write("\n")
            self._open.flush()
        self._open = None


class RichView:
    """Everything to one terminal: thoughts and numbers dim, tool calls yellow, errors red."""

    def __init__(self, console: Console, *, stats: bool = True) -> None:
        self._console = console
        self._stats = stats
        self._style: str | None = None
        self._last = ""

    def delta(self, delta: ChatDelta) -> None:
        self._write(delta.reasoning, "dim")
        self._write(delta.content, "")
        for call in delta.calls:
            if call.name and self._style == CALL_STYLE:
                self._break()
            self._write(call_text(call), CALL_STYLE)

    def end(self, stats: ReplyStats | None) -> None:
        self._break()
        self._style = None
        if stats is None:
            self._line("stopped", "dim")
        elif self._stats:
            self._line(stats_line(stats), "dim")

    def info(self, text: str) -> None:
        self._line(text, "cyan")

    def error(self, text: str) -> None:
        self._break()
        self._style = None
        self._line(f"error: {text}", "red")

    def _write(self, text: str, style: str) -> None:
        if not text:
            return
        if self._style is not None and self._style != style:
            self._break()
            self._line("", "")
        self._style = style
        self._console.print(Text(clean(text), style=style), end="", soft_wrap=True)
        self._last = text[-1]

    def _break(self) -> None:
        if self._style is not None and self._last != "\n":
            self._line("", "")
        self._last = "\n"

    def _line(self, text: str, style: str) -> None:
        self._console.print(Text(clean(text), style=style), soft_wrap=True)

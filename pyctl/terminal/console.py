"""Reading lines and showing replies, at a terminal or through pipes."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    PathCompleter,
    WordCompleter,
)
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.text import Text

from pyctl.chat.reply import ReplyDelta
from pyctl.errors import RequestError
from pyctl.files.atomic_file import make_private, open_private, write_atomic
from pyctl.settings.limit import limit
from pyctl.terminal.conversation import MAX_TEXT_BYTES, ReplyStats
from pyctl.terminal.rendering import GrowingText
from pyctl.text import clean

__all__ = [
    "CommandCompleter",
    "PipeReader",
    "PlainView",
    "RichView",
    "TerminalReader",
    "View",
    "shorten_history",
    "stats_line",
]

_POLL_SECONDS = 0.2

_MAX_HISTORY_BYTES = limit(
    1 << 20, "lines typed in `pyctl chat`", "the oldest are forgotten at a start", "disk", "bytes"
)


class PipeReader:
    """A reader of the text of ``file``, from its descriptor. Text that is not in its encoding
    raises RequestError.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._read = bytearray()
        self._is_open = True
        self._is_begun = False

    def read(self, default: str = "") -> str:
        """Return the next line, unchanged. Raises EOFError at the end, RequestError for a
        ``default``: nothing can edit it.
        """
        if default:
            raise RequestError("no terminal to edit in; give the new text after /edit")
        while b"\n" not in self._read and self._is_open:
            self._fill()
        if not self._read:
            raise EOFError
        n = self._read.find(b"\n") + 1 or len(self._read)
        line = bytes(self._read[:n])
        del self._read[:n]
        return self._decoded(line).rstrip("\r\n")

    def ask(self, question: str) -> str:
        """Return no answer: lines of a pipe are messages."""
        return ""

    def read_all(self) -> str:
        """Return everything up to the end, without line ends at the end. Raises RequestError above
        MAX_TEXT_BYTES.
        """
        while self._is_open:
            self._fill()
            if len(self._read) > MAX_TEXT_BYTES:
                raise RequestError(f"standard input has more than {MAX_TEXT_BYTES:,} bytes")
        return self._decoded(bytes(self._read)).rstrip("\r\n")

    def _fill(self) -> None:
        # A signal may come just before a read blocks: its handler runs when the poll ends.
        if select.select([self._file], [], [], _POLL_SECONDS)[0]:
            part = os.read(self._file.fileno(), 2**16)
            self._read += part
            self._is_open = bool(part)

    def _decoded(self, data: bytes) -> str:
        if not self._is_begun:  # PowerShell writes a mark before piped text
            data = data.removeprefix(codecs.BOM_UTF8)
        self._is_begun = True
        try:
            return data.decode(self._file.encoding)
        except UnicodeDecodeError as error:
            raise RequestError(f"the input is not {error.encoding} text") from error


class TerminalReader:
    """A reader of lines at a terminal: Enter sends; Alt-Enter starts a new line.

    History is kept in ``history``. Tab completes the ``commands``, which are described by their
    values, and the paths after those in ``with_path``.
    """

    def __init__(
        self, history: Path, commands: Mapping[str, str], with_path: Collection[str]
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            key_bindings=_keys(),
            multiline=True,
            prompt_continuation=". ",
            completer=CommandCompleter(commands, with_path),
            complete_while_typing=False,
        )

    def read(self, default: str = "") -> str:
        """Return the next message; the user can edit ``default``. Raises EOFError at the end,
        KeyboardInterrupt on Ctrl-C.
        """
        return self._session.prompt([("bold", "> ")], default=default)

    def ask(self, question: str) -> str:
        """Return the answer, which has no place in the history; Ctrl-C and Ctrl-D are none."""
        session: PromptSession[str] = PromptSession(history=InMemoryHistory())
        try:
            return session.prompt([("ansiyellow", question)])
        except (EOFError, KeyboardInterrupt):
            return ""


class CommandCompleter(Completer):
    """A completer of the commands at the start of a message, and of the paths after those in
    ``with_path``.
    """

    def __init__(self, commands: Mapping[str, str], with_path: Collection[str]) -> None:
        self._commands = WordCompleter(list(commands), meta_dict=dict(commands), sentence=True)
        self._with_path = with_path
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """Yield the completions of the text before the cursor."""
        text = document.text_before_cursor
        name, blank, path = text.partition(" ")
        if text.startswith("/") and not blank:
            yield from self._commands.get_completions(document, event)
        elif name in self._with_path:
            yield from self._paths.get_completions(Document(path.lstrip()), event)


def _history(path: Path) -> History:
    try:
        make_private(path.parent)
        os.close(open_private(path, os.O_RDWR))
    except OSError:  # a chat without a memory is better than none
        return InMemoryHistory()
    with contextlib.suppress(OSError):
        shorten_history(path)
    return FileHistory(path)


def shorten_history(path: Path, maximum: int = _MAX_HISTORY_BYTES) -> None:
    """Cut a history of more than ``maximum`` bytes to its newest entries, half of that. Raises
    OSError.
    """
    with path.open("rb") as file:
        if (n_bytes := file.seek(0, os.SEEK_END)) <= maximum:
            return
        file.seek(n_bytes - maximum // 2)
        # Each entry starts with an empty line and a comment; the first of these bytes are the rest
        # of one.
        entries = file.read().partition(b"\n\n# ")[2]
    write_atomic(path, b"\n# " + entries if entries else b"")


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


STYLES = {"reasoning": "dim", "call": "yellow"}


def stats_line(stats: ReplyStats, width: int | None = None) -> str:
    """Return the known numbers of a reply in one line; those at the end that pass ``width`` are
    omitted.
    """
    parts = []
    if stats.truncated:
        parts.append("cut at the token limit")
    if stats.n_cached is not None:
        parts.append(
            f"{stats.n_cached:,} cached"
            + (f" ({stats.source})" if stats.source not in ("", "none") else "")
        )
    if stats.n_evaluated is not None:
        parts.append(f"{stats.n_evaluated:,} evaluated")
    if stats.first_token_ms is not None:
        ms = stats.first_token_ms
        parts.append(f"first {ms:.0f} ms" if ms < 1000.0 else f"first {ms / 1000.0:.2f} s")
    if stats.n_predicted is not None:
        parts.append(f"{stats.n_predicted:,} tokens")
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f}/s")
    if stats.n_drafted and stats.n_accepted is not None:
        share = stats.n_accepted / stats.n_drafted
        parts.append(f"{stats.n_accepted:,} of {stats.n_drafted:,} drafts accepted ({share:.0%})")
    while width is not None and len(parts) > 1 and len(" | ".join(parts)) > width:
        parts.pop()
    return " | ".join(parts)[:width]


class View:
    """A place for replies and remarks."""

    def delta(self, delta: ReplyDelta) -> None:
        """Show the next bit of the reply, at once."""
        self._show("reasoning", delta.reasoning)
        self._show("content", delta.content)
        for call in delta.calls:
            if call.name:
                self.close()
            self._show(
                "call", f"call {call.name} {call.arguments}" if call.name else call.arguments
            )

    def end(self, stats: ReplyStats | None) -> None:
        """End the reply; ``stats`` is None when it was cut short."""

    def info(self, text: str) -> None:
        """Show an answer to a command."""

    def error(self, text: str) -> None:
        """Show the reason for a failure in one line."""

    def close(self) -> None:
        """End the row that something was shown on."""

    def _show(self, kind: str, text: str) -> None: ...


class PlainView(View):
    """A view that writes replies to ``out``; thoughts, tool calls, numbers, remarks and errors to
    ``err``.

    Nothing but text is written: only a reply that goes into a file or a pipe is left as it came.
    """

    def __init__(self, out: TextIO, err: TextIO, *, stats: bool = True) -> None:
        self._out = out
        self._err = err
        self._stats = stats
        self._open: TextIO | None = None
        self._last = ""

    def end(self, stats: ReplyStats | None) -> None:
        self.close()
        if stats is not None and self._stats:
            self.info(stats_line(stats))

    def info(self, text: str) -> None:
        print(clean(text), file=self._err, flush=True)

    def error(self, text: str) -> None:
        self.close()
        print(clean(f"error: {text}"), file=self._err, flush=True)

    def _show(self, kind: str, text: str) -> None:
        if not text:
            return
        file = self._out if kind == "content" else self._err
        if self._open is not file:
            self.close()
            self._open = file
        file.write(clean(text) if file.isatty() else text)
        file.flush()
        self._last = text[-1]

    def close(self) -> None:
        if self._open is not None and self._last != "\n":
            self._open.write("\n")
            self._open.flush()
        self._open = None


class RichView(View):
    """A view that writes everything to one terminal: replies as Markdown, thoughts and numbers dim,
    tool calls yellow, errors red.
    """

    def __init__(self, console: Console, *, stats: bool = True) -> None:
        self._console = console
        self._stats = stats
        self._kind = ""
        self._growing: GrowingText | None = None
        self._is_within = False  # a row of text that is not rendered

    def end(self, stats: ReplyStats | None) -> None:
        self.close()
        if stats is None:
            self._line("\nstopped\n", "dim")
        elif self._stats:
            self._line(f"\n{stats_line(stats, self._console.width)}\n", "dim")
        self._kind = ""

    def info(self, text: str) -> None:
        self._line(text, "cyan")

    def error(self, text: str) -> None:
        self.close()
        self._kind = ""
        self._line(f"error: {text}", "red")

    def _show(self, kind: str, text: str) -> None:
        if not text:
            return
        if self._kind != kind:
            self.close()
            if self._kind:
                self._console.line()
            self._kind = kind
        if kind == "content":
            self._growing = self._growing or GrowingText(self._console)
            self._growing.feed(clean(text))
        else:
            self._console.out(clean(text), style=STYLES[kind], end="", highlight=False)
            self._is_within = not text.endswith("\n")

    def close(self) -> None:
        if self._growing is not None:
            self._growing.finish()
            self._growing = None
        elif self._is_within:
            self._console.line()
            self._is_within = False

    def _line(self, text: str, style: str) -> None:
        self._console.print(Text(clean(text), style=style))

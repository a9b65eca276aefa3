"""The chat in a terminal: reads lines, runs commands, shows replies."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from rich.console import Console

from pyctl.chat.reply import CallDelta
from pyctl.errors import PyctlError, RequestError
from pyctl.terminal import conversation as transcript
from pyctl.terminal.console import (
    PipeReader,
    PlainView,
    Reader,
    RichView,
    TerminalReader,
    View,
    accepted_share,
    history_path,
    selected_count,
    stats_line,
    streamed_size,
)
from pyctl.terminal.conversation import Call, ChatBackend, ChatDelta, Conversation, ReplyStats
from pyctl.text import reason_of

__all__ = ["Chat", "run_chat"]


@dataclass(frozen=True)
class SessionTotals:
    """Sums over the replies of one run, in tokens."""

    n_replies: int = 0
    n_cached: int = 0
    n_evaluated: int = 0
    n_predicted: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    streamed_bytes: int = 0
    selected_chunks: int = 0

    def with_reply(self, stats: ReplyStats) -> SessionTotals:
        """The totals after one more reply."""
        return SessionTotals(
            self.n_replies + 1,
            self.n_cached + (stats.n_cached or 0),
            self.n_evaluated + (stats.n_evaluated or 0),
            self.n_predicted + (stats.n_predicted or 0),
            self.n_drafted + (stats.n_drafted or 0),
            self.n_accepted + (stats.n_accepted or 0),
            self.streamed_bytes + (stats.streamed_bytes or 0),
            self.selected_chunks + (stats.selected_chunks or 0),
        )


class Chat:
    """Runs until the reader ends or /quit.

    ``interactive``: an error or Ctrl-C ends the turn and not the chat, as people at a terminal expect; otherwise an
    error makes `run` return 1 and Ctrl-C raises KeyboardInterrupt.
    """

    def __init__(
        self, backend: ChatBackend, reader: Reader, view: View, conversation: Conversation, *, interactive: bool
    ) -> None:
        self.conversation = conversation
        self._backend = backend
        self._reader = reader
        self._view = view
        self._interactive = interactive
        self._totals = SessionTotals()
        self._last: ReplyStats | None = None
        self._running = True
        self._images: tuple[str, ...] = ()  # what the next message shows
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/help": (self._help, "this list"),
            "/regen": (self._regen, "another reply to the last message"),
            "/undo": (self._undo, "take back the last message and its reply"),
            "/edit": (self._edit, "[TEXT]  change the last message and send it again"),
            "/image": (self._image, "FILE  show an image with the next message; - takes it back"),
            "/system": (self._system, "[TEXT]  show or set the system message; - takes it away"),
            "/save": (self._save, "FILE  write the conversation"),
            "/load": (self._load, "FILE  read a conversation"),
            "/stats": (self._stats, "numbers of the last reply and of all"),
            "/clear": (self._clear, "forget the conversation, keep the system message"),
            "/quit": (self._quit, "leave, like Ctrl-D"),
        }

    def run(self) -> int:
        """The exit code."""
        while self._running:
            try:
                self.take(self._reader.read())
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
            except PyctlError as error:
                self._view.error(reason_of(error))
                if not self._interactive:
                    return 1
        return 0

    def take(self, text: str) -> None:
        """One message or command. Raises PyctlError, which leaves the conversation as it was."""
        if not text.strip():
            return
        if not text.startswith("/"):
            self.ask(text)
        elif text.startswith("//"):
            self.ask(text[1:])
        else:
            name, argument = (*text.split(maxsplit=1), "")[:2]
            if name not in self._commands:
                raise RequestError(f"unknown command {name}; /help lists them, and // begins a message with a slash")
            self._commands[name][0](argument.strip())

    def ask(self, text: str) -> None:
        """One message, whatever it begins with."""
        before = self.conversation
        self._reply(before.asked(text, self._images))
        if self.conversation is not before:
            self._images = ()

    def _reply(self, asked: Conversation) -> None:
        reasoning, content = "", ""
        calls: list[CallDelta] = []
        stats: ReplyStats | None = None
        with _Interrupts() as interrupts:
            try:
                with contextlib.closing(self._backend.stream(asked.for_model())) as deltas:
                    while (delta := interrupts.next(deltas)) is not None:
                        reasoning += delta.reasoning
                        content += delta.content
                        calls += delta.calls
                        stats = delta.stats or stats
                        self._view.delta(delta)
            except KeyboardInterrupt:
                if not self._interactive:
                    self._view.end(None)
                    raise
            self._view.end(stats)
            if stats is not None:
                self._last, self._totals = stats, self._totals.with_reply(stats)
            if stats is not None or content or reasoning or calls:
                self.conversation = asked.answered(content, reasoning, Call.joined(calls), stopped=stats is None)
            else:
                self._view.info("nothing had been said yet, so the conversation is as it was before")

    def _help(self, _: str) -> None:
        lines = [f"{name:<8} {text}" for name, (_handler, text) in self._commands.items()]
        self._view.info("\n".join([*lines, "//...    a message that begins with a slash"]))

    def _regen(self, _: str) -> None:
        self._reply(self.conversation.reopened())

    def _undo(self, _: str) -> None:
        self.conversation = self.conversation.undone()
        self._view.info(f"{len(self.conversation.messages)} messages left")

    def _edit(self, argument: str) -> None:
        question = self.conversation.question()
        text = argument or self._reader.read(default=question)
        if text.strip():
            self._reply(self.conversation.edited(text))

    def _image(self, argument: str) -> None:
        if argument == "-":
            self._images = ()
            return self._view.info("the next message shows no image")
        url, image = transcript.read_image(_path(argument))
        self._images = (*self._images, url)
        self._view.info(f"{image.kind.upper()}, {image.width} x {image.height} pixels: shown with the next message")

    def _system(self, argument: str) -> None:
        if argument:
            self.conversation = self.conversation.instructed("" if argument == "-" else argument)
        self._view.info(f"system: {self.conversation.system}" if self.conversation.system else "no system message")

    def _save(self, argument: str) -> None:
        transcript.save(_path(argument), self.conversation)
        self._view.info(f"saved {len(self.conversation.messages)} messages")

    def _load(self, argument: str) -> None:
        self.conversation = transcript.load(_path(argument))
        self._view.info(f"loaded {len(self.conversation.messages)} messages")

    def _stats(self, _: str) -> None:
        totals = self._totals
        lines = [f"last: {stats_line(self._last)}"] if self._last is not None else []
        lines.append(
            f"all: {totals.n_replies:,} replies | {totals.n_cached:,} cached | {totals.n_evaluated:,} evaluated"
            f" | {totals.n_predicted:,} tokens"
            + (f" | {accepted_share(totals.n_drafted, totals.n_accepted)}" if totals.n_drafted else "")
            + (f" | {streamed_size(totals.streamed_bytes)}" if totals.streamed_bytes else "")
            + (f" | {selected_count(totals.selected_chunks)}" if totals.selected_chunks else "")
        )
        self._view.info("\n".join(lines))

    def _clear(self, _: str) -> None:
        self.conversation, self._images = self.conversation.cleared(), ()

    def _quit(self, _: str) -> None:
        self._running = False


def _path(argument: str) -> Path:
    if not argument:
        raise RequestError("missing file name")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{argument}: no such user") from error


class _Interrupts:
    """Ctrl-C while a reply comes. It is raised only while the next piece is awaited, never while something is shown or
    put away; what comes sooner counts at the next wait, and further ones are swallowed."""

    def __init__(self) -> None:
        self._waiting = False
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> _Interrupts:
        # Where Ctrl-C is ignored, as in a background job, it stays so; and only the main thread has signals.
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def next(self, deltas: Iterator[ChatDelta]) -> ChatDelta | None:
        """The next piece, None after the last. Raises KeyboardInterrupt, once."""
        self._waiting = True
        try:
            if self._asked:
                raise KeyboardInterrupt
            return next(deltas, None)
        finally:
            self._waiting = False

    def _take(self, _signum: int, _frame: FrameType | None) -> None:
        asked, self._asked = self._asked, True
        if self._waiting and not asked:
            raise KeyboardInterrupt


def run_chat(backend: ChatBackend, *, prompt: str | None = None, system: str = "", stats: bool = True) -> int:
    """Chat over the standard streams until they end; with ``prompt``, one question and its reply.

    Returns the exit code: 0, 1 after an error in plain mode or a backend that does not answer, 130 after Ctrl-C in
    plain mode.
    """
    _on_error(sys.stdout, "replace")
    _on_error(sys.stderr, "replace")
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    typing = terminal and prompt is None
    view: View
    if terminal:
        view = RichView(Console(file=sys.stdout, highlight=False), stats=stats)
    else:
        view = PlainView(sys.stdout, sys.stderr, stats=stats)
    try:
        if typing:
            view.info(f"{backend.name()}  (/help for commands, Alt-Enter for a new line, Ctrl-D to leave)")
        reader: Reader = TerminalReader(history_path()) if typing else PipeReader(sys.stdin)
        chat = Chat(backend, reader, view, Conversation().instructed(system), interactive=typing)
        if prompt is None:
            return chat.run()
        chat.ask(prompt)
        return 0
    except PyctlError as error:
        view.error(reason_of(error))
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has left; without this, the interpreter complains while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _on_error(file: TextIO, handler: str) -> None:
    """The error handler for characters that ``file`` cannot hold."""
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors=handler)

"""The chat in a terminal: reads lines, runs commands, shows replies."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from pyctl.chat.reply import CallDelta
from pyctl.engine.sampling import Sampling
from pyctl.errors import PyctlError, RequestError
from pyctl.files.atomic_file import make_private
from pyctl.files.user_directory import user_directory
from pyctl.requests.body import ChatBody
from pyctl.terminal import TerminalSettings
from pyctl.terminal import conversation as transcript
from pyctl.terminal.console import PipeReader, PlainView, RichView, TerminalReader, View
from pyctl.terminal.conversation import (
    Call,
    ChatBackend,
    Conversation,
    PromptProgress,
    ReplyEvent,
    ReplyStats,
)
from pyctl.terminal.mcp_calls import MAX_ROUNDS, STOPPED, ToolCalls, ToolSource
from pyctl.terminal.prompt_line import PromptLine
from pyctl.terminal.rendering import THEME
from pyctl.text import error_text

__all__ = ["Chat", "run_chat"]


LAST_CHAT = "last-chat.json"
"""The file of the last chat, in the state directory."""

WITH_PATH = ("/file", "/image", "/load", "/save")
SETTABLE = (
    "max_tokens",
    *(item.name for item in fields(Sampling) if not item.name.startswith("grammar")),
)
OTHER_NAMES = {"n_predict": "max_tokens", "num_predict": "max_tokens", "temp": "temperature"}
"""llama-server's and Ollama's names of fields."""

ALIASES = {"/exit": "/quit", "/bye": "/quit"}


class Chat:
    """A chat, which runs until the reader ends or /quit.

    ``interactive``: an error or Ctrl-C ends the turn and not the chat, as people at a terminal
    expect; otherwise an error makes `run` return 1 and Ctrl-C raises KeyboardInterrupt. The
    conversation is kept in the file ``last``.
    """

    def __init__(
        self,
        backend: ChatBackend,
        reader: PipeReader | TerminalReader,
        view: View,
        conversation: Conversation,
        *,
        interactive: bool,
        last: Path | None = None,
    ) -> None:
        """Start with an empty message and no tools."""
        self.conversation = conversation
        self._backend = backend
        self._reader = reader
        self._view = view
        self._interactive = interactive
        self._keep_in = last
        self.tools = ToolCalls(None, lambda question: "")
        self._running = True
        self._images: tuple[str, ...] = ()  # images of the next message
        self._files: tuple[str, ...] = ()
        self._fields: dict[str, Any] = {}  # of each request

    def run(self) -> int:
        """Run the chat; return the exit code."""
        while self._running:
            try:
                self.take(self._reader.read())
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._view.info("Ctrl-D or /exit ends the chat")
            except PyctlError as error:
                self._view.error(error_text(error))
                if not self._interactive:
                    return 1
        return 0

    def take(self, text: str) -> None:
        """Handle one message or command. Raises RequestError or another PyctlError; the
        conversation is then unchanged.
        """
        if not text.strip():
            return
        if not text.startswith("/"):
            self.send(text)
        elif text.startswith("//"):
            self.send(text[1:])
        else:
            name, argument = (*text.split(maxsplit=1), "")[:2]
            name = ALIASES.get(name, name)
            if name not in COMMANDS:
                raise RequestError(
                    f"unknown command {name}; /help lists them, and // starts a message with a "
                    "slash"
                )
            COMMANDS[name][0](self, argument.strip())

    def send(self, text: str) -> None:
        """Send one message, whatever its first character. Raises PyctlError; RequestError if the
        model refuses its images.
        """
        before = self.conversation
        try:
            self._reply(before.with_user(text, self._images, "".join(self._files)))
        except PyctlError as error:
            if not self._images or "image" not in str(error):
                raise
            self._images = ()
            raise RequestError(f"{error}; the next message shows no image") from error
        if self.conversation is not before:
            self._images = ()
            self._files = ()

    def _reply(self, asked: Conversation) -> None:
        """Request the model's reply, and the replies to the results of the tools that it calls."""
        for _ in range(MAX_ROUNDS):
            before = self.conversation
            self._one_reply(asked)
            last = self.conversation.messages[-1] if self.conversation is not before else None
            if (
                last is None
                or last.stopped
                or not self.tools.can_run(last.calls)
                or not self._run(last.calls)
            ):
                return
            asked = self.conversation
        self._view.info(
            f"{MAX_ROUNDS} replies with tool calls: the model continues with the next message"
        )

    def _run(self, calls: Sequence[Call]) -> bool:
        """Run ``calls`` as the user allows; return whether the model is to continue. Ctrl-C stops
        all calls that are left.
        """
        goes_on = True
        for call in calls:
            try:
                result = self.tools.result(call) if goes_on else STOPPED
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                result = STOPPED
                goes_on = False
            self.conversation = self.conversation.with_tool_result(call, result)
            self._save_conversation()
            first = result.strip().partition("\n")[0][:60]
            self._view.info(f"result of {call.name}, {len(result):,} characters: {first}")
        return goes_on

    def _one_reply(self, asked: Conversation) -> None:
        """Show one reply to ``asked`` and append it to the conversation.

        A reply that Ctrl-C stops is kept as far as it came. Raises KeyboardInterrupt unless the
        chat is interactive.
        """
        reasoning = ""
        content = ""
        calls: list[CallDelta] = []
        stats: ReplyStats | None = None
        fields = {**self.tools.fields(), **self._fields}
        with _Interrupts() as interrupts:
            try:
                stream = self._backend.stream(asked.for_model(), fields)
                with (
                    contextlib.closing(PromptLine(sys.stderr)) as line,
                    contextlib.closing(stream) as deltas,
                ):
                    while (delta := interrupts.next(deltas)) is not None:
                        if isinstance(delta, PromptProgress):
                            line.show(delta)
                            continue
                        line.close()
                        if isinstance(delta, ReplyStats):
                            stats = delta
                            continue
                        reasoning += delta.reasoning
                        content += delta.content
                        calls += delta.calls
                        self._view.delta(delta)
            except KeyboardInterrupt:
                if not self._interactive:
                    self._view.end(None)
                    raise
            self._view.end(stats)
            if stats is not None or content or reasoning or calls:
                self.conversation = asked.with_reply(
                    content, reasoning, Call.joined(calls), stopped=stats is None
                )
                self._save_conversation()
            else:
                self._view.info("there was no message yet, so the conversation is unchanged")

    def _save_conversation(self) -> None:
        """Write the conversation for --continue; the first failure is the last try."""
        if self._keep_in is not None:
            try:
                make_private(self._keep_in.parent)
                transcript.save(self._keep_in, self.conversation)
            except (OSError, RequestError) as error:
                self._view.info(f"--continue will not find this chat: {error}")
                self._keep_in = None

    def _help(self, argument: str) -> None:
        name = f"/{argument.removeprefix('/')}"
        if (name := ALIASES.get(name, name)) in COMMANDS:
            return self._view.info(f"{name} {COMMANDS[name][1]}")
        lines = [f"{name:<8} {text}" for name, (_, text) in COMMANDS.items()]
        lines.append("//... a message that starts with a slash")
        self._view.info("\n".join(lines))

    def _regen(self, _: str) -> None:
        self._reply(self.conversation.without_last_reply())

    def _undo(self, _: str) -> None:
        self.conversation = self.conversation.without_last_turn()
        self._view.info(f"{len(self.conversation.messages)} messages left")

    def _edit(self, argument: str) -> None:
        question = self.conversation.question()
        text = argument or self._reader.read(default=question)
        if text.strip():
            self._reply(self.conversation.edited(text))

    def _file(self, argument: str) -> None:
        if argument == "-":
            self._files = ()
            return self._view.info("the next message shows no file")
        text = transcript.read_text(_path(argument))
        if sum(map(len, (*self._files, text))) > transcript.MAX_TEXT_BYTES:
            raise RequestError(
                f"the files of a message have at most {transcript.MAX_TEXT_BYTES:,} bytes"
            )
        self._files = (*self._files, text)
        self._view.info(f"{len(text):,} characters: shown with the next message")

    def _image(self, argument: str) -> None:
        if argument == "-":
            self._images = ()
            return self._view.info("the next message shows no image")
        if not self._backend.supports_images():
            raise RequestError(
                f"{self._backend.name()} cannot read images: it has no image encoder (--mmproj)"
            )
        url, image = transcript.read_image(_path(argument))
        self._images = (*self._images, url)
        self._view.info(
            f"{image.kind.upper()}, {image.width} x {image.height} pixels: shown with the next "
            "message"
        )

    def _system(self, argument: str) -> None:
        if argument:
            self.conversation = self.conversation.with_system("" if argument == "-" else argument)
        self._view.info(
            f"system: {self.conversation.system}"
            if self.conversation.system
            else "no system message"
        )

    def _set(self, argument: str) -> None:
        """Show the fields of requests, or set one to a JSON value; "-" removes it. Raises
        RequestError for a field or a value that no request takes.
        """
        if not argument:
            lines = [f"{name} {value}" for name, value in self._fields.items()]
            return self._view.info(
                "\n".join(lines or [f"nothing is set; fields: {', '.join(SETTABLE)}"])
            )
        name, text = (*argument.split(maxsplit=1), "")[:2]
        name = OTHER_NAMES.get(name, name)
        if name not in SETTABLE:
            raise RequestError(f"{name!r} is not one of {', '.join(SETTABLE)}")
        if text == "-":
            self._fields.pop(name, None)
        elif text:
            try:
                value = json.loads(text)
            except ValueError:
                value = text
            ChatBody.from_json({name: value})  # as a server checks it
            self._fields[name] = value
        self._view.info(f"{name} {self._fields.get(name, 'not set')}")

    def _model(self, argument: str) -> None:
        current = self._backend.name()
        models = self._backend.models()
        if not argument:
            lines = [f"{'*' if name == current else ' '} {name}" for name in models]
            return self._view.info("\n".join(lines or [f"* {current}"]))
        matching = [name for name in models if name.startswith(argument)]
        if argument in models:
            matching = [argument]
        if len(matching) != 1:
            n_models = "several" if matching else "no"
            raise RequestError(f"{n_models} models start with {argument!r}; /model lists them")
        self._backend.use(matching[0])
        self._view.info(f"model: {matching[0]}")

    def _save(self, argument: str) -> None:
        transcript.save(_path(argument), self.conversation)
        self._view.info(f"saved {len(self.conversation.messages)} messages")

    def _load(self, argument: str) -> None:
        self.conversation = transcript.load(_path(argument))
        self._view.info(f"loaded {len(self.conversation.messages)} messages")

    def _result(self, _: str) -> None:
        self._view.info(self.tools.last or "no tool has run yet")

    def _clear(self, _: str) -> None:
        self.conversation = Conversation(self.conversation.system)
        self._images = ()
        self._files = ()

    def _quit(self, _: str) -> None:
        self._running = False


COMMANDS: Mapping[str, tuple[Callable[[Chat, str], None], str]] = {
    "/help": (Chat._help, "[COMMAND]  this list"),
    "/regen": (Chat._regen, "another reply to the last message"),
    "/undo": (Chat._undo, "take back the last message and its reply"),
    "/edit": (Chat._edit, "[TEXT]  change the last message and send it again"),
    "/file": (Chat._file, "PATH  show a text or PDF file with the next message; - takes it back"),
    "/image": (Chat._image, "PATH  show an image with the next message; - takes it back"),
    "/system": (Chat._system, "[TEXT]  show or set the system message; - takes it away"),
    "/set": (Chat._set, "[NAME VALUE]  show or set a sampling field; - takes it back"),
    "/model": (Chat._model, "[NAME]  list the models of the server, or switch to one"),
    "/save": (Chat._save, "PATH  write the conversation"),
    "/load": (Chat._load, "PATH  read a conversation"),
    "/result": (Chat._result, "the last result of a tool, in full"),
    "/clear": (Chat._clear, "forget the conversation, keep the system message"),
    "/quit": (Chat._quit, "exit, like Ctrl-D, /exit and /bye"),
}
"""The commands, and the effect of each."""


def _path(argument: str) -> Path:
    if not argument:
        raise RequestError("missing file name")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{argument}: no such user") from error


class _Interrupts:
    """The handling of Ctrl-C while a reply comes. It is raised only while the next piece is
    awaited, never while something is shown or put away; an earlier one counts at the next wait, and
    further ones are swallowed.
    """

    def __init__(self) -> None:
        self._waiting = False
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> _Interrupts:
        # Where Ctrl-C is ignored, as in a background job, it stays so; and only the main thread has
        # signals.
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def next(self, deltas: Iterator[ReplyEvent]) -> ReplyEvent | None:
        """Return the next piece, None after the last. Raises KeyboardInterrupt, once."""
        self._waiting = True
        try:
            if self._asked:
                raise KeyboardInterrupt
            return next(deltas, None)
        finally:
            self._waiting = False

    def _take(self, _signum: int, _frame: FrameType | None) -> None:
        asked = self._asked
        self._asked = True
        if self._waiting and not asked:
            raise KeyboardInterrupt


def run_chat(
    backend: ChatBackend, settings: TerminalSettings, tools: ToolSource | None = None
) -> int:
    """Chat over the standard streams with ``settings``; typed lines and the last chat are kept in
    the user's files.

    At a terminal until the input ends. Otherwise the prompt of ``settings``, the text of a pipe, or
    both are one message; with ``lines`` each line of the pipe is a message or command. Returns the
    exit code: 0, 1 after an error in plain mode or a backend that does not answer, 130 after Ctrl-C
    in plain mode.
    """
    for file in (sys.stdout, sys.stderr):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="replace")
    typing = sys.stdin.isatty() and sys.stdout.isatty() and settings.prompt is None
    view = _view(settings.stats)
    last = user_directory("state", os.environ) / LAST_CHAT
    try:
        conversation = transcript.load(last) if settings.resumes else Conversation()
        if settings.system_prompt:
            conversation = conversation.with_system(settings.system_prompt)
        name = backend.name()  # nothing is read for a server that is not there
        if typing:
            view.info(f"{name}  (/help for commands, Ctrl-D to exit)")
            if settings.resumes:
                view.info(f"continues after {len(conversation.messages)} messages")
        commands = {name: text for name, (_, text) in COMMANDS.items()}
        reader = (
            TerminalReader(last.with_name("history"), commands, WITH_PATH)
            if typing
            else PipeReader(sys.stdin)
        )
        last_file = last if typing or settings.resumes else None
        chat = Chat(backend, reader, view, conversation, interactive=typing, last=last_file)
        chat.tools = ToolCalls(tools, reader.ask, last.with_name("allowed-tools.json"))
        if typing or (settings.lines and settings.prompt is None):
            return chat.run()
        reads = settings.prompt is None or not sys.stdin.isatty()
        chat.send(_one_prompt(settings.prompt, PipeReader(sys.stdin).read_all() if reads else ""))
        return 0
    except PyctlError as error:
        view.error(error_text(error))
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has left; without this, the interpreter complains while it
        # flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        view.close()


def _view(stats: bool) -> View:
    """Return a view that renders on a capable terminal, unless NO_COLOR selects plain text."""
    console = Console(file=sys.stdout, highlight=False, theme=THEME)
    if console.is_terminal and not console.is_dumb_terminal and not os.environ.get("NO_COLOR"):
        return RichView(console, stats=stats)
    return PlainView(sys.stdout, sys.stderr, stats=stats)


def _one_prompt(prompt: str | None, piped: str) -> str:
    """Return the prompt, then the text that came by a pipe."""
    text = "\n\n".join(part for part in (prompt, piped) if part and part.strip())
    if not text:
        raise RequestError("standard input is empty")
    return text

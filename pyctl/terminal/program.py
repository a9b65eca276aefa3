"""``pyctl chat`` once the backend exists: picks how to read and write, and turns the end into an exit code."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from rich.console import Console

from pyctl.errors import PyctlError
from pyctl.terminal.backend import Backend
from pyctl.terminal.conversation import Conversation
from pyctl.terminal.loop import Chat
from pyctl.terminal.reader import PipeReader, Reader, TerminalReader, history_path
from pyctl.terminal.view import PlainView, RichView, View

__all__ = ["run_chat"]


def run_chat(backend: Backend, *, prompt: str | None = None, system: str = "", stats: bool = True) -> int:
    """Chat over the standard streams until they end; with ``prompt``, one question and its reply.

    Returns the exit code: 0, 1 after an error in plain mode or a backend that does not answer, 130 after Ctrl-C in
    plain mode.
    """
    _on_error(sys.stdin, "strict")
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
        chat = Chat(backend, reader, view, Conversation().instructed(system), lasting=typing)
        if prompt is None:
            return chat.run()
        chat.ask(prompt)
        return 0
    except PyctlError as error:
        view.error(" ".join(str(error).split()))
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read us has left; without this, the interpreter complains while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _on_error(file: TextIO, handler: str) -> None:
    """What happens to characters that ``file`` cannot hold."""
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors=handler)

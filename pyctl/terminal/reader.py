"""What the user says: typed with editing and history on a terminal, or line by line from anything else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from pyctl.errors import RequestError

__all__ = ["PipeReader", "Reader", "TerminalReader", "history_path"]


class Reader(Protocol):
    """A source of messages and commands."""

    def read(self, default: str = "") -> str:
        """The next one; ``default`` is there to be edited. Raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""


class PipeReader:
    """One line at a time, as it is."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def read(self, default: str = "") -> str:
        if default:
            raise RequestError("there is no terminal to edit on; give the new text after /edit")
        try:
            line = self._file.readline()
        except UnicodeDecodeError as error:
            raise RequestError(f"the input is not {error.encoding} text") from error
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


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
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
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

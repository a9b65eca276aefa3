"""A chat with a scripted backend in a process of its own: ``python child.py [--tty] [--dead] [flags
of a chat]``.

The reply repeats the question or the result of a tool; "slow" is answered without end, "fail" with
an error, "call NAME" with a call of that tool, and "long" when the file "go" is in the state
directory. With --dead there is no backend at all. With --loads the whole command runs, whose model
is loaded when that file is there.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
import termios
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyctl.chat.reply import CallDelta, ReplyDelta
from pyctl.cli import chat_command
from pyctl.cli.arguments import CommandSettings, parse_chat
from pyctl.errors import EngineError, UnavailableError
from pyctl.terminal.conversation import PromptProgress, ReplyEvent, ReplyStats
from pyctl.terminal.interactive import run_chat
from pyctl.terminal.mcp_calls import OfferedTool
from tests.waiting import until


class Echo:
    """Thinks a little, then repeats."""

    def __init__(self, dead: bool) -> None:
        self._dead = dead

    def name(self) -> str:
        if self._dead:
            raise UnavailableError("cannot reach\nanybody")
        return "echo"

    def models(self) -> Sequence[str]:
        return ["echo", "other"]

    def use(self, model: str) -> None:
        print(f"using {model}", file=sys.stderr)

    def stream(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None
    ) -> Generator[ReplyEvent, None, None]:
        """Yield the events that the last message calls for."""
        text = messages[-1]["content"]
        if text == "long":
            yield PromptProgress(1000, 250, 600.0)
            until(lambda: (Path(os.environ["XDG_STATE_HOME"]) / "go").exists())
        yield ReplyDelta(reasoning="thinking")
        if text.startswith("call "):
            yield ReplyDelta(calls=(CallDelta(0, "id", text[5:], '{"where": "here"}'),))
            yield ReplyStats(7, 5, 3)
            return
        while text == "slow":
            yield ReplyDelta(content="word ")
            time.sleep(0.01)
        if text == "fail":
            raise EngineError("it broke")
        yield ReplyDelta(content=f"turn {len(messages)}: ")
        yield ReplyDelta(content=repr(text))
        yield ReplyStats(7, 5, 3, 1.0, 2.0, "live")


class Tools:
    """A source of two tools, a reader and a writer."""

    origin = "here"

    def offered(self) -> Sequence[OfferedTool]:
        return [OfferedTool("look", True, {}), OfferedTool("act", False, {})]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name} {arguments['where']}"


parser = argparse.ArgumentParser()
parser.add_argument("--tty", action="store_true")
parser.add_argument("--dead", action="store_true")
parser.add_argument("--loads", action="store_true")
given, flags = parser.parse_known_args()
if given.tty:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextlib.contextmanager
def loaded(_: CommandSettings) -> Iterator[Echo]:
    """Yield the backend, when its model has been loaded."""
    print("loading", file=sys.stderr, flush=True)
    until(lambda: (Path(os.environ["XDG_STATE_HOME"]) / "go").exists())
    yield Echo(given.dead)


if given.loads:
    chat_command.chat_backend = loaded
    code = chat_command.chat(parse_chat(flags, {}))
else:
    code = run_chat(Echo(given.dead), parse_chat(flags, {}).terminal, tools=Tools())
print(f"exit {code}", file=sys.stderr)
sys.exit(code)

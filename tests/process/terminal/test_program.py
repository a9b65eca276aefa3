from __future__ import annotations

import codecs
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

import pyctl
from pyctl.terminal.mcp_calls import REFUSED

CHILD = str(Path(__file__).with_name("child.py"))
ROOT = str(Path(pyctl.__file__).parents[1])
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\r\x08]")
BRACKETED_PASTE_ON = "\x1b[?2004h"
PROMPT = "<prompt>"
SECONDS = 60.0
"""For what happens at once unless the machine is busy."""
STATS = "7 cached (live) | 5 evaluated | first 1 ms | 3 tokens | 2.0/s"


def environment(state: Path) -> dict[str, str]:
    extra = {
        "XDG_STATE_HOME": str(state),
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "PYTHONPATH": ROOT,
    }
    return {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")
    } | extra


def pipe(tmp_path: Path, text: str | bytes, *argv: str) -> subprocess.CompletedProcess[bytes]:
    data = text.encode() if isinstance(text, str) else text
    return subprocess.run(
        [sys.executable, CHILD, *argv],
        input=data,
        capture_output=True,
        env=environment(tmp_path),
        timeout=SECONDS,
        check=False,
    )


class Terminal:
    """A child on a pseudo-terminal: type into it and wait for what it shows."""

    def __init__(self, state: Path, *argv: str, extra: Mapping[str, str] | None = None) -> None:
        self._end, child_end = os.openpty()
        fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self._child = subprocess.Popen(
            [sys.executable, CHILD, "--tty", *argv],
            stdin=child_end,
            stdout=child_end,
            stderr=child_end,
            env={**environment(state), **(extra or {})},
            start_new_session=True,
        )
        os.close(child_end)
        self.shown = self.raw = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def expect(self, text: str, seconds: float = SECONDS) -> str:
        """Wait until ``text`` shows up; return what came before it, and forget both."""
        end = time.monotonic() + seconds
        while text not in (
            plain := CONTROL.sub("", self.shown.replace(BRACKETED_PASTE_ON, PROMPT))
        ):
            ready, _, _ = select.select([self._end], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} did not appear in {plain!r}"
            more = self._decoder.decode(os.read(self._end, 65536))
            self.shown = self.shown + more
            self.raw = self.raw + more
        before, _, self.shown = plain.partition(text)
        return before

    def say(self, keys: str, *answers: str) -> None:
        """Type, and wait for each of ``answers`` and the next prompt."""
        self.type(keys)
        for text in (*answers, PROMPT):
            self.expect(text)

    def leave(self, keys: str = "/quit\r") -> None:
        self.type(keys)
        self.expect("exit 0")

    def code(self) -> int:
        return self._child.wait(SECONDS)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        os.close(self._end)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with Terminal(tmp_path) as terminal:
        terminal.expect("echo  (/help for commands")
        terminal.expect(PROMPT)
        yield terminal


def test_piped_lines_are_messages_and_commands(tmp_path: Path) -> None:
    ended = pipe(tmp_path, "hello\n\n/undo\n/system Be brief.\nwor\\\nlast", "-sys", "s", "--lines")
    assert ended.returncode == 0
    assert ended.stdout.decode() == "turn 2: 'hello'\nturn 2: 'wor\\\\'\nturn 4: 'last'\n"
    said = f"thinking\n{STATS}\n"
    assert (
        ended.stderr.decode() == f"{said}0 messages left\nsystem: Be brief.\n{said}{said}exit 0\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fail\nnever\n", "error: it broke"),
        (
            "/nonsense\nnever\n",
            (
                "error: unknown command /nonsense; /help lists them, and // starts a message "
                "with a "
                "slash"
            ),
        ),
        ("/undo\n", "error: no message has been sent yet"),
        (b"\xff\n", "error: the input is not utf-8 text"),
    ],
)
def test_piped_errors_exit_with_1_and_one_line(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    ended = pipe(tmp_path, text, "--no-stats", "--lines")
    assert ended.returncode == 1
    assert ended.stdout == b""
    assert ended.stderr.decode().removeprefix("thinking\n") == f"{message}\nexit 1\n"


def test_one_shot_takes_its_text_literally(tmp_path: Path) -> None:
    ended = pipe(tmp_path, "", "-p", "/undo")
    assert ended.returncode == 0
    assert ended.stdout.decode() == "turn 1: '/undo'\n"
    assert pipe(tmp_path, "", "-p", "fail").returncode == 1


def test_a_pipe_is_one_prompt_below_that_of_the_command(tmp_path: Path) -> None:
    for flags, said in (((), "/one\n\ntwo"), (("-p", "Sum up"), "Sum up\n\n/one\n\ntwo")):
        ended = pipe(tmp_path, "/one\n\ntwo\n", *flags)
        assert ended.returncode == 0
        assert ended.stdout.decode() == f"turn 1: {said!r}\n"
    ended = pipe(tmp_path, " \n", "--no-stats")
    assert ended.returncode == 1
    assert ended.stderr.decode() == "error: standard input is empty\nexit 1\n"
    assert not (tmp_path / "pyctl").exists()


def test_the_last_chat_goes_on(tmp_path: Path) -> None:
    assert "error: cannot load" in pipe(tmp_path, "", "-p", "a", "--continue").stderr.decode()
    with Terminal(tmp_path) as terminal:
        terminal.expect(PROMPT)
        terminal.say("hello\r", STATS)
        terminal.leave("/bye\r")
    assert (tmp_path / "pyctl" / "last-chat.json").stat().st_mode & 0o777 == 0o600
    for turn in (3, 5):
        ended = pipe(tmp_path, "", "-p", "again", "--continue")
        assert ended.stdout.decode() == f"turn {turn}: 'again'\n"


def test_piped_ctrl_c_exits_with_130(tmp_path: Path) -> None:
    with in_a_slow_reply(tmp_path) as (child, _, errors):
        child.send_signal(signal.SIGINT)
        assert child.wait(SECONDS) == 130
        assert errors.read() == b"thinking\nexit 130\n"


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    with in_a_slow_reply(tmp_path) as (child, output, errors):
        output.close()
        assert child.wait(SECONDS) == 1
        assert errors.read() == b"thinking\nexit 1\n"


@contextmanager
def in_a_slow_reply(place: Path) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]]:
    command = [sys.executable, CHILD, "-p", "slow"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment(place)) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.read(5) == b"word "
        yield child, child.stdout, child.stderr


def test_terminal_conversation(terminal: Terminal) -> None:
    terminal.say("hello\r", "thinking", "turn 1: 'hello'", STATS)
    terminal.say("/regen\r", "turn 1: 'hello'")
    terminal.say("fail\r", "error: it broke")
    terminal.say("again\r", "turn 3: 'again'")
    terminal.leave("\x04")
    assert terminal.code() == 0


def test_terminal_several_lines(terminal: Terminal) -> None:
    terminal.say("one\x1b\rtwo\r", r"turn 1: 'one\ntwo'")
    terminal.say("\x1b[200~pasted\rlines\x1b[201~\r", r"turn 3: 'pasted\nlines'")
    terminal.leave()


def test_terminal_ctrl_c_stops_the_reply_and_not_the_program(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.type("slow\r")
    terminal.expect("word word word")
    terminal.say("\x03", "stopped")
    terminal.type(f"/save {tmp_path}/chat.json\r")
    terminal.expect("saved 2 messages")
    assert '"stopped": true' in (tmp_path / "chat.json").read_text()
    terminal.expect(PROMPT)
    terminal.type("slow\r")
    terminal.expect("word word word")
    terminal.say("\x03\x03\x03", "stopped")
    terminal.say("half a thought\x03", "Ctrl-D or /exit ends the chat")
    terminal.say("after\r", "turn 5: 'after'")
    terminal.leave()


def test_terminal_history_is_kept_and_private(tmp_path: Path) -> None:
    for keys, reply in (("hello\r", "turn 1: 'hello'"), ("\x1b[A\r", "turn 1: 'hello'")):
        with Terminal(tmp_path) as terminal:
            terminal.expect(PROMPT)
            terminal.say(keys, reply)
            terminal.leave("\x04")
    assert (tmp_path / "pyctl" / "history").stat().st_mode & 0o777 == 0o600


def test_without_colours_a_terminal_gets_plain_text(tmp_path: Path) -> None:
    with Terminal(tmp_path, "-p", "**bold**", extra={"NO_COLOR": "1"}) as terminal:
        terminal.expect("turn 1: '**bold**'")
        terminal.expect("exit 0")
    with Terminal(tmp_path, "-p", "**bold**") as terminal:
        terminal.expect("turn 1: 'bold'")
        terminal.expect("exit 0")


READ = "prompt: 250 of 1,000 tokens (25%), 10 min to go"


def test_terminal_shows_how_far_a_prompt_is_read(terminal: Terminal, tmp_path: Path) -> None:
    terminal.type("long\r")
    terminal.expect(READ)
    terminal.say("\x03", "stopped", "there was no message yet")
    terminal.type("long\r")
    with Terminal(tmp_path, "-p", "long", extra={"NO_COLOR": "1"}) as plain:
        for child in (terminal, plain):
            child.expect(READ)
        (tmp_path / "go").touch()
        for child in (terminal, plain):
            child.expect("turn 1")
            assert child.raw.rpartition("to go")[2].startswith("\r\x1b[2K")
    assert pipe(tmp_path, "long", "--no-stats").stderr == b"thinking\nexit 0\n"


def call(terminal: Terminal, name: str, answer: str | None, result: str) -> None:
    """Have the model call a tool; the question is answered, or not asked where ``answer`` is
    None.
    """
    effect = {"look": "reads only", "act": "can change things"}[name]
    terminal.type(f"call {name}\r")
    terminal.expect(f'call {name} {{"where": "here"}}')
    if answer is not None:
        terminal.expect(f"run {name} ({effect})? [o]nce, [c]hat, [a]lways, [n]o: ")
        terminal.type(answer)
    before = terminal.expect(f"result of {name}, {len(result)} characters: {result}")
    assert answer is not None or "run " not in before
    terminal.expect(repr(result))
    terminal.expect(PROMPT)


def test_terminal_asks_about_each_call_of_a_tool(terminal: Terminal, tmp_path: Path) -> None:
    call(terminal, "look", "o\r", "look here")
    call(terminal, "look", "n\r", REFUSED)
    call(terminal, "look", "\x03", REFUSED)
    call(terminal, "look", "c\r", "look here")
    call(terminal, "look", None, "look here")
    call(terminal, "act", "\r", REFUSED)
    call(terminal, "act", "always\r", "act here")
    call(terminal, "act", None, "act here")
    terminal.say("/result\r", "act here")
    terminal.leave()
    assert "always" not in (tmp_path / "pyctl" / "history").read_text()  # answers are not messages
    ended = pipe(tmp_path, "call look\n", "--no-stats")  # a pipe cannot confirm a call
    assert ended.returncode == 0
    assert ended.stdout.decode() == f"turn 3: {REFUSED!r}\n"
    assert pipe(tmp_path, "call act\n", "--no-stats").stdout.decode() == "turn 3: 'act here'\n"


def test_keys_typed_while_the_model_loads_stand_at_the_first_prompt(tmp_path: Path) -> None:
    with Terminal(tmp_path, "--loads") as terminal:
        terminal.expect("loading\n")
        terminal.type("My name is Ada.\r")
        (tmp_path / "go").touch()
        terminal.expect(PROMPT)
        terminal.expect("> My name is Ada.")
        terminal.expect("turn 1: 'My name is Ada.'")
        terminal.expect(PROMPT)
        terminal.type("/quit\r")
        terminal.code()


def test_without_a_backend(tmp_path: Path) -> None:
    assert pipe(tmp_path, "", "--dead").stderr.decode() == "error: cannot reach anybody\nexit 1\n"
    with Terminal(tmp_path, "--dead") as terminal:
        terminal.expect("error: cannot reach anybody\nexit 1")

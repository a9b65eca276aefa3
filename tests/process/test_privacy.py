"""Prompts stay private: modes of files, answers to other clients, the log, and control characters
on a terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import stat
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyctl.measure.server_process import clean_environment
from tests.client import CHAT, Client
from tests.process.conftest import Server, disk_cache, n_on_disk
from tests.process.test_cli import pyctl
from tests.waiting import until
from tests.web_server import Handler, web_server

Start = Callable[..., Server]


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_all_files_and_directories_are_for_their_owner_alone(start: Start, tmp_path: Path) -> None:
    """Even with an umask of 0 no file or directory of the cache, the slots or the log is readable
    for others, while the server runs and afterwards: their contents are prompts.
    """
    cache = tmp_path / "new" / "cache"
    slots = tmp_path / "slots"
    log = tmp_path / "log"
    umask = os.umask(0)
    try:
        flags = ("--exact", *disk_cache(cache), "--kv-cache-min-tokens", "0")
        server = start(
            "tiny-hybrid", *flags, "--slot-save-path", str(slots), "--log-file", str(log)
        )
        server.chat(
            question("What I tell you is no one else's business. " * 40),
            max_tokens=4,
            ignore_eos=True,
        )
        server.chat(question("Neither is this. " * 60), max_tokens=4, ignore_eos=True)
        server.client.post_json("/slots/0?action=save", {"filename": "a"})
        until(lambda: n_on_disk(server) >= 2)
        while_running = modes(cache)
        assert server.stop() == 0
    finally:
        os.umask(umask)
    found = modes(tmp_path)
    names = {path.name for path in [*while_running, *found]}
    assert {
        "index.sqlite3",
        "index.sqlite3-wal",
        "prompts",
        "replies",
        "receipts",
        "a",
        "log",
        "new",
    } <= names, names
    odd = {
        path: mode
        for path, mode in [*while_running.items(), *found.items()]
        if mode not in PRIVATE_MODES
    }
    assert not odd


PRIVATE_MODES = ("drwx------", "-rw-------")


def modes(top: Path) -> dict[Path, str]:
    found = {}
    for path in sorted(top.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # it was written, and has another name now
            found[path] = stat.filemode(path.stat().st_mode)
    return found


EVIL = (
    "\x1b]0;owned\x07 \x1b[2J \x9b31m \x7f \r12:34:56 forged \u202egnp\u2066 \u2028 12:34:56 forged"
)
"""Sets a title, clears the screen, colours, goes back to the start of the line, turns letters
round.
"""


def evil(text: str) -> set[str]:
    """Return characters that do more than stand there."""
    return {
        c
        for c in text
        if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    }


def test_clients_write_no_control_characters_and_no_lines_into_the_log(
    start: Start, tmp_path: Path
) -> None:
    """Control characters and line feeds in names, roles, paths and headers are escaped in the log,
    so that a client can neither forge a line nor reach the reader's terminal.
    """
    log = tmp_path / "log"
    server = start(
        "tiny-hybrid", "--log-file", str(log), "--no-warm-next"
    )  # which would be back in an empty cache
    client = Client.to_server(server.url, headers={"User-Agent": "a\tb", "X-Name": "c"})
    client.get("/v1/models/%1b%5d0;owned%07%0a12:34:56%20forged%0d%c2%9b%e2%80%ae")
    forged = EVIL + "\n12:34:56 forged"
    for body in (
        {"messages": question("so " * 200 + EVIL), "model": EVIL, "max_tokens": 1},
        {"messages": question("so " * 200 + EVIL[::-1]), "max_tokens": 1},
        {"messages": [{"role": forged, "content": ""}]},
        {"messages": question(EVIL), "response_format": {"type": forged}},
        {"messages": question(EVIL), "reasoning_format": forged},
        {"messages": question(EVIL), "grammar": "root ::= \x1b]0;owned\x07\n12:34:56 forged"},
    ):
        client.post(CHAT, body)
        client.delete("/cache")  # so that the second one misses what the first had
    client.post("/cache/pin", {"id": forged})
    client.post("/v1/responses", {"input": "x", "max_output_tokens": 1, "tools": [{"type": EVIL}]})
    assert server.stop() == 0
    for text in (log.read_text(encoding="utf-8"), server.log()):
        assert "owned" in text
        assert "differs from a recent prompt" in text
        assert not evil(text), evil(text)
        assert not re.search(r"^[\d:]* *forged", text, re.MULTILINE)


def test_listed_prompts_leave_the_terminal_alone(start: Start, tmp_path: Path) -> None:
    server = start("tiny-hybrid", *disk_cache(tmp_path))
    for name in ("one", "two"):
        text = f"{EVIL} {name} [bold]" + "and so on " * 400 + EVIL
        server.chat(question(text), max_tokens=4, ignore_eos=True)
    assert server.stop() == 0
    listed = pyctl("cache", "ls", "--kv-cache-dir", str(tmp_path))
    assert listed.returncode == 0
    assert evil(listed.stdout) == set()
    assert "\\x1b]0;ow" in listed.stdout
    (next(tmp_path.glob("*/")) / "x\x1b]0;owned\x07").touch()
    verified = pyctl("cache", "verify", "--kv-cache-dir", str(tmp_path))
    assert "owned" in verified.stdout
    assert not evil(verified.stdout)


class Hostile(Handler):
    """A server that answers any chat with what a terminal obeys; the question "fail" with an error
    of that kind.
    """

    def do_GET(self) -> None:
        self._say(200, {"data": [{"id": f"model {EVIL}"}]})

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        if b"fail" in asked:
            return self._say(400, {"error": {"message": EVIL, "code": 400}})
        call = {"index": 0, "id": EVIL, "function": {"name": EVIL, "arguments": EVIL}}
        chunks = [
            {
                "choices": [
                    {"delta": {"reasoning_content": EVIL, "content": EVIL, "tool_calls": [call]}}
                ]
            },
            {
                "choices": [{"delta": {}, "finish_reason": "stop"}],
                "timings": {"cache_n": 1, "source": EVIL},
            },
        ]
        self._say(200, *chunks, is_stream=True)

    def _say(self, status: int, *bodies: object, is_stream: bool = False) -> None:
        form, kind = (
            ("data: {}\n\n", "text/event-stream") if is_stream else ("{}", "application/json")
        )
        text = "".join(form.replace("{}", json.dumps(body)) for body in bodies)
        self.send(
            status, text.encode(), Content_Type=kind, X_Pyctl_Cache="source=\x9b31m; cached=1"
        )


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    with web_server(Hostile) as url:
        yield url


DRAWN = re.compile(r"\r?\x1b\[(?:[0-9;]*m|\?25[lh]|2K|1A)")
"""Output of the chat itself on a terminal: styles, and the sequences that draw its last rows
again.
"""


@pytest.mark.parametrize("question", ["hello", "fail"])
def test_a_hostile_server_does_not_reach_the_terminal_of_a_chat(
    hostile: str, question: str
) -> None:
    command = [sys.executable, "-m", "pyctl", "chat", "--url", hostile, "-p", question]
    piped = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=clean_environment()
    )
    assert "owned" in piped.stderr
    assert not evil(piped.stderr if question == "fail" else "")
    for stdin_is_terminal in (True, False):
        shown = on_terminal(command, stdin_is_terminal)
        plain = DRAWN.sub("", shown.replace("\r\n", "\n"))
        assert "owned" in plain
        assert not evil(plain), evil(plain)


def on_terminal(command: list[str], stdin_is_terminal: bool) -> str:
    """Return the output of ``command`` on its own terminal."""
    ours, theirs = pty.openpty()
    stdin = theirs if stdin_is_terminal else subprocess.DEVNULL
    child = subprocess.Popen(
        command, stdin=stdin, stdout=theirs, stderr=theirs, env=clean_environment()
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:  # Linux's error once the other end is closed
        pass
    finally:
        os.close(ours)
        child.wait(60)
    return shown.decode("utf-8", "replace")

"""The command as a user types it: exit codes, one-line errors, chat through pipes."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.measure.server_process import clean_environment
from tests.process.conftest import Server, pyctl


def only_line(stderr: str) -> str:
    """Return the only line of ``stderr``: no address is printed before the model is found."""
    (line,) = stderr.splitlines()
    return line


@pytest.fixture
def damaged(tmp_path: Path, model_path: Callable[[str], Path]) -> dict[str, Path]:
    whole = model_path("tiny-hybrid").read_bytes()
    contents = {
        "noise": b"\x00\x01" * 500,
        "header only": b"GGUF" + bytes(40),
        "cut": whole[: len(whole) // 2],
        "empty": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return {
        **{name: tmp_path / name for name in contents},
        "folder": tmp_path,
        "missing": tmp_path / "nothing.gguf",
    }


@pytest.mark.parametrize("command", ["serve", "chat"])
@pytest.mark.parametrize("kind", ["noise", "header only", "cut", "empty", "folder", "missing"])
def test_a_model_that_cannot_be_loaded(damaged: dict[str, Path], command: str, kind: str) -> None:
    result = pyctl(command, "-m", str(damaged[kind]))
    assert result.returncode == 2
    error = only_line(result.stderr)
    assert error.startswith("pyctl: error: ")
    assert str(damaged[kind]) in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--no-such-flag"], "unknown flag --no-such-flag"),
        (["dance"], "unknown command: 'dance'; the commands are"),
        (["-m", "x.gguf"], "flags come after a command, not before it: '-m'"),
        (["cache", "ls", "x"], "unexpected argument 'x'; a directory is named by --kv-cache-dir"),
        (["chat", "--url", "http://127.0.0.1:1", "-m", "x.gguf"], "exclude each other"),
    ],
)
def test_flags_that_make_no_sense(arguments: list[str], message: str) -> None:
    result = pyctl(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_a_context_larger_than_memory(model_path: Callable[[str], Path]) -> None:
    result = pyctl("serve", "-m", str(model_path("tiny-dense")), "-c", "2000000000")
    assert result.returncode == 2
    assert "try a smaller --ctx-size" in only_line(result.stderr)


def test_a_port_that_is_taken_names_its_server(
    start: Callable[..., Server], model_path: Callable[[str], Path]
) -> None:
    port = start("tiny-hybrid").url.rpartition(":")[2]
    error = only_line(pyctl("serve", "-m", str(model_path("tiny-hybrid")), "--port", port).stderr)
    assert "Address already in use; a server of tiny-hybrid" in error
    assert error.endswith(" answers there; --port 0 takes a free port")


def test_the_version_names_the_bindings() -> None:
    assert re.fullmatch(
        r"pyctl \d+\.\d+\.\d+ \(llama-cpp-python [\d.]+\)\n", pyctl("--version").stdout
    )


def test_help_gives_an_overview_and_the_flags_of_a_command() -> None:
    overview = pyctl("--help").stdout
    assert overview.startswith("usage: pyctl")
    assert max(map(len, overview.splitlines())) <= 80
    assert pyctl().returncode == 2
    for command in ("serve", "chat"):
        result = pyctl(command, "--help")
        assert result.returncode == 0
        assert "--ctx-size" in result.stdout


def test_help_on_nothing_that_there_is_names_the_sections() -> None:
    nothing = pyctl("serve", "--help", "nonesuch")
    assert nothing.returncode == 2
    assert nothing.stdout == ""
    assert nothing.stderr.startswith(
        "pyctl: error: --help: no section or flag 'nonesuch'; sections: general, model,"
    )


def test_chat_through_a_pipe_in_process(model_path: Callable[[str], Path]) -> None:
    """A chat whose output is a pipe prints plain text without escape sequences, its second turn
    comes from the cache, and `-p` gives the same reply as the first line of the pipe.
    """
    flags = [
        "chat",
        "-m",
        str(model_path("tiny-hybrid")),
        *shlex.split("-c 4096 -n 12 --temp 0 -t 1"),
    ]
    result = pyctl(*flags, "--lines", stdin="hello there\nand again\n")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) >= 2
    assert "\x1b" not in result.stdout + result.stderr
    assert "memory:" not in result.stderr
    stats = [line for line in result.stderr.splitlines() if "evaluated" in line]
    assert len(stats) == 2
    assert "| 0 cached |" in stats[0]
    assert "| 0 cached |" not in stats[1]
    assert pyctl(*flags, "-p", "hello there").stdout.strip() == result.stdout.splitlines()[0]


def test_chat_with_a_running_server_says_the_same(
    start: Callable[..., Server], model_path: Callable[[str], Path]
) -> None:
    """A reply is the same whether the chat loads the model itself or uses a server."""
    server = start("tiny-hybrid")
    local = pyctl(
        "chat",
        "-m",
        str(model_path("tiny-hybrid")),
        "-c",
        "8192",
        "-n",
        "16",
        "--temp",
        "0",
        "-p",
        "hello",
    )
    remote = pyctl("chat", "--url", server.url, "-n", "16", "--temp", "0", "-p", "hello")
    assert remote.returncode == 0
    assert remote.stdout == local.stdout


def test_without_a_model_the_builtin_one_runs_and_says_so() -> None:
    told = "My cat is called Miro.\nWhat is my cat called?\n"
    result = pyctl("chat", "--temp", "0", "-c", "2048", "--lines", stdin=told)
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1] == "Your cat is called Miro."
    said = [line for line in result.stderr.splitlines() if "built-in" in line]
    assert [line.partition(" ")[2] for line in said] == [
        "warning: no -m given: running the built-in model, which repeats facts of the conversation"
    ]


def test_an_address_that_refuses_is_one_line() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/m.gguf"
        result = pyctl("serve", "-mu", url)
    assert result.returncode == 2
    assert only_line(result.stderr).startswith(f"pyctl: error: cannot fetch {url}: ")


def test_ctrl_c_ends_a_download() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/m.gguf"
        command = [sys.executable, "-m", "pyctl", "serve", "-mu", url, "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, env=clean_environment()) as process:
            silent.settimeout(60)
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130

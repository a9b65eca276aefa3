"""The default disk cache: a server without flags about it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.measure.server_process import clean_environment
from pyctl.processes.install_command import install_command
from tests.process.conftest import Server, n_on_disk, pyctl
from tests.waiting import until

ASKED = {
    "messages": [{"role": "system", "content": "You keep the manual of the north gate. " * 25}],
    "max_tokens": 4,
}

Start = Callable[..., Server]


def at_home(home: Path) -> str:
    """Return code that lets a server have the defaults of a user whose cache directory is
    ``home``.
    """
    return (
        f"import os; del os.environ['PYCTL_KV_CACHE']; os.environ['XDG_CACHE_HOME'] = {str(home)!r}"
    )


def test_prompts_outlive_a_restart_without_a_flag(start: Start, tmp_path: Path) -> None:
    """Without any flag a prompt is restored from the user's cache directory, by a second server
    that runs beside the first, and after a restart; the directory is private and the log names it.
    """
    # But for what is evicted, a prompt is written when another one has the same head.
    flags = ["--kv-cache-budget", "64", "--disk-prefix-cache", "full"]
    first = start("tiny-hybrid", *flags, before=at_home(tmp_path))
    second = start("tiny-hybrid", *flags, before=at_home(tmp_path))
    directory = tmp_path / "pyctl" / "kv"
    assert directory.stat().st_mode & 0o777 == 0o700
    line = (
        f"disk cache: {directory}, at most 64 MiB; its files contain text of prompts; "
        "--no-kv-cache turns it off"
    )
    assert line in first.log()
    assert f"{directory} holds nothing of this model yet" in first.log()
    assert first.client.chat(**ASKED).source == "none"
    until(lambda: n_on_disk(second) > 0)
    assert second.client.chat(**ASKED).source == "disk", "two servers share the directory"
    assert first.stop() == 0
    assert second.stop() == 0
    again = start("tiny-hybrid", *flags, before=at_home(tmp_path))
    assert re.search(r"kv holds [1-9]\d* prefix", again.log())
    assert again.client.chat(**ASKED).source == "disk"
    listed = pyctl("cache", "ls", XDG_CACHE_HOME=str(tmp_path), COLUMNS="200")
    assert "north gate" in listed.stdout, listed.stderr


@pytest.mark.parametrize(
    "flags", [("--no-kv-cache",), ()], ids=["turned off", "servers of the tests"]
)
def test_without_it_nothing_is_written(
    start: Start, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    before = (
        at_home(tmp_path)
        if flags
        else f"import os; os.environ['XDG_CACHE_HOME'] = {str(tmp_path)!r}"
    )
    server = start("tiny-hybrid", *flags, before=before)
    assert server.client.chat(**ASKED).source == "none"
    assert server.stop() == 0
    assert list(tmp_path.iterdir()) == []
    assert "disk cache" not in server.log()


def test_a_home_that_cannot_be_written_is_a_warning(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    server = start("tiny-hybrid", before=at_home(tmp_path / "file"))
    assert server.log().count("no disk cache: cannot use ") == 1
    assert server.client.chat(**ASKED).source == "none"


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_given_directory_that_cannot_be_used_ends_the_start(command: str, tmp_path: Path) -> None:
    """Before the model is looked for: there is none here."""
    (tmp_path / "file").touch()
    path = f"{tmp_path}/file/kv"
    flags = ["-m", f"{tmp_path}/missing.gguf", "--kv-cache-dir", path]
    port = ["--port", "0"] if command == "serve" else ["-p", "x"]
    done = pyctl(command, *flags, *port)
    assert done.returncode == 2
    assert done.stderr == f"pyctl: error: cannot use --kv-cache-dir {path}: File exists\n"


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_store_without_its_package_ends_the_start(command: str, tmp_path: Path) -> None:
    """Before the model is looked for, too."""
    flags = [
        "-m",
        f"{tmp_path}/missing.gguf",
        "--kv-cache-dir",
        str(tmp_path),
        "--kv-store",
        "memory://",
    ]
    port = ["--port", "0"] if command == "serve" else ["-p", "x"]
    program = (
        "import runpy, sys; sys.modules['obstore'] = None; runpy.run_module('pyctl', "
        "run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, *flags, *port],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    hint = install_command("obstore>=0.9")
    assert done.returncode == 2
    assert done.stderr == f"pyctl: error: --kv-store needs obstore: {hint}\n"

"""The keeper of a program: it passes input and output on, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pyctl.mcp import keeper
from tests.waiting import until

LIMIT = 1000

STARTS_OTHERS = """
import os, subprocess, sys, time
own_session = subprocess.Popen(["sleep", "3600"], start_new_session=True)
child = subprocess.Popen(["sleep", "3600"])
print(os.getpid(), own_session.pid, child.pid, flush=True)
sys.stdin.read()
time.sleep(3600)
"""
"""Prints its number and those of two processes that it starts, and does not end with its input."""


@pytest.fixture
def kept() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield the list of keepers, which are killed in the end."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait(60)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def keep(kept: list[subprocess.Popen[bytes]], *program: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(keeper.__file__), str(LIMIT), *program]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
    kept.append(process)
    return process


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, also if its parent has not waited for it."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_input_and_output_are_passed_on(kept: list[subprocess.Popen[bytes]]) -> None:
    process = keep(kept, "cat")
    assert process.stdin is not None
    assert process.stdout is not None
    lines = b"one\ntwo \xff\n" + b"x" * (LIMIT - 1) + b"\n"
    process.stdin.write(lines)
    process.stdin.flush()
    assert process.stdout.read(len(lines)) == lines
    process.stdin.close()
    assert process.wait(60) == 0


def test_it_ends_with_its_program_and_has_its_last_output(
    kept: list[subprocess.Popen[bytes]],
) -> None:
    process = keep(kept, "sh", "-c", "echo bye; exit 7")
    out, _ = process.communicate(timeout=60)
    assert out == b"bye\n"
    assert process.returncode == 0


def test_a_program_that_is_not_there_is_one_line(kept: list[subprocess.Popen[bytes]]) -> None:
    process = keep(kept, "no-such-program-anywhere")
    _, error = process.communicate(timeout=60)
    assert error == b"cannot run no-such-program-anywhere: No such file or directory\n"
    assert process.returncode == 1


def test_a_line_beyond_the_limit_ends_it(kept: list[subprocess.Popen[bytes]]) -> None:
    endless = "import sys, time; sys.stdout.write('x' * 5000); sys.stdout.flush(); time.sleep(3600)"
    process = keep(kept, sys.executable, "-c", endless)
    assert process.wait(60) == 0


@pytest.mark.parametrize("end", ["input", "SIGTERM", "SIGHUP"])
def test_all_that_the_program_started_ends_with_it(
    end: str, kept: list[subprocess.Popen[bytes]]
) -> None:
    process = keep(kept, sys.executable, "-c", STARTS_OTHERS)
    assert process.stdin is not None
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert not any(map(is_gone, pids))
    if end == "input":
        process.stdin.close()
    else:
        os.kill(process.pid, signal.Signals[end])
    process.wait(60)
    until(lambda: all(map(is_gone, pids)))


def test_the_program_ends_when_the_keeper_is_killed(kept: list[subprocess.Popen[bytes]]) -> None:
    waits = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"
    process = keep(kept, sys.executable, "-c", waits)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    until(lambda: is_gone(pid))

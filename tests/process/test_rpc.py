"""A model on two workers of this machine: the same bits as in one process, the cache, and the loss
of a worker.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Server, disk_cache, n_on_disk, pyctl
from tests.process.test_restart import SYSTEM, user
from tests.waiting import until

Workers = Callable[..., tuple[list[subprocess.Popen[str]], str]]


@contextmanager
def worker(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a worker process on a free port of this machine, and its host:port."""
    command = [sys.executable, "-m", "pyctl", "worker", "--port", "0", "--threads", "1", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            lends = (re.match(r"worker at (\S+) lends ", line) for line in process.stderr)
            yield process, next(match[1] for match in lends if match is not None)
        finally:
            process.kill()


@pytest.fixture
def workers() -> Iterator[Workers]:
    """workers() -> two worker processes, and the value of --rpc; with the latter given, at the same
    ports.
    """
    # where no other process takes a port meanwhile
    host = f"127.77.{os.getpid() // 250 % 250}.{os.getpid() % 250 + 1}"
    with ExitStack() as stack:

        def run(rpc: str = "") -> tuple[list[subprocess.Popen[str]], str]:
            ports = re.findall(r":(\d+)", rpc) or ["0", "0"]
            found = [stack.enter_context(worker("--host", host, "--port", port)) for port in ports]
            return [process for process, _ in found], ",".join(endpoint for _, endpoint in found)

        yield run


@pytest.fixture(scope="module")
def lasting() -> Iterator[str]:
    """Yield the value of --rpc for two workers that serve one server after the other."""
    with worker() as (_, one), worker() as (_, other):
        yield f"{one},{other}"


def refused(model: Path, *flags: str) -> str:
    """Return the line with which `pyctl serve` refuses to start."""
    done = pyctl("serve", "-m", str(model), "--port", "0", "-c", "8192", *flags)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-moe", "tiny-dense"])
def test_probabilities_are_those_of_one_process(
    start: Callable[..., Server], lasting: str, name: str
) -> None:
    said = []
    for flags in ([], ["--rpc", lasting]):
        server = start(name, *flags)
        reply = server.chat([SYSTEM, user(1)], logprobs=True, top_logprobs=20)
        said.append(reply.logprobs["content"])
        assert server.stop() == 0
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("name", "flags"),
    [("tiny-hybrid-nextn", ["--spec-type", "draft-mtp"]), ("tiny-moe", []), ("tiny-dense", [])],
)
def test_turns_edits_branches_and_restarts_are_exact(
    start: Callable[..., Server], lasting: str, tmp_path: Path, name: str, flags: list[str]
) -> None:
    """Each way to go on with a conversation on two workers restores most of its tokens and replies
    as a cold prompt does.
    """
    flags = ["--rpc", lasting, "--exact", *disk_cache(tmp_path), *flags]
    server = start(name, *flags)
    assert "RPC0" in server.log()
    assert "RPC1" in server.log()

    def check(*messages: dict[str, str]) -> dict[str, Any]:
        reply = server.chat(list(messages))
        assert reply.text == server.chat(list(messages), cache_prompt=False).text
        return dict(reply.timings, text=reply.text, source=reply.source)

    first = check(SYSTEM, user(1))
    said = {"role": "assistant", "content": first["text"]}
    assert check(SYSTEM, user(1), said, user(2))["cache_n"] > 1000  # the next turn
    assert check(SYSTEM, user(1), said, user(3))["cache_n"] > 1000  # an edit
    assert check(SYSTEM, user(4))["cache_n"] >= 900  # a branch
    assert check(SYSTEM, user(1), said, user(2))["cache_n"] > 1000  # and back
    until(lambda: n_on_disk(server))
    assert server.stop() == 0
    server = start(name, *flags)
    again = check(SYSTEM, user(1), said, user(2))
    assert again["source"] == "disk"
    assert again["cache_n"] > 1000
    assert server.stop() == 0


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_lost_worker_ends_the_server_with_the_cache_on_disk(
    start: Callable[..., Server], workers: Workers, tmp_path: Path, is_idle: bool
) -> None:
    """A worker that dies, idle or in the middle of a reply, ends the server with exit code 1, an
    error for the client, and all snapshots on disk: llama.cpp cannot go on without the worker.
    """
    processes, rpc = workers()
    flags = ["--rpc", rpc, "--exact", *disk_cache(tmp_path, "spill")]
    server = start("tiny-hybrid", *flags)
    before = server.chat([SYSTEM, user(1)])
    assert n_on_disk(server) == 0, "all is written in the end"
    if is_idle:
        processes[1].kill()
        server.client.post("/completion", {"prompt": "abc", "n_predict": 1})
    else:
        body = {"prompt": "abc" * 50, "n_predict": 7000, "ignore_eos": True}
        with server.client.open_stream("/completion", body) as stream:
            events = iter(stream)
            next(events)
            processes[1].kill()
            *_, last = events
            assert "is lost" in str(last["error"]), "the client is told"
    assert server.process.wait(60) == 1
    assert (
        f"critical: the server exits: the worker at one of {rpc.replace(',', ', ')} is lost\n"
        in server.log()
    )
    assert "Traceback" not in server.log()
    processes[0].kill()
    for process in processes:
        process.wait(60)
    workers(rpc)
    server = start("tiny-hybrid", *flags)
    after = server.chat([SYSTEM, user(1)])
    assert after.text == before.text
    assert after.source == "disk"
    assert server.stop() == 0


def test_what_does_not_work_together_is_refused(
    start: Callable[..., Server], lasting: str, model_path: Callable[[str], Path]
) -> None:
    model = model_path("tiny-dense")
    one = lasting.partition(",")[0]
    assert "--kv-pool excludes --rpc" in refused(model, "--rpc", one, "--kv-pool", "4096")
    twice = refused(model, "--rpc", f"{one},{one.replace('127.0.0.1', 'localhost')}")
    assert "localhost:" in twice
    assert "it does not answer: it serves another server" in twice
    server = start("tiny-dense", "--rpc", one)
    assert "it does not answer: it serves another server" in refused(model, "--rpc", one)
    assert server.chat([user(1)]).body["usage"]["completion_tokens"] == 12
    assert server.stop() == 0


def test_a_worker_that_is_open_to_other_machines_says_so() -> None:
    command = [sys.executable, "-m", "pyctl", "worker", "--port", "0", "--host"]
    for host, is_open in (("0.0.0.0", True), ("127.0.0.1", False)):
        with subprocess.Popen(
            [*command, host], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            lines = []
            while not (lines and lines[-1].startswith("worker at ")):
                lines.append(process.stderr.readline())
            assert any(line.startswith("warning: 0.0.0.0:") for line in lines) is is_open
            process.terminate()
            assert process.wait(60) == 0

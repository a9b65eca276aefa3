"""The path of a chat request: the modules that it enters, and the calls from one module into
another.

python -m bench.request_path [--list]

Runs `pyctl serve` on the built-in model in this process and follows one streamed chat completion,
from the socket to the last byte, on every thread. A hop is a function of another module being
called, counted once however often that happens. A stay is a module that is entered or returned to
before the engine has the request. Each thread has its own count: the order in which two threads
take turns is chance.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

import pyctl
from bench.common import parse, parser_of, show
from pyctl.cli import main as run
from pyctl.cli import serving

PACKAGE = os.path.dirname(os.path.abspath(pyctl.__file__)) + os.sep
BODY = {
    "messages": [{"role": "user", "content": "My name is Ada."}],
    "max_tokens": 4,
    "temperature": 0,
    "stream": True,
}

QUIET_SECONDS = 2.0

REQUEST_TASKS = ("_accept_connection2", "run_asgi")
"""Coroutines of asyncio and of uvicorn in whose tasks a connection and its request are handled."""


class Trace:
    """Calls between modules of the package while `on` is true; installed before any thread
    starts.
    """

    def __init__(self) -> None:
        self.on = False
        self.hops: dict[tuple[str, str, str], None] = {}
        self.loop_stays: list[str] = []
        """Modules in the order in which the request's task on the event loop enters and returns to
        them.
        """

        self.thread_stays: list[str] = []
        """Modules that the thread which reads the request enters and returns to, in order."""

        self.n_request_calls = 0
        """Calls on the threads that read requests and prepare next prompts, also while off."""

        self.submitted = False
        self._names: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call between two modules of the package; a profile function as `sys.setprofile`
        takes it. Frames of other code are skipped, so that a call through a library counts as one
        of its caller. Until the request is submitted, the modules that prepare it are recorded in
        order.
        """
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if threading.current_thread().name.startswith("pyctl-request"):
            self.n_request_calls += 1
        if not self.on:
            return
        stays = self._stays_of_this_thread()
        if stays is not None and not self.submitted:
            self.submitted = frame.f_code.co_name == "submit"
            now = frame if event == "call" else frame.f_back
            if now is not None and now.f_code.co_filename.startswith(PACKAGE):
                module = self._module(now.f_code)
                if not stays or stays[-1] != module:
                    stays.append(module)
        if event != "call":
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        there = self._module(frame.f_code)
        here = self._module(caller.f_code) if caller is not None else "socket"
        if here != there and not frame.f_code.co_name.startswith("<"):
            self.hops[here, there, frame.f_code.co_name] = None

    def _stays_of_this_thread(self) -> list[str] | None:
        """Return the list for the running thread; None if it does not prepare the request.

        On the event loop only the tasks of the connection and of the request do. Others, such as
        the one that waits for the client to leave and the server's tick, run in between at any
        time.
        """
        if threading.current_thread().name == "pyctl-request":
            return self.thread_stays
        if _task_name() in REQUEST_TASKS:
            return self.loop_stays
        return None

    def _module(self, code: CodeType) -> str:
        name = self._names.get(code)
        if name is None:
            name = (
                code.co_filename[len(PACKAGE) :]
                .removesuffix(".py")
                .removesuffix("/__init__")
                .replace("/", ".")
            )
            self._names[code] = name
        return name


def _task_name() -> str:
    """Return the name of the coroutine that this thread's event loop runs as a task; empty without
    one.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return ""
    return getattr(task.get_coro(), "__name__", "") if task is not None else ""


def wait_until_quiet(trace: Trace) -> None:
    """Wait until the threads of requests have made no call for QUIET_SECONDS.

    After a reply they prepare the next prompt. On a busy machine that takes a while, and would
    count as a part of the second request.
    """
    n_calls = -1
    while n_calls != trace.n_request_calls:
        n_calls = trace.n_request_calls
        time.sleep(QUIET_SECONDS)


def ask(port: int, trace: Trace) -> None:
    """Send two requests, the second of which is followed; then stop the server. SystemExit without
    a whole reply.
    """
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/health")
            break
        except OSError:
            time.sleep(0.1)
    try:
        for follow in (False, True):
            request = urllib.request.Request(
                f"{url}/v1/chat/completions", json.dumps(BODY).encode()
            )
            request.add_header("content-type", "application/json")
            trace.on = follow
            with urllib.request.urlopen(request) as reply:
                if b"[DONE]" not in reply.read():
                    raise SystemExit("the reply was not complete")
            trace.on = False
            wait_until_quiet(trace)
    finally:
        os.kill(os.getpid(), signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> None:
    """Follow one request and print what it passed."""
    parser = parser_of(__doc__)
    parser.add_argument("--list", action="store_true", help="every hop, in order")
    options = parse(parser, argv)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    vars(serving)["exit_process"] = int  # which would end the process before there is a table
    trace = Trace()
    threading.setprofile(trace)
    threading.Thread(target=ask, args=(port, trace), daemon=True).start()
    sys.setprofile(trace)
    run(["serve", "--port", str(port), "-c", "4096", "-t", "1", "-lv", "1"])
    sys.setprofile(None)
    threading.setprofile(None)
    if not trace.submitted:
        raise SystemExit("no request was followed")
    if options.list:
        for here, there, function in trace.hops:
            print(f"{here} -> {there}:{function}")
    stays = trace.loop_stays + trace.thread_stays
    rows = [
        ("from the socket to the engine's queue", "stays", len(stays), len(set(stays))),
        (
            "all the way, each call once",
            "hops",
            len(trace.hops),
            len({there for _, there, _ in trace.hops}),
        ),
    ]
    columns = ["part of the way", "counted", "number", "modules"]
    show(
        "A chat request",
        columns,
        rows,
        keep="request_path" if options.keep else "",
        weights="real, built-in model",
    )


if __name__ == "__main__":
    main()

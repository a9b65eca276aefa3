"""Shutdown of a real process: in a long batch, by a second signal, and when its engine fails or
hangs.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyctl.measure.server_process import clean_environment
from tests.process.conftest import Server, disk_cache, n_on_disk
from tests.process.test_ops import ask_questions
from tests.waiting import until

Start = Callable[..., Server]

MESSAGES = "<|im_start|>user\nx<|im_end|>\n" * 5 + "<|im_start|>user\n"
LONG = {"prompt": [MESSAGES, *[5] * 12000], "n_predict": 4000, "ignore_eos": True}
LONG |= {"return_progress": True}
"""A batch of 12,000 tokens, since it ends nowhere within a later message, and a reply."""

ENDLESS = """
import sys, time
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.library import evaluation_control
from pyctl.measure.server_process import clean_environment

decode = LlamaBackend._decode

def until_stopped(self, batch):
    if batch.n_tokens < 10000:
        return decode(self, batch)
    print("a long batch begins", file=sys.stderr, flush=True)
    code = decode(self, batch)
    while code == 0 and not self.control.pulse.is_stopped:
        time.sleep(0.01)
    return code or evaluation_control.ABORTED

LlamaBackend._decode = until_stopped
"""
"""Makes a long batch last until it is interrupted, so that the speed of the machine does not
matter.
"""

DEAF = ENDLESS + "evaluation_control.EvaluationControl.interrupt = lambda self: None"
"""ENDLESS, and interrupts have no effect."""


@contextlib.contextmanager
def in_a_long_batch(server: Server) -> Iterator[list[dict[str, Any]]]:
    """Yield the events of a stream whose prompt is being evaluated, on a server that is
    `ENDLESS`.
    """
    events: list[dict[str, Any]] = []

    def read() -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            server.client.open_stream("/completion", LONG) as stream,
        ):
            events.extend(stream)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    until(lambda: "a long batch begins" in server.log())
    yield events
    reader.join(60)


LARGE = ("-c", "16384", "-ub", "12288", "-b", "12288")


def test_sigterm_in_a_long_batch_stops_it_and_keeps_the_other_conversations(
    start: Start, tmp_path: Path
) -> None:
    """SIGTERM interrupts a batch that would run on, ends its stream with an error, and saves the
    other conversations: a shutdown neither waits for a long prompt nor loses the cache.
    """
    flags = (*LARGE, *disk_cache(tmp_path, "auto"))
    server = start("tiny-hybrid", *flags, before=ENDLESS)
    first = ask_questions(server, "What is in chapter one?")
    with in_a_long_batch(server) as events:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.log()
    log = server.log()
    assert "Traceback" not in log
    assert len(log.splitlines()) < 30
    assert "error" in events[-1]
    again = start("tiny-hybrid", *flags)
    resumed = ask_questions(again, "What is in chapter one?")
    assert first.timings["cache_n"] == 0
    assert resumed.timings["cache_n"] > 0.9 * first.timings["prompt_n"]
    assert resumed.source == "disk"


TELLING = """
import sys
from pyctl.llama.library import llama_tokenizer
tokenize = llama_tokenizer.LlamaTokenizer.tokenize

def told(self, text, **flags):
    if len(text) > 10**5:
        print("a long text is tokenised", file=sys.stderr, flush=True)
    return tokenize(self, text, **flags)

llama_tokenizer.LlamaTokenizer.tokenize = told
"""


def test_sigterm_while_a_text_is_tokenised_is_an_end_like_any_other(start: Start) -> None:
    """The client has left; its thread works on, in the vocabulary of a model that nothing must
    free.
    """
    server = start("tiny-hybrid", before=TELLING)
    impatient = httpx.Timeout(60, read=0.5)  # sending 18 MB may take longer
    with contextlib.suppress(httpx.ReadTimeout):
        server.client.post("/tokenize", {"content": ["ab " * 300_000] * 20}, timeout=impatient)
    until(lambda: "a long text is tokenised" in server.log())
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0, server.log()
    assert "Traceback" not in server.log()


def test_a_closed_terminal_loses_nothing(start: Start, tmp_path: Path) -> None:
    flags = disk_cache(tmp_path, "auto")
    server = start("tiny-hybrid", *flags)
    ask_questions(server, "What is in chapter one?")
    server.process.send_signal(signal.SIGHUP)
    assert server.process.wait(60) == 0, server.log()
    said = server.log().splitlines()[-1]
    assert re.search(r" stopped, (1 prefix|[2-9] prefixes) saved$", said), said
    again = start(
        "tiny-hybrid", *flags, before="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    )
    assert ask_questions(again, "What is in chapter one?").source == "disk"
    again.process.send_signal(signal.SIGHUP)  # ignored, as below nohup
    assert ask_questions(again, "What is in chapter two?").timings["cache_n"] > 0
    assert again.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_chat_that_is_ended_writes_its_cache(tmp_path: Path, number: signal.Signals) -> None:
    """A chat that SIGHUP or SIGTERM ends exits by the signal's code and leaves its conversation on
    disk, so that closing a terminal costs no cache.
    """
    directory = tmp_path / "cache"
    chat_flags = shlex.split("chat --lines -c 2048 --temp 0 --kv-cache-min-tokens 16")
    command = [sys.executable, "-m", "pyctl", *chat_flags, *disk_cache(directory)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=clean_environment()) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        for line in (
            b"My cat is called Miro, and my dog is called Bella. " * 12,
            b"What is my cat called?",
        ):
            chat.stdin.write(line + b"\n")
            chat.stdin.flush()
            assert chat.stdout.readline().strip()
        chat.send_signal(number)
        assert chat.wait(60) == 128 + number
        assert chat.stderr is not None
        assert b"Traceback" not in chat.stderr.read()
    assert list(directory.glob("*/*.state")), "the end of the conversation"


def takes_connections(server: Server) -> bool:
    try:
        server.client.get("/health")
    except httpx.TransportError as error:  # others mean that it was taken, and given up
        return not isinstance(error, httpx.ConnectError)
    return True


def test_a_second_signal_ends_at_once(start: Start) -> None:
    server = start("tiny-hybrid", *LARGE, before=DEAF)
    with in_a_long_batch(server):
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not takes_connections(server))  # the first signal has come
        time.sleep(1)  # one that comes sooner is taken for the same
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 1
    assert "second signal" in server.log()
    assert "Traceback" not in server.log()


FAULTY = """
import time
from pyctl.llama.llama_backend import LlamaBackend

def fault(self, items):
    {fault}

LlamaBackend.decode = fault
"""
"""A statement comes in place of decoding."""


STREAMED = {"prompt": "Once upon a time", "n_predict": 9, "stream": True, "ignore_eos": True}


@pytest.mark.parametrize(
    "fault", ["raise SystemExit('lost')", "time.sleep(3600)"], ids=["its thread ends", "it hangs"]
)
def test_lost_engine_ends_streams_with_an_error_and_exit_code_1(start: Start, fault: str) -> None:
    server = start("tiny-hybrid", "--stall-timeout", "3", before=FAULTY.format(fault=fault))
    assert '"error"' in server.client.post("/completion", STREAMED).text
    with contextlib.suppress(httpx.TransportError):  # it may be gone already
        assert server.client.get("/health").status_code == 503
    assert server.process.wait(60) == 1, server.log()
    assert "the server exits" in server.log()


FULL = """
import ctypes
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.library import library_log

decode, calls = LlamaBackend.decode, iter(range(9, -1, -1))

def full(self, items):
    if not next(calls):
        library_log._library_log.receive(library_log.ERROR, b"CUDA error: out of memory")
        ctypes.CDLL(None).ggml_abort(b"ggml-cuda.cu", 103, b"CUDA error")
    return decode(self, items)

LlamaBackend.decode = full
"""
"""A later token ends as in ggml's CUDA backend when its pool cannot grow."""


def test_a_gpu_without_memory_ends_the_server_with_the_cache_on_disk(
    start: Start, tmp_path: Path
) -> None:
    flags = disk_cache(tmp_path, "spill")
    server = start("tiny-hybrid", *flags, before=FULL)
    ask_questions(server, "What is in chapter one?")
    assert n_on_disk(server) == 0, "all is written in the end"
    assert "CUDA error: out of memory" in server.client.post("/completion", STREAMED).text
    assert server.process.wait(60) == 1, server.log()
    assert (
        "critical: the server exits: llama.cpp has failed: CUDA error: out of memory\n"
        in server.log()
    )
    server = start("tiny-hybrid", *flags)
    assert ask_questions(server, "What is in chapter one?").source == "disk"
    assert server.stop() == 0


AT_THE_START = """
import ctypes
from llama_cpp import llama_cpp as api

def full(*_):
    ctypes.CDLL(None).ggml_abort(b"ggml-cuda.cu", 103, b"CUDA error: out of memory")

api.llama_init_from_model = full
import runpy; runpy.run_module("pyctl")
"""


def test_a_gpu_without_memory_at_the_start_is_told(model_path: Callable[[str], Path]) -> None:
    command = [
        sys.executable,
        "-c",
        AT_THE_START,
        "serve",
        "-m",
        str(model_path("tiny-dense")),
        "--port",
        "0",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(), timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert "critical: the program ends: llama.cpp has failed: " in done.stderr
    assert "CUDA error: out of memory" in done.stderr


def test_what_cannot_be_written_is_told_by_the_exit_code(start: Start, tmp_path: Path) -> None:
    server = start("tiny-hybrid", *disk_cache(tmp_path / "cache", "auto"))
    ask_questions(server, "What is in chapter one?")
    # The directory goes away, and a file takes its place: nothing can be written there.
    for path in (tmp_path / "cache").iterdir():
        if path.is_dir():
            path.rename(tmp_path / path.name)
            path.write_text("")
    assert server.stop() == 1, server.log()
    assert "cannot write" in server.log()

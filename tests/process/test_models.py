"""Several models in one process: each answers as with a server of its own, and its cache outlives
switches.
"""

from __future__ import annotations

import random
import shlex
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.case import Case
from tests.client import CHAT, random_message
from tests.process.conftest import Server, disk_cache
from tests.waiting import until

NAMES = ("hybrid", "dense", "embed")


user = partial(random_message, n=300)


BITS: dict[str, Any] = {"max_tokens": 8, "n_probs": 4}
"""Fields of replies whose log-probabilities are compared."""


def embedding(server: Server) -> Any:
    body = {"model": "embed", "input": "the north gate"}
    return server.client.post_json("/v1/embeddings", body)["data"][0]["embedding"]


def change(server: Server, verb: str, model: str) -> None:
    """Load or unload a model."""
    body = {"model": model}
    assert server.client.post_json(f"/models/{verb}", body) == {"success": True}


def states(server: Server) -> dict[str, str]:
    body = server.client.get_json("/v1/models")
    return {model["id"]: model["status"]["value"] for model in body["data"]}


@pytest.fixture(scope="module")
def preset(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """preset(dense="stop-timeout = 1") -> a preset file with three models, and lines more in their
    sections.
    """

    def write(**more: str) -> Path:
        path = tmp_path_factory.mktemp("preset") / "models.ini"
        files = {"hybrid": "tiny-hybrid", "dense": "tiny-dense", "embed": "tiny-dense"}
        head = "version = 1\n[*]\nexact = true\nctk = f32\nctv = f32\nfa = off\n"
        sections = [
            f"[{name}]\nmodel = {model_path(file)}\n{more.get(name, '')}\n"
            for name, file in files.items()
        ]
        path.write_text(head + "".join(sections))
        return path

    return write


EMBED = "embeddings = on\npooling = mean"


@pytest.fixture(scope="module")
def alone(start: Callable[..., Server]) -> dict[str, Server]:
    """Return a server for each of the two models that generate."""
    flags = ("--exact", "-ctk", "f32", "-ctv", "f32", "-fa", "off")
    return {name: start(f"tiny-{name}", *flags) for name in ("hybrid", "dense")}


def test_requests_for_all_models_at_once_are_all_answered(
    start: Callable[..., Server], preset: Callable[..., Path]
) -> None:
    """Requests for three models at once are all answered although only one or two are loaded at a
    time, and the caches of all models share one budget of RAM.
    """
    for maximum in ("1", "2"):
        flags = [
            "--models-preset",
            str(preset(embed=EMBED)),
            "--models-max",
            maximum,
            "--models-patience",
            "0.05",
        ]
        server = start("", *flags, "--cache-ram", "1")

        def one(number: int, server: Server = server) -> int:
            name = NAMES[number % 3]
            if name == "embed":
                return len(embedding(server)) and 200
            body = {"model": name, "messages": [user(number)], "max_tokens": 8}
            return server.client.post(CHAT, {**body, "stream": number % 2 == 0}).status_code

        with ThreadPoolExecutor(20) as pool:
            assert list(pool.map(one, range(21))) == [200] * 21
        assert sum(state == "loaded" for state in states(server).values()) <= int(maximum)
        used = sum(
            server.client.get_json(f"/cache?model={name}")["bytes"]["resident"]
            for name in ("hybrid", "dense")
        )
        assert 0 < used <= 2**20, "one budget for all"
        assert server.stop() == 0


def test_names_and_states(start: Callable[..., Server], preset: Callable[..., Path]) -> None:
    """A model is addressed by name or alias, loads and unloads on request, and each state is
    visible; counting tokens loads no weights. The errors are those of llama-server's router.
    """
    path = preset(embed=EMBED, hybrid="alias = claude,h", dense="load-on-startup = on")
    server = start(
        "", "--models-preset", str(path), "--models-max", "1", "--metrics", "--models-patience", "0"
    )
    until(lambda: states(server)["dense"] == "loaded")
    client = server.client
    messages = [user(0)]
    for path, model, message in (
        (CHAT, {}, "model name is missing from the request"),
        (CHAT, {"model": "nope"}, "model 'nope' not found"),
        (f"{CHAT}?autoload=false", {"model": "h"}, "model is not loaded"),
    ):
        case = Case(path, {**model, "messages": messages}, 400, message)
        assert case.check(client) == message
    asked = {"model": "claude", "max_tokens": 4, "messages": messages}
    assert client.post_json("/v1/messages", asked)["model"]
    assert states(server) == {"hybrid": "loaded", "dense": "unloaded", "embed": "unloaded"}
    # Counting tokens needs no weights, so an unloaded model answers.
    counted = client.post_json("/tokenize", {"model": "dense", "content": "abc"})
    assert len(counted["tokens"]) == 3
    assert states(server)["dense"] == "unloaded"
    assert "switched to hybrid in" in server.log()
    assert client.get_json("/props?model=h")["model_alias"] == "hybrid"
    assert client.get_json("/props")["role"] == "router"
    text = client.get("/metrics").text
    assert 'pyctl_model_loaded{model="hybrid"} 1' in text
    assert 'llamacpp:tokens_predicted_total{model="hybrid"}' in text
    Case("/models/load", {"model": "h"}, 400, "model is already running").check(client)
    change(server, "load", "dense")
    until(lambda: states(server)["dense"] == "loaded")
    change(server, "unload", "dense")
    until(lambda: states(server)["dense"] == "unloaded")
    Case("/models/unload", {"model": "dense"}, 400, "model is not running").check(client)
    Case("/models/load", {"model": "nope"}, 404, "not found").check(client)
    assert server.stop() == 0


def test_an_unload_ends_replies_that_take_longer_than_its_patience(
    start: Callable[..., Server], preset: Callable[..., Path]
) -> None:
    """An unload cuts a long reply off with an error after its patience, and the snapshots of the
    model stay in RAM for when it is loaded again.
    """
    server = start("", "--models-preset", str(preset(embed=EMBED, hybrid="stop-timeout = 0.2")))
    server.chat([user(0)], model="hybrid")
    body = {"messages": [user(1)], "max_tokens": 7000, "ignore_eos": True}
    with server.client.open_stream(CHAT, {"model": "hybrid", **body}) as stream:
        events = iter(stream)
        next(events)
        change(server, "unload", "hybrid")
        *_, last = events
    assert last["error"]["message"] == "the model hybrid was unloaded"
    until(lambda: states(server)["hybrid"] == "unloaded")
    again = server.chat([user(0)], model="hybrid")
    assert again.source == "ram", "it comes back with what it remembers"
    assert server.stop() == 0


def snapshot_bytes(server: Server) -> float:
    """Return bytes of the snapshots of all models."""
    lines = server.client.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("pyctl_cache_ram_bytes{")
    )


def settled_bytes(server: Server) -> float:
    """Return `snapshot_bytes` at one moment: models report one after the other, so they are polled
    until nothing has moved.
    """
    seen = [-1.0, snapshot_bytes(server)]

    def stands() -> bool:
        seen.append(snapshot_bytes(server))
        return seen[-1] == seen[-2]

    until(stands)
    return seen[-1]


class Talks:
    """Conversations with the models of one server, each reply compared with that of a server of the
    model's own.
    """

    def __init__(self, alone: dict[str, Server], vector: Any) -> None:
        self.alone = alone
        self.vector = vector
        self.max_bytes = 0.0
        self.messages: dict[tuple[str, int], list[dict[str, str]]] = {}

    def go_on(self, server: Server, name: str, number: int) -> None:
        if name == "embed":
            assert embedding(server) == self.vector
        else:
            messages = self.messages.setdefault((name, number), [])
            if len(messages) > 6:
                del messages[2:]  # an edit
            messages.append(user((name, number, len(messages))))
            reply = server.chat(messages, model=name, **BITS)
            expected = self.alone[name].chat(messages, model=name, **BITS)
            assert reply.text == expected.text
            assert reply.logprobs == expected.logprobs
            messages.append({"role": "assistant", "content": reply.text})
        held = settled_bytes(server)
        assert held <= 2**20, "one budget for all"
        self.max_bytes = max(self.max_bytes, held)


def test_one_budget_and_exact_replies_over_restarts_and_kills(
    start: Callable[..., Server],
    preset: Callable[..., Path],
    alone: dict[str, Server],
    tmp_path: Path,
) -> None:
    """Over loads, unloads, a kill and a restart, each model replies to the bit as a server of its
    own, and all caches together never exceed the one budget.
    """
    flags = [
        "--models-preset",
        str(preset(embed=EMBED)),
        *shlex.split("--models-patience 0 --models-max 2 --metrics"),
    ]
    flags += ["--cache-ram", "1", "--kv-cache-dir", str(tmp_path), "--kv-cache-min-tokens", "100"]
    order = random.Random(7)
    server = start("", *flags)
    talks = Talks(alone, embedding(server))
    for number in range(36):
        talks.go_on(server, order.choice(NAMES), order.randrange(3))
        if number == 8:
            loaded = next(name for name, state in states(server).items() if state == "loaded")
            change(server, "unload", loaded)
        elif number == 16:
            away = next(name for name, state in states(server).items() if state == "unloaded")
            change(server, "load", away)
            server.kill()
            server = start("", *flags)
        elif number == 26:
            assert server.stop() == 0
            server = start("", *flags)
    assert talks.max_bytes > 2**19, "the budget was in use"
    lines = server.client.get("/metrics").text.splitlines()
    evicted = [line.split()[-1] for line in lines if line.startswith("pyctl_cache_evict")]
    assert sum(map(float, evicted)) > 0
    assert server.stop() == 0


def test_files_that_are_gone_or_cut_are_errors_of_their_requests_alone(
    start: Callable[..., Server],
    preset: Callable[..., Path],
    tmp_path: Path,
    model_path: Callable[[str], Path],
) -> None:
    """A model whose file is gone or cut fails its own requests with 500 and the file's name; the
    model that it displaced is loaded again, and a repaired file works without a restart.
    """
    whole = model_path("tiny-dense").read_bytes()
    files = {name: tmp_path / f"{name}.gguf" for name in ("gone", "cut")}
    for file in files.values():
        file.write_bytes(whole)
    path = preset(embed=EMBED, dense="load-on-startup = on")
    path.write_text(path.read_text() + "".join(f"[{n}]\nmodel = {files[n]}\n" for n in files))
    server = start("", "--models-preset", str(path), "--models-max", "1", "--models-patience", "0")
    until(lambda: states(server)["dense"] == "loaded")
    files["gone"].unlink()
    files["cut"].write_bytes(whole[: len(whole) * 2 // 3])
    for name in ("gone", "cut"):
        body = {"model": name, "messages": [user(0)]}
        Case(CHAT, body, 500, f"{name}.gguf").check(server.client)
        until(lambda: states(server)["dense"] == "loaded")
        assert states(server)[name] == "unloaded"
        server.chat([user(0)], model="dense")
    listed = server.client.get_json("/models")["data"]
    assert all(model["status"]["failed"] for model in listed if model["id"] in files)
    files["gone"].write_bytes(whole)
    change(server, "load", "gone")
    until(lambda: states(server)["gone"] == "loaded")
    assert server.stop() == 0


FULL = """
import ctypes
from pyctl.engine.engine import Engine
from pyctl.llama.library import library_log

def full(self):
    if self.asleep:
        library_log._library_log.receive(library_log.ERROR, b"CUDA error: out of memory")
        ctypes.CDLL(None).ggml_abort(b"ggml-cuda.cu", 103, b"CUDA error")

Engine.wake = full
"""
"""A model that is loaded again ends as in ggml's CUDA backend when another program has the memory.
"""


@pytest.mark.parametrize("is_asked", [False, True], ids=["alone", "with a signal"])
def test_gpu_out_of_memory_ends_server_with_caches_on_disk(
    start: Callable[..., Server], preset: Callable[..., Path], tmp_path: Path, is_asked: bool
) -> None:
    """A load without memory on the GPU aborts the process, since llama.cpp cannot go on; the caches
    of all models are written first, also if a signal ends the server at that moment.
    """
    flags = [
        "--models-preset",
        str(preset(embed=EMBED)),
        *shlex.split("--models-patience 0 --models-max 1"),
    ]
    flags += disk_cache(tmp_path, "spill")
    server = start("", *flags, before=FULL)
    talks = {name: [user(name, n=1200)] for name in ("hybrid", "dense")}
    for name, talk in talks.items():
        server.chat(talk, model=name)
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(server.chat, [user(0)], model="hybrid")
        until(lambda: "out of memory" in server.log())
        if is_asked:
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 1, server.log()
        assert lost.exception() is not None
    assert "signal" not in server.log()
    server = start("", *flags)
    for name, talk in talks.items():
        assert server.chat(talk, model=name).source == "disk"
    assert server.stop() == 0

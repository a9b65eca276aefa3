"""Several models in one process: each answers as with a server of its own, and its cache outlives
switches.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process.conftest import Server, source_of
from tests.waiting import until

NAMES = ("hybrid", "dense", "embed")


def user(seed: object, n: int = 300) -> dict[str, str]:
    return {
        "role": "user",
        "content": "".join(random.Random(str(seed)).choices("abcdefghij klmno", k=n)),
    }


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=120)


def ask(
    server: Server, model: str, messages: list[dict[str, str]], **fields: Any
) -> httpx.Response:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 8,
        "temperature": 0,
        "n_probs": 4,
        **fields,
    }
    response = post(server, "/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response


def bits(response: httpx.Response) -> tuple[Any, ...]:
    """Return a reply with its log-probabilities, which differ if one bit of the logits does."""
    (choice,) = response.json()["choices"]
    return choice["message"]["content"], choice["logprobs"]["content"]


def embedding(server: Server) -> Any:
    body = {"model": "embed", "input": "the north gate"}
    return post(server, "/v1/embeddings", body).json()["data"][0]["embedding"]


def states(server: Server) -> dict[str, str]:
    body = httpx.get(f"{server.url}/v1/models").json()
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
            return ask(server, name, [user(number)], stream=number % 2 == 0).status_code

        with ThreadPoolExecutor(20) as pool:
            assert list(pool.map(one, range(21))) == [200] * 21
        assert sum(state == "loaded" for state in states(server).values()) <= int(maximum)
        used = sum(
            httpx.get(f"{server.url}/cache?model={name}").json()["bytes"]["resident"]
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
    for body, status, message in (
        ({"messages": [user(0)]}, 400, "model name is missing from the request"),
        ({"model": "nope", "messages": [user(0)]}, 400, "model 'nope' not found"),
    ):
        response = post(server, "/v1/chat/completions", body)
        assert response.status_code == status
        assert response.json()["error"]["message"] == message
    refused = post(
        server, "/v1/chat/completions?autoload=false", {"model": "h", "messages": [user(0)]}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "model is not loaded"
    assert post(
        server, "/v1/messages", {"model": "claude", "max_tokens": 4, "messages": [user(0)]}
    ).json()["model"]
    assert states(server) == {"hybrid": "loaded", "dense": "unloaded", "embed": "unloaded"}
    # Counting tokens needs no weights, so an unloaded model answers.
    assert (
        len(post(server, "/tokenize", {"model": "dense", "content": "abc"}).json()["tokens"]) == 3
    )
    assert states(server)["dense"] == "unloaded"
    assert "switched to hybrid in" in server.log()
    assert httpx.get(f"{server.url}/props?model=h").json()["model_alias"] == "hybrid"
    assert httpx.get(f"{server.url}/props").json()["role"] == "router"
    text = httpx.get(f"{server.url}/metrics").text
    assert 'pyctl_model_loaded{model="hybrid"} 1' in text
    assert 'llamacpp:tokens_predicted_total{model="hybrid"}' in text
    assert (
        post(server, "/models/load", {"model": "h"}).json()["error"]["message"]
        == "model is already running"
    )
    assert post(server, "/models/load", {"model": "dense"}).json() == {"success": True}
    until(lambda: states(server)["dense"] == "loaded")
    assert post(server, "/models/unload", {"model": "dense"}).json() == {"success": True}
    until(lambda: states(server)["dense"] == "unloaded")
    assert post(server, "/models/unload", {"model": "dense"}).status_code == 400
    assert post(server, "/models/load", {"model": "nope"}).status_code == 404
    assert server.stop() == 0


def test_an_unload_ends_replies_that_take_longer_than_its_patience(
    start: Callable[..., Server], preset: Callable[..., Path]
) -> None:
    """An unload cuts a long reply off with an error after its patience, and the snapshots of the
    model stay in RAM for when it is loaded again.
    """
    server = start("", "--models-preset", str(preset(embed=EMBED, hybrid="stop-timeout = 0.2")))
    ask(server, "hybrid", [user(0)])
    body = {
        "model": "hybrid",
        "messages": [user(1)],
        "max_tokens": 7000,
        "stream": True,
        "ignore_eos": True,
    }
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, timeout=120
    ) as response:
        lines = response.iter_lines()
        next(lines)
        assert post(server, "/models/unload", {"model": "hybrid"}).json() == {"success": True}
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["error"]["message"] == "the model hybrid was unloaded"
    until(lambda: states(server)["hybrid"] == "unloaded")
    assert source_of(ask(server, "hybrid", [user(0)])) == "ram", (
        "it comes back with what it remembers"
    )
    assert server.stop() == 0


def snapshot_bytes(server: Server) -> float:
    """Return bytes of the snapshots of all models."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
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
            reply = ask(server, name, messages)
            assert bits(reply) == bits(ask(self.alone[name], name, messages))
            messages.append(
                {"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]}
            )
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
        "--models-patience",
        "0",
        "--models-max",
        "2",
        "--metrics",
    ]
    flags += ["--cache-ram", "1", "--kv-cache-dir", str(tmp_path), "--kv-cache-min-tokens", "100"]
    order = random.Random(7)
    server = start("", *flags)
    talks = Talks(alone, embedding(server))
    for number in range(36):
        talks.go_on(server, order.choice(NAMES), order.randrange(3))
        if number == 8:
            loaded = next(name for name, state in states(server).items() if state == "loaded")
            assert post(server, "/models/unload", {"model": loaded}).json() == {"success": True}
        elif number == 16:
            away = next(name for name, state in states(server).items() if state == "unloaded")
            assert post(server, "/models/load", {"model": away}).json() == {"success": True}
            server.kill()
            server = start("", *flags)
        elif number == 26:
            assert server.stop() == 0
            server = start("", *flags)
    assert talks.max_bytes > 2**19, "the budget was in use"
    text = httpx.get(f"{server.url}/metrics").text
    assert (
        sum(
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("pyctl_cache_evict")
        )
        > 0
    )
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
        failed = post(server, "/v1/chat/completions", {"model": name, "messages": [user(0)]})
        message = failed.json()["error"]["message"]
        assert failed.status_code == 500, message
        assert f"{name}.gguf" in message
        until(lambda: states(server)["dense"] == "loaded")
        assert states(server)[name] == "unloaded"
        ask(server, "dense", [user(0)])
    body = httpx.get(f"{server.url}/models").json()["data"]
    assert all(model["status"]["failed"] for model in body if model["id"] in files)
    files["gone"].write_bytes(whole)
    assert post(server, "/models/load", {"model": "gone"}).json() == {"success": True}
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
        "--models-patience",
        "0",
        "--models-max",
        "1",
    ]
    flags += ["--kv-cache-dir", str(tmp_path), "--disk-prefix-cache", "spill"]
    server = start("", *flags, before=FULL)
    talks = {name: [user(name, 1200)] for name in ("hybrid", "dense")}
    for name, talk in talks.items():
        ask(server, name, talk)
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(ask, server, "hybrid", [user(0)])
        until(lambda: "out of memory" in server.log())
        if is_asked:
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 1, server.log()
        assert lost.exception() is not None
    assert "signal" not in server.log()
    server = start("", *flags)
    for name, talk in talks.items():
        assert source_of(ask(server, name, talk)) == "disk"
    assert server.stop() == 0

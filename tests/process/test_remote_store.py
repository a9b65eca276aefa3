"""Two servers on one object store: each restores the snapshots of the other, whatever the store
does.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process.conftest import Server, disk_cache, free_port, pyctl
from tests.process.faulty_proxy import Answer, FaultyProxy, faulty_proxy
from tests.process.test_restart import SYSTEM, user
from tests.waiting import until

pytest.importorskip("obstore")

Start = Callable[..., Server]

SECRET = "very-secret-key"

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "visible",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
}

TEXTS = [
    [SYSTEM, user(name, n=900)] for name in ("store", "gate", "river", "stone", "bird", "cloud")
]

SETTINGS = """
import time
from functools import partial
from pyctl.disk import remote_store
from pyctl.llama.llama_backend import LlamaBackend
limits = remote_store.StoreLimits(patience={patience})
remote_store.RemoteStore = partial(remote_store.RemoteStore, limits=limits)
remote_store.LOOK_SECONDS = 0.1
remote_store.MAX_FAILURES = {failures}
remote_store.CLIENT["client_options"] |= {{"connect_timeout": "60s", "read_timeout": "600s"}}
evaluate = LlamaBackend.evaluate
def slowly(*args, **options):
    time.sleep(0.1)
    return evaluate(*args, **options)
LlamaBackend.evaluate = slowly
"""
"""Evaluating takes longer than fetching, whatever the machine; a read that is waited for would
outlast the test.
"""

PATIENT = SETTINGS.format(patience=60.0, failures=3)
TOLERANT = SETTINGS.format(patience=60.0, failures=100)

IMPATIENT = SETTINGS.format(patience=3.0, failures=3)


def is_made(url: str) -> bool:
    try:
        return httpx.put(f"{url}/snapshots").status_code in (200, 409)
    except httpx.HTTPError:
        return False


def flags(directory: Path, url: str = "s3://snapshots/team") -> list[str]:
    return ["--exact", *disk_cache(directory), "--kv-store", url]


def store_of(server: Server) -> dict[str, Any]:
    found = server.client.get_json("/cache")["disk"]["store"]
    assert isinstance(found, dict)
    return found


def started(start: Start, directory: Path, *url: str, before: str = PATIENT) -> Server:
    """Return a started server that has found the contents of the store."""
    server = start("tiny-hybrid", *flags(directory, *url), before=before)
    until(lambda: store_of(server)["in_use"], every=0.1)
    return server


@dataclass
class Filled:
    """An S3 server that has what a server evaluated of TEXTS before it was killed, and the
    replies.
    """

    port: int
    process: subprocess.Popen[bytes]
    replies: list[str]


@pytest.fixture(scope="module")
def filled(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """Start an S3 server, have a server send the snapshots of TEXTS there, and kill that server."""
    directory = tmp_path_factory.mktemp("store")
    port = free_port()
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code], cwd=directory, stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}.items():
                patch.setenv(name, value)
            until(lambda: is_made(url), every=0.1)
            first = start("tiny-hybrid", *flags(directory / "kv"))
            replies = [first.chat(text).text for text in TEXTS]
            until(lambda: store_of(first)["sent"]["n"] >= len(TEXTS), every=0.1)
            first.kill()
        yield Filled(port, process, replies)
    finally:
        process.kill()
        process.wait(60)


@pytest.fixture
def proxy(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Yield a proxy in front of the store; servers that start now use it."""
    with faulty_proxy(filled.port) as proxy:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        yield proxy


def middle_flipped(answer: Answer) -> Answer:
    at = len(answer.body) // 2
    return replace(
        answer, body=answer.body[:at] + bytes([answer.body[at] ^ 1]) + answer.body[at + 1 :]
    )


FAULTS: list[Callable[[Answer], Answer]] = [
    middle_flipped,
    lambda answer: replace(
        answer, body=answer.body[: len(answer.body) // 2], promised=len(answer.body)
    ),
    lambda answer: replace(answer, status=403, body=b"<Error><Code>AccessDenied</Code></Error>"),
    lambda answer: Answer(
        answer.method, answer.path, 200, b"<html>a page of another server</html>"
    ),
]


def test_what_one_server_evaluated_another_restores_and_damage_is_a_miss(
    filled: Filled, proxy: FaultyProxy, start: Start, tmp_path: Path
) -> None:
    """After each fault the reply is that of a cold prompt, and the directory stays sound."""
    server = started(start, tmp_path / "b", before=TOLERANT)
    restored = server.chat(TEXTS[0])
    assert restored.text == filled.replies[0]
    assert restored.source == "disk"
    assert store_of(server)["fetched"]["n"] == 1
    assert server.chat(TEXTS[0], cache_prompt=False).text == filled.replies[0]
    for fault, text, reply in zip(FAULTS, TEXTS[1:], filled.replies[1:], strict=False):
        n_asked = len(proxy.asked)
        proxy.fault = lambda answer: fault(answer) if answer.path.endswith(".state") else answer  # noqa: B023
        assert server.chat(text).text == reply
        assert any(each.endswith(".state") for each in proxy.asked[n_asked:])
    assert store_of(server)["fetched"]["n"] == 1
    assert SECRET not in server.log()
    assert server.stop() == 0
    assert pyctl("cache", "verify", "--kv-cache-dir", str(tmp_path / "b")).returncode == 0


def resized(text: str) -> str:
    return re.sub(r"<Size>(\d+)</Size>", lambda found: f"<Size>{int(found[1]) // 2}</Size>", text)


def strange(text: str) -> str:
    """Return names that lead elsewhere, that no file has, and of snapshots that are not there."""
    names = (
        "../../etc/passwd",
        "x" * 900,
        "60-" + "0" * 32 + ".state",
        "0-60-" + "1" * 48 + ".rows",
    )
    (entry, *_) = re.findall("<Contents>.*?</Contents>", text, re.DOTALL)
    (key,) = re.findall("<Key>([^<]*)</Key>", entry)
    more = "".join(entry.replace(key, f"{key.rpartition('/')[0]}/{name}") for name in names)
    return text.replace("</ListBucketResult>", f"{more}</ListBucketResult>")


def garbage(text: str) -> str:
    return "<ListBucketResult><Contents>" + text[:40]


def endless(text: str) -> str:
    """There is always one page more, and nothing on it."""
    empty = re.sub("<Contents>.*</Contents>", "", text, flags=re.DOTALL)
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>"
    return re.sub("<IsTruncated>.*</IsTruncated>", more, empty)


def falsify_listing(lie: Callable[[str], str], answer: Answer) -> Answer:
    if "list-type" not in answer.path:
        return answer
    return replace(answer, body=lie(answer.body.decode()).encode())


def has_listed(server: Server, proxy: FaultyProxy, n_asked: int) -> bool:
    """Ask ``server``, and return whether it listed the store's files after ``n_asked`` requests."""
    server.chat(TEXTS[0])
    return any("list-type" in path for path in proxy.asked[n_asked:])


def test_listings_that_lie(
    filled: Filled, proxy: FaultyProxy, start: Start, tmp_path: Path
) -> None:
    server = started(start, tmp_path / "b", before=TOLERANT)
    for lie, text, reply in zip(
        [resized, strange, garbage, endless], TEXTS, filled.replies, strict=False
    ):
        proxy.fault = partial(falsify_listing, lie)
        n_asked = len(proxy.asked)
        until(partial(has_listed, server, proxy, n_asked))
        assert server.chat(text).text == reply
    assert server.stop() == 0


def held(answer: Answer) -> Answer:
    return replace(answer, is_held=answer.method == "GET" and answer.path.endswith(".rows"))


def test_a_stalled_store_delays_its_request_alone(
    filled: Filled, proxy: FaultyProxy, start: Start, tmp_path: Path
) -> None:
    """A fetch that sends nothing is given up, and its prompt evaluated; other requests and the end
    of the server do not wait for the store.
    """
    server = started(start, tmp_path / "b", before=IMPATIENT)
    proxy.fault = held
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.chat, TEXTS[0])
        assert proxy.held.wait(120)
        assert server.chat([user("other", n=20)]).source == "none"
        evaluated = waiting.result(120)
    assert evaluated.text == filled.replies[0]
    assert evaluated.source == "none"
    assert not proxy.gate.is_set()
    assert server.stop() == 0, "without a wait for the read"


def test_a_server_that_is_killed_in_the_middle_of_a_fetch(
    filled: Filled, proxy: FaultyProxy, start: Start, tmp_path: Path
) -> None:
    """The next server removes the unfinished file, and fetches the snapshot again."""
    server = started(start, tmp_path / "b")
    proxy.fault = held
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(server.chat, TEXTS[0])
        assert proxy.held.wait(120)
        server.kill()
        assert isinstance(lost.exception(120), httpx.HTTPError)
    proxy.gate.set()
    proxy.fault = lambda answer: answer
    again = started(start, tmp_path / "b")
    until(lambda: not list((tmp_path / "b").rglob("*.tmp")), every=0.1)
    restored = again.chat(TEXTS[0])
    assert restored.text == filled.replies[0]
    assert restored.source == "disk"
    assert again.stop() == 0
    assert pyctl("cache", "verify", "--kv-cache-dir", str(tmp_path / "b")).returncode == 0

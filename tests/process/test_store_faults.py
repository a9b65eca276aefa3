"""A store that fails, lies or hangs over HTTP: every reply is that of a server without a store."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process.conftest import Server, pyctl
from tests.process.faulty_proxy import Answer, Asked, FaultyProxy, faulty_proxy
from tests.process.test_restart import SYSTEM, user
from tests.process.test_store_behind import ENVIRONMENT, SECRET, ask, flags, is_made, moto, store_of
from tests.waiting import until

pytest.importorskip("obstore")

Start = Callable[..., Server]

Fault = Callable[[Asked, Answer], Answer]

TEXTS = [[SYSTEM, user(name, 900)] for name in ("store", "gate")]

SLOWLY = """
import time
from pyctl.llama.llama_backend import LlamaBackend
evaluate = LlamaBackend.evaluate
def slowly(*args, **options):
    time.sleep(0.1)
    return evaluate(*args, **options)
LlamaBackend.evaluate = slowly
"""
"""Evaluating takes longer than fetching, whatever the machine."""

PATIENTLY = f"""{SLOWLY}
from pyctl.cache.disk import behind
behind.CLIENT |= {{"read_timeout": "600s", "timeout": "600s"}}
"""
"""A held body does not time out while a busy machine evaluates."""


@dataclass
class Filled:
    """A store that has what a server evaluated of TEXTS, the ``replies`` of one without a store, and its process."""

    port: int
    process: subprocess.Popen[bytes]
    replies: list[str]


@pytest.fixture(scope="module")
def start_filled(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Filled]]:
    """start_filled() -> a new store each time."""
    processes: list[subprocess.Popen[bytes]] = []
    plain = start("tiny-hybrid", "--exact")
    replies = [ask(plain, messages=text)[0] for text in TEXTS]
    plain.stop()

    def get() -> Filled:
        directory = tmp_path_factory.mktemp("store")
        command, port = moto(directory)
        with (directory / "log").open("wb") as log:
            processes.append(subprocess.Popen(command, cwd=directory, stdout=log, stderr=log))
        url = f"http://127.0.0.1:{port}"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}.items():
                patch.setenv(name, value)
            until(lambda: is_made(url), every=0.1)
            first = start("tiny-hybrid", *flags(directory / "kv"))
            assert [ask(first, messages=text)[0] for text in TEXTS] == replies
            assert httpx.get(f"{first.url}/cache").json()["disk"]["policy"] == "full"
            until(lambda: store_of(first)["sent"]["n"] >= len(TEXTS), every=0.1)
            assert first.stop() == 0
        return Filled(port, processes[-1], replies)

    yield get
    for process in processes:
        process.kill()
        process.wait(60)


@pytest.fixture(scope="module")
def filled(start_filled: Callable[[], Filled]) -> Filled:
    return start_filled()


@pytest.fixture
def proxy(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """In front of the store; servers that start now use it."""
    with faulty_proxy(filled.port) as proxy:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        yield proxy


def started(start: Start, directory: Path, *, before: str = SLOWLY) -> Server:
    """A server with an empty directory that knows what the store has."""
    server = start("tiny-hybrid", *flags(directory), before=before)
    until(lambda: store_of(server)["in_use"], every=0.1)
    return server


def is_rows(asked: Asked) -> bool:
    return asked.method == "GET" and asked.path.endswith(".rows")


def is_listing(asked: Asked) -> bool:
    return asked.method == "GET" and "list-type" in asked.query


def middle_flipped(asked: Asked, answer: Answer) -> Answer:
    at = len(answer.body) // 2
    return replace(answer, body=answer.body[:at] + bytes([answer.body[at] ^ 1]) + answer.body[at + 1 :])


def cut_connection(asked: Asked, answer: Answer) -> Answer:
    return replace(answer, body=answer.body[: len(answer.body) // 2], promised=len(answer.body))


def shorter(asked: Asked, answer: Answer) -> Answer:
    return replace(answer, body=answer.body[:-9])


def longer(asked: Asked, answer: Answer) -> Answer:
    return replace(answer, body=answer.body + b"more")


def refused(asked: Asked, answer: Answer) -> Answer:
    return Answer(403, b"<Error><Code>AccessDenied</Code></Error>")


def moved(asked: Asked, answer: Answer) -> Answer:
    return Answer(200, b"<html>a page of another server</html>")


BODIES = (middle_flipped, cut_connection, shorter, longer, refused, moved)


@pytest.mark.parametrize("change", BODIES, ids=lambda change: str(change.__name__))
def test_objects_that_are_damaged_on_their_way(
    change: Fault, filled: Filled, proxy: FaultyProxy, start: Start, tmp_path: Path
) -> None:
    server = started(start, tmp_path / "b")
    proxy.fault = lambda asked, answer: change(asked, answer) if is_rows(asked) else answer
    assert ask(server, messages=TEXTS[0]) == (filled.replies[0], "none", 0)
    assert proxy.n_asked("GET", ".rows")
    proxy.fault = lambda asked, answer: answer
    assert ask(server, messages=TEXTS[0], cache_prompt=False)[0] == filled.replies[0]
    assert ask(server, messages=TEXTS[1])[0] == filled.replies[1]
    assert 1 <= server.log().count("kv store: ") <= 8
    assert SECRET not in server.log()
    assert server.stop() == 0


def test_another_prefixs_object(filled: Filled, proxy: FaultyProxy, start: Start, tmp_path: Path) -> None:
    """The objects of both conversations in each other's place, with sizes to match."""
    server = started(start, tmp_path / "b")
    paths = sorted({each for each in listed(proxy) if each.endswith(".rows")})
    assert len(paths) >= 2
    other = dict(zip(paths, [*paths[1:], paths[0]], strict=True))

    def swapped(asked: Asked, answer: Answer) -> Answer:
        if not is_rows(asked):
            return answer
        whole = proxy.fetch("GET", other[asked.path]).body
        return replace(answer, body=(whole + bytes(len(answer.body)))[: len(answer.body)])

    proxy.fault = swapped
    for text, wanted in zip(TEXTS, filled.replies, strict=True):
        assert ask(server, messages=text)[0] == wanted
    assert store_of(server)["fetched"]["n"] == 0
    assert server.stop() == 0


def listed(proxy: FaultyProxy) -> list[str]:
    """The paths of all objects."""
    body = proxy.fetch("GET", "/snapshots?list-type=2").body.decode()
    return [f"/snapshots/{key}" for key in re.findall("<Key>([^<]*)</Key>", body)]


def larger(text: str) -> str:
    return re.sub(r"<Size>(\d+)</Size>", lambda found: f"<Size>{int(found[1]) + 7}</Size>", text)


def smaller(text: str) -> str:
    return re.sub(r"<Size>(\d+)</Size>", lambda found: f"<Size>{int(found[1]) // 2}</Size>", text)


def strange(text: str) -> str:
    """Names that lead elsewhere, that no file has, and of snapshots that are not there."""
    names = ("../../etc/passwd", "x" * 900, "60-" + "0" * 32 + ".state", "0-60-" + "1" * 48 + ".rows", "hints")
    (entry, *_) = re.findall("<Contents>.*?</Contents>", text, re.DOTALL) or [""]
    (key, *_) = re.findall("<Key>([^<]*)</Key>", entry) or [""]
    more = "".join(entry.replace(key, f"{key.rpartition('/')[0]}/{name}") for name in names)
    return text.replace("</ListBucketResult>", f"{more}</ListBucketResult>")


def garbage(text: str) -> str:
    return "<ListBucketResult><Contents>" + text[:40]


def empty(text: str) -> str:
    return re.sub("<Contents>.*</Contents>", "", text, flags=re.DOTALL)


def endless(text: str) -> str:
    """There is always one page more, and nothing on it."""
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>"
    return re.sub("<IsTruncated>.*</IsTruncated>", more, empty(text))


@pytest.mark.parametrize("lie", [larger, smaller, strange, garbage, empty, endless], ids=lambda lie: str(lie.__name__))
def test_listings_that_lie(
    lie: Callable[[str], str], filled: Filled, proxy: FaultyProxy, start: Start, tmp_path: Path
) -> None:
    def lying(asked: Asked, answer: Answer) -> Answer:
        return replace(answer, body=lie(answer.body.decode()).encode()) if is_listing(asked) else answer

    proxy.fault = lying
    server = start("tiny-hybrid", *flags(tmp_path / "b"), before=SLOWLY)
    until(lambda: any(map(is_listing, proxy.asked)), every=0.05)
    for text, wanted in zip(TEXTS, filled.replies, strict=True):
        assert ask(server, messages=text)[0] == wanted
        assert ask(server, messages=text, cache_prompt=False)[0] == wanted
    assert server.stop() == 0


def test_a_storm_of_errors_and_what_comes_after_it(
    filled: Filled, proxy: FaultyProxy, start: Start, tmp_path: Path
) -> None:
    def storm(asked: Asked, answer: Answer) -> Answer:
        return Answer(503, b"<Error><Code>SlowDown</Code></Error>")

    proxy.fault = storm
    server = start("tiny-hybrid", *flags(tmp_path / "b"), before=SLOWLY)
    until(lambda: store_of(server)["is_away"], every=0.1)
    assert ask(server, messages=TEXTS[0]) == (filled.replies[0], "none", 0)
    assert server.log().count("kv store: cannot") == 1
    proxy.fault = lambda asked, answer: answer
    until(lambda: store_of(server)["in_use"] and not store_of(server)["is_away"], every=0.1)
    text, source, _ = ask(server, messages=TEXTS[1])
    assert (text, source) == (filled.replies[1], "disk")
    proxy.fault = storm
    assert ask(server, messages=TEXTS[1], cache_prompt=False)[0] == filled.replies[1]
    assert server.stop() == 0


def held(asked: Asked, answer: Answer) -> Answer:
    return replace(answer, held_from=len(answer.body) // 2) if is_rows(asked) else answer


def test_a_body_that_does_not_come_is_not_waited_for(
    filled: Filled, proxy: FaultyProxy, start: Start, tmp_path: Path
) -> None:
    """The reply comes while the body is held, and so does the end of the server."""
    server = started(start, tmp_path / "b", before=PATIENTLY)
    proxy.fault = held
    assert ask(server, messages=TEXTS[0]) == (filled.replies[0], "none", 0)
    assert proxy.held.is_set()
    proxy.gate.set()
    until(lambda: not proxy.waiting)
    proxy.gate.clear()
    proxy.held.clear()
    assert ask(server, messages=TEXTS[1])[0] == filled.replies[1]
    assert proxy.held.is_set()
    assert server.stop() == 0


def asked_meanwhile(pool: ThreadPoolExecutor, server: Server) -> Any:
    """A request whose reply may be lost with its server."""

    def go() -> str | None:
        try:
            return ask(server, messages=TEXTS[0])[0]
        except httpx.HTTPError:
            return None

    return pool.submit(go)


def verified(directory: Path) -> str:
    """The output of the command about a directory without damage."""
    done = pyctl("cache", "verify", "--kv-cache-dir", str(directory))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_server_that_is_killed_in_the_middle_of_a_fetch(
    filled: Filled, proxy: FaultyProxy, start: Start, tmp_path: Path
) -> None:
    server = started(start, tmp_path / "b")
    proxy.fault = held
    with ThreadPoolExecutor(1) as pool:
        reply = asked_meanwhile(pool, server)
        assert proxy.held.wait(120)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(60)
        assert reply.result(120) in (None, filled.replies[0])
    proxy.gate.set()
    proxy.fault = lambda asked, answer: answer
    again = started(start, tmp_path / "b")
    until(lambda: not list((tmp_path / "b").rglob("*.tmp")), every=0.1)
    text, source, _ = ask(again, messages=TEXTS[0])
    assert (text, source) == (filled.replies[0], "disk")
    assert again.stop() == 0
    verified(tmp_path / "b")


def test_a_store_that_is_killed_in_the_middle_of_a_fetch(
    start_filled: Callable[[], Filled], start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = start_filled()
    with faulty_proxy(own.port) as proxy:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        server = started(start, tmp_path / "b")
        proxy.fault = held
        with ThreadPoolExecutor(1) as pool:
            reply = asked_meanwhile(pool, server)
            assert proxy.held.wait(120)
            own.process.kill()
            own.process.wait(60)
            proxy.is_cut = True
            proxy.gate.set()
            assert reply.result(120) == own.replies[0]
        assert ask(server, messages=TEXTS[1])[0] == own.replies[1]
        until(lambda: store_of(server)["is_away"], every=0.1)
        assert server.stop() == 0
        verified(tmp_path / "b")
        again = start("tiny-hybrid", *flags(tmp_path / "b"))
        text, source, _ = ask(again, messages=TEXTS[0])
        assert (text, source) == (own.replies[0], "disk"), "what was evaluated meanwhile"
        assert again.stop() == 0

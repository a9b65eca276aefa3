"""The recipes of docs/several-servers.md: two servers behind a real HAProxy and a real
sglang-router.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import httpx
import pytest

from tests.client import CHAT, Client, ServerClient
from tests.process.conftest import Server, free_port
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/several-servers.md").read_text(encoding="utf-8")
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
KEY = "secret"
ADMIN = {"authorization": f"Bearer {KEY}"}

ENDLESS = "--spec-type", "none"
"""Each token of a reply is a step."""

GATE = """
import os
import time
from pyctl.llama.llama_backend import LlamaBackend
decode, steps = LlamaBackend.decode, []
def gated(*args, **options):
    steps.append(1)
    while len(steps) > 20 and not os.path.exists({path!r}):
        open({path!r} + str(os.getpid()), "w").close()
        time.sleep(0.01)
    return decode(*args, **options)
LlamaBackend.decode = gated
"""
"""Code by which a server waits for a file from the 21st token on, and writes another file to report
it: its engine answers nothing then.
"""


def command_on_the_page(pattern: str) -> str:
    """Return the only text of docs/several-servers.md that matches."""
    (found,) = re.findall(pattern, PAGE)
    return str(found)


@dataclass
class Router:
    """A program before two servers."""

    program: ClassVar[str]
    servers: list[Server]
    directory: Path
    url: str = ""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Another process may take the port that was free a moment ago: then the program ends, and
        gets another.
        """
        while True:
            self.url = f"http://127.0.0.1:{free_port()}"
            with (self.directory / "log").open("wb") as log:
                variables = {**os.environ, "PATH": PROGRAMS, **self.variables()}
                process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=variables)
            self.process = process
            until(self.has_begun, every=0.1)
            if process.poll() is None:
                return
            text = (self.directory / "log").read_text(encoding="utf-8")
            assert "in use" in text, text

    def has_begun(self) -> bool:
        """Return whether the router has ended or is ready."""
        if self.process is not None and self.process.poll() is not None:
            return True
        with suppress(httpx.HTTPError):
            return self.is_ready()
        return False

    def waits(self, server: Server) -> bool:
        """Return whether ``server`` waits in the middle of a reply."""
        return (self.directory / f"open{server.process.pid}").exists()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)

    def command(self) -> list[str]:
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        raise NotImplementedError

    def take_out(self, server: Server) -> None:
        raise NotImplementedError

    def ask(self, messages: list[dict[str, Any]], path: str = CHAT, **more: Any) -> httpx.Response:
        body = {"messages": messages, "max_tokens": 4, "temperature": 0, **more}
        return self.client.post(path, body)

    @property
    def client(self) -> ServerClient:
        """A client of the router."""
        return Client.to_server(self.url)


class HAProxy(Router):
    """HAProxy with deploy/haproxy.cfg."""

    program = "haproxy"

    replaced = ""
    """Lines of the page that stand for the last three of the file."""

    def command(self) -> list[str]:
        lines = (ROOT / "deploy/haproxy.cfg").read_text(encoding="utf-8").splitlines()
        if self.replaced:
            assert all(
                line.split()[0] in ("balance", "stick-table", "stick") for line in lines[-3:]
            )
            lines[-3:] = self.replaced.splitlines()
        path = self.directory / "haproxy.cfg"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return ["haproxy", "-db", "-f", str(path)]

    def variables(self) -> dict[str, str]:
        a, b = (server.url.removeprefix("http://") for server in self.servers)
        address = self.url.removeprefix("http://")
        return {
            "LISTEN": address,
            "SERVER_A": a,
            "SERVER_B": b,
            "ADMIN": str(self.directory / "admin"),
        }

    def is_ready(self) -> bool:
        return self.client.get("/health").status_code == 200

    def take_out(self, server: Server) -> None:
        command = command_on_the_page(r'echo "(set server servers/a state \w+)"')
        name = "ab"[self.servers.index(server)]
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(self.directory / "admin"))
            admin.sendall(command.replace("/a ", f"/{name} ").encode() + b"\n")
            assert admin.recv(1000) == b"\n"


class HashingHAProxy(HAProxy):
    """HAProxy with the page's other way to choose a server."""

    replaced = command_on_the_page(r"```haproxy\n((?:.*\n)+?)```")


class SglangRouter(Router):
    """The router of deploy/sglang-router.sh."""

    program = "sglang-router"

    def command(self) -> list[str]:
        return ["sh", str(ROOT / "deploy/sglang-router.sh")]

    def variables(self) -> dict[str, str]:
        port = self.url.rpartition(":")[2]
        metrics = str(free_port())
        servers = " ".join(server.url for server in self.servers)
        return {"SERVERS": servers, "PORT": port, "METRICS_PORT": metrics, "ADMIN_KEY": KEY}

    def workers(self) -> dict[str, str]:
        """Return address and id of those that are well."""
        found = self.client.get_json("/workers", headers=ADMIN)["workers"]
        return {worker["url"]: worker["id"] for worker in found if worker["is_healthy"]}

    def is_ready(self) -> bool:
        return len(self.workers()) == 2

    def take_out(self, server: Server) -> None:
        path = command_on_the_page(r"curl -X DELETE .* http://127.0.0.1:8080(/workers/)ID")
        removed = self.client.delete(path + self.workers()[server.url], headers=ADMIN)
        assert removed.status_code == 202
        until(lambda: server.url not in self.workers(), every=0.05)


KINDS = pytest.mark.parametrize("kind", [HAProxy, HashingHAProxy, SglangRouter])
Begin: TypeAlias = Callable[..., Router]


@pytest.fixture
def begin(start: Callable[..., Server], tmp_path: Path) -> Iterator[Begin]:
    """begin(kind, servers) -> a router before these, or before two of its own that wait for
    ``tmp_path / "open"``.
    """
    begun: list[Router] = []
    own: list[Server] = []

    def run(kind: type[Router], servers: Sequence[Server] = ()) -> Router:
        if shutil.which(kind.program, path=PROGRAMS) is None:
            pytest.skip(f"{kind.program} is not installed")
        before = GATE.format(path=str(tmp_path / "open"))
        own.extend(start("", *ENDLESS, before=before) for _ in range(0 if servers else 2))
        router = kind([*servers, *own], tmp_path)
        begun.append(router)
        router.start()
        return router

    yield run
    for each in (*begun, *own):
        each.stop()


@pytest.fixture(scope="module")
def pair(start: Callable[..., Server]) -> list[Server]:
    """Return two servers that every test leaves running."""
    return [start(""), start("")]


def conversation(name: str) -> list[dict[str, Any]]:
    texts = {"system": "You write short answers.", "user": f"This is about {name}. " * 30}
    return [{"role": role, "content": text} for role, text in texts.items()]


def has(server: Server, messages: list[dict[str, Any]]) -> bool:
    """Return whether the cache of a server has the conversation, by the texts of its snapshots."""
    return messages[1]["content"].partition(".")[0] in server.client.get("/cache").text


def owner_of(router: Router, messages: list[dict[str, Any]]) -> Server:
    """Return the server that has the conversation."""
    return next(server for server in router.servers if has(server, messages))


@dataclass
class Stream:
    """A streamed reply of 100 tokens, read by a thread."""

    router: Router
    messages: list[dict[str, Any]]
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        body = {
            "messages": self.messages,
            "max_tokens": 100,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        with httpx.stream("POST", self.router.url + CHAT, json=body) as response:
            for line in response.iter_lines():
                self.lines.append(line)

    def n_pieces(self) -> int:
        return sum('"content":"' in line for line in self.lines)


@KINDS
def test_a_second_turn_goes_where_the_first_one_was(
    begin: Begin, pair: list[Server], kind: type[Router]
) -> None:
    """The router sends a conversation back to the server that holds it; elsewhere the prompt would
    be evaluated again.
    """
    router = begin(kind, pair)
    names = [f"{thing} and {kind.__name__}" for thing in ("stones", "rivers", "birds")]
    for name in names:
        messages = conversation(name)
        first = router.ask(messages)
        assert first.status_code == 200, first.text
        n_first = first.json()["usage"]["prompt_tokens"]
        messages += [
            first.json()["choices"][0]["message"],
            {"role": "user", "content": "And then? " * 10},
        ]
        timings = router.ask(messages).json()["timings"]
        assert timings["cache_n"] > 0.8 * n_first, name
    owners = [[has(server, conversation(name)) for server in router.servers] for name in names]
    assert [sum(each) for each in owners] == [1, 1, 1]


@KINDS
def test_a_stream_passes_and_ends_though_its_server_is_taken_out(
    begin: Begin, kind: type[Router]
) -> None:
    """The page's command takes a server out of use without breaking its streams; new requests go to
    the other server meanwhile.
    """
    router = begin(kind)
    messages = conversation("clouds")
    stream = Stream(router, messages)
    try:
        until(lambda: stream.n_pieces() > 5)
        until(lambda: any(map(router.waits, router.servers)))
        running, other = sorted(router.servers, key=router.waits, reverse=True)
        router.take_out(running)
        assert router.ask(messages).status_code == 200
        assert has(other, messages)
        assert "data: [DONE]" not in stream.lines
    finally:
        (router.directory / "open").touch()
        stream.thread.join(60)
    assert stream.lines[-2:] == ["data: [DONE]", ""]
    assert stream.n_pieces() > 90
    assert '"finish_reason":"length"' in "".join(stream.lines)
    assert running.stop() == 0
    assert router.ask(messages).json()["timings"]["cache_n"] > 100


@KINDS
def test_when_a_server_is_killed_the_other_answers(begin: Begin, kind: type[Router]) -> None:
    router = begin(kind)
    messages = conversation("snow")
    assert router.ask(messages).status_code == 200
    killed = owner_of(router, messages)
    killed.kill()
    again = router.ask(messages)
    assert again.status_code == 200, again.text
    assert again.json()["timings"]["cache_n"] < 100
    assert router.ask(messages).json()["timings"]["cache_n"] > 100


@KINDS
def test_what_passes_is_what_the_page_says(
    begin: Begin, pair: list[Server], kind: type[Router]
) -> None:
    """Paths, fields and errors pass through each router as docs/several-servers.md states,
    whose table this keeps true.
    """
    router = begin(kind, pair)
    messages = conversation(f"apples and {kind.__name__}")
    anthropic = router.ask(messages[1:], "/v1/messages")
    unsupported = router.client.post("/v1/embeddings", {"model": "m", "input": "apples"})
    wrong = router.ask(messages, temperature="hot")
    assert unsupported.status_code == 501
    assert wrong.status_code == 400
    router.ask(messages)
    uncached = router.ask(messages, cache_prompt=False).json()["timings"]["cache_n"]
    if isinstance(router, SglangRouter):
        assert anthropic.status_code == 404
        assert router.client.get("/workers").status_code == 401
        assert uncached > 100, "this field does not pass"
        assert wrong.json()["error"]["code"] == "json_parse_error"
    else:
        assert anthropic.status_code == 200
        assert uncached == 0
        body = {"messages": messages, "temperature": "hot"}
        assert wrong.json() == pair[0].client.post(CHAT, body).json()


@pytest.mark.parametrize("kind", [HAProxy, HashingHAProxy])
def test_a_header_names_a_conversation(
    begin: Begin, pair: list[Server], kind: type[Router]
) -> None:
    router = begin(kind, pair)
    names = re.findall(
        r"req\.hdr\((\S+)\)", (ROOT / "deploy/haproxy.cfg").read_text(encoding="utf-8")
    )
    assert len(names) == 6
    for name in names:
        found = set()
        for text in ("one", "two", "three", "four"):
            body = {"messages": conversation(text), "max_tokens": 1}
            response = router.client.post(CHAT, body, headers={name: "x"})
            found.add(response.headers["x-server"])
        assert len(found) == 1, name

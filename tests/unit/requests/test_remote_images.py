"""Images at addresses: the requests that are made, and those that are refused."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from pyctl.errors import RequestError
from pyctl.requests.remote_images import FetchRules, fetch_image, is_public
from tests.pictures import image_bytes
from tests.web_server import Handler, web_server

PNG = image_bytes()
Answer = Callable[[Handler], None]


class Site:
    """A web server on this machine, which for these tests is the public network."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.answers: dict[str, Answer] = {}
        site = self

        class Answering(Handler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                site.seen.append((self.path, dict(self.headers)))
                site.answers[self.path](self)
                self.close_connection = True

        self.url = ""
        self.handler = Answering
        self.rules = FetchRules(lambda address: str(address) == "127.0.0.1", max_seconds=60.0)


def answer(body: bytes = PNG, status: int = 200, **headers: str) -> Answer:
    return lambda handler: handler.send(status, body, **headers)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with web_server(site.handler) as site.url:
        yield site


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.1.2.3",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "240.0.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a00:1",
        "64:ff9b:1::a00:1",
        "2002:7f00:1::",
        "2001:db8::1",
        "::7f00:1",
        "2001::1",
        "fec0::1",
        "5f00::1",
    ],
)
def test_addresses_of_this_network(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101"]
)
def test_public_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_an_image_is_fetched(site: Site) -> None:
    site.answers["/a.png?x=1"] = answer()
    assert fetch_image(f"{site.url}/a.png?x=1", site.rules) == PNG
    ((path, headers),) = site.seen
    assert path == "/a.png?x=1"
    assert headers["Host"] == site.url.removeprefix("http://")
    assert not {"Cookie", "Authorization", "Referer"} & headers.keys()


def test_nobody_reaches_this_machine_or_its_network() -> None:
    site = Site()
    with web_server(site.handler) as url:
        port = url.rpartition(":")[2]
        names = ("127.0.0.1", "localhost", "[::1]", "127.1", "2130706433", "0x7f000001", "0")
        for name in names:
            with pytest.raises(RequestError, match=r"not in the public network|cannot be fetched"):
                fetch_image(f"http://{name}:{port}/a.png")
        assert not site.seen


def test_a_name_for_two_networks_is_refused(site: Site) -> None:
    def found(*_: Any, **__: Any) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))
            for address in ("127.0.0.1", "10.0.0.1")
        ]

    rules = replace(site.rules, resolve=found)
    with pytest.raises(RequestError, match="not in the public network"):
        fetch_image("http://two.example/a.png", rules)


def test_the_address_that_was_looked_at_is_the_one_that_is_asked(site: Site) -> None:
    """A name that stands for another address a moment later (DNS rebinding) leads nowhere else."""
    looked: list[str] = []
    before = socket.getaddrinfo

    def resolve(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        looked.append(str(host))
        if host == "name.example":
            return before(
                "127.0.0.1" if looked.count(host) == 1 else "10.0.0.1", port, *args, **kwargs
            )
        return before(host, port, *args, **kwargs)

    site.answers["/"] = answer()
    port = site.url.rpartition(":")[2]
    rules = replace(site.rules, resolve=resolve)
    assert fetch_image(f"http://name.example:{port}/", rules) == PNG
    assert looked.count("name.example") == 1
    assert site.seen[0][1]["Host"] == f"name.example:{port}"


def test_redirects_are_followed_a_few_times_and_looked_at_each_time(site: Site) -> None:
    for index, status in enumerate((301, 302, 307, 303)):
        site.answers[f"/{index}"] = answer(b"", status, Location=f"/{index + 1}")
    site.answers["/4"] = answer()
    assert fetch_image(f"{site.url}/1", site.rules) == PNG
    with pytest.raises(RequestError, match="redirects"):
        fetch_image(f"{site.url}/0", site.rules)
    for there, said in (
        ("http://10.0.0.1/x", "public network"),
        ("http://127.0.0.2/x", "public network"),
        ("file:///etc/passwd", "plain http"),
        ("ftp://host/", "plain http"),
        ("http://user:secret@127.0.0.1/", "plain http"),
    ):
        site.answers["/away"] = answer(b"", 302, Location=there)
        with pytest.raises(RequestError, match=said):
            fetch_image(f"{site.url}/away", site.rules)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///x",
        "https://user@host/x",
        "http://ho st/",
        "http://host/a b",
        "http://h\u00f6st/",
        "http://h/\r\nX: y",
        "http://host:99999/",
        "http://host:x/",
        "gopher://host/",
        "http://[::1/",
        "http://h/" + "x" * 9000,
    ],
    ids=lambda url: repr(url)[:30],
)
def test_what_is_no_plain_address(url: str) -> None:
    with pytest.raises(RequestError, match="plain http or https"):
        fetch_image(url)


def test_answers_that_are_no_image(site: Site) -> None:
    """An answer with an error, a content encoding, or more bytes than the limit is refused, also if
    it has no length and never ends. A client could otherwise fill the RAM through a URL.
    """
    site.answers["/none"] = answer(b"no", 404)
    site.answers["/packed"] = answer(Content_Encoding="gzip")
    with pytest.raises(RequestError, match="status 404"):
        fetch_image(f"{site.url}/none", site.rules)
    with pytest.raises(RequestError, match="without content encoding"):
        fetch_image(f"{site.url}/packed", site.rules)
    site.rules = replace(site.rules, max_bytes=1000)
    site.answers["/large"] = answer(bytes(2000))
    site.answers["/fits"] = answer(bytes(1000))
    with pytest.raises(RequestError, match="more than 1000 bytes"):
        fetch_image(f"{site.url}/large", site.rules)
    assert len(fetch_image(f"{site.url}/fits", site.rules)) == 1000

    def endless(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        with suppress(OSError):
            while True:
                handler.wfile.write(bytes(10_000))

    site.answers["/"] = endless
    with pytest.raises(RequestError, match="more than 1000 bytes"):
        fetch_image(f"{site.url}/", site.rules)


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        (b"", b""),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx", b"x"),
    ],
)
def test_a_server_that_takes_its_time(site: Site, begins: bytes, goes_on: bytes) -> None:
    """Nothing but the whole counts, however little comes at a time."""
    site.rules = replace(site.rules, max_seconds=0.3)
    done = threading.Event()

    def slow(handler: Handler) -> None:
        handler.wfile.write(begins)
        with suppress(OSError):
            while not done.wait(0.05):
                handler.wfile.write(goes_on)

    site.answers["/"] = slow
    with pytest.raises(RequestError, match="within"):
        fetch_image(f"{site.url}/", site.rules)
    done.set()


def test_nobody_at_home() -> None:
    with (
        socket.socket() as taken
    ):  # bound but not listening, so that no other process takes the port
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        with pytest.raises(RequestError, match="cannot fetch the image"):
            fetch_image(address, FetchRules(lambda _: True))


def test_lines_that_are_no_http(site: Site) -> None:
    site.answers["/"] = lambda handler: handler.wfile.write(b"220 mail.example ESMTP\r\n") and None
    with pytest.raises(RequestError, match="cannot fetch the image"):
        fetch_image(f"{site.url}/", site.rules)

"""Models by address, from a faulty server on this machine."""

from __future__ import annotations

import gzip
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from pyctl.errors import ConfigError
from pyctl.model_files import download as module
from pyctl.model_files.download import MIB, SPARE_BYTES, DownloadLog, download, fetch_url
from tests import web_server

MODEL = b"GGUF" + os.urandom(100_000)
OTHER = b"GGUF" + os.urandom(90_000)
PAGE = b"<!DOCTYPE html><title>Please log in</title>"

Answer = Callable[["Handler", int], None]


class Handler(web_server.Handler):
    """Answers request number n with ``answers[n]``, the last one for ever; ``seen`` are the
    requests' headers.
    """

    protocol_version = "HTTP/1.1"
    answers: list[Answer]
    seen: list[dict[str, str]]
    paths: list[str]

    def do_GET(self) -> None:
        n = len(Handler.seen)
        Handler.seen.append({name.lower(): value for name, value in self.headers.items()})
        Handler.paths.append(self.path)
        Handler.answers[min(n, len(Handler.answers) - 1)](self, n)


def whole(body: bytes = MODEL, tag: str = '"1"', stop: int | None = None) -> Answer:
    """Return an answer like a good server's, ranges included; it breaks off before byte ``stop`` of
    the file.
    """

    def answer(handler: Handler, _: int) -> None:
        asked = handler.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if asked and handler.headers.get("If-Range") == tag:
            span = f"bytes {start}-{len(body) - 1}/{len(body)}"
            return handler.send(
                206, body[start:stop], len(body) - start, ETag=tag, Content_Range=span
            )
        handler.send(200, body[:stop], len(body), ETag=tag)

    return answer


@pytest.fixture
def serve() -> Iterator[Callable[..., httpx.URL]]:
    """serve(answer, ...) -> the address of m.gguf on a server that gives them in turn."""
    Handler.seen = []
    Handler.paths = []
    with web_server.web_server(Handler) as url:

        def start(*answers: Answer) -> httpx.URL:
            Handler.answers = list(answers)
            return httpx.URL(f"{url}/x/m.gguf")

        yield start


def fetch(url: httpx.URL, target: Path, read_seconds: float = 20.0) -> None:
    download(url, target, read_seconds=read_seconds, pause_seconds=0.0)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_no_proxy_reaches_this_machine(
    serve: Callable[..., httpx.URL], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("all_proxy", address)
    fetch(serve(whole()), tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == MODEL


def refusal(url: httpx.URL, target: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        fetch(url, target)
    return str(caught.value)


def test_a_whole_file_and_nothing_else_is_kept(
    serve: Callable[..., httpx.URL], tmp_path: Path
) -> None:
    fetch(serve(whole()), tmp_path / "m.gguf")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"m.gguf": MODEL}
    assert Handler.seen[0]["accept-encoding"] == "identity"
    assert "range" not in Handler.seen[0]


GZIP = gzip.compress(MODEL)


def sends(status: int, body: bytes = PAGE, **headers: str) -> Answer:
    return lambda handler, _: handler.send(status, body, **headers)


def endless(handler: Handler, _: int) -> None:
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(MODEL[:1000])
    handler.close_connection = True


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (sends(200, PAGE, Content_Type="text/html"), "is not a GGUF file: it starts with b'<!DO'"),
        (
            sends(200, GZIP, Content_Encoding="gzip"),
            r"is not a GGUF file: it starts with b'\x1f\x8b",
        ),
        (sends(200, GZIP), r"is not a GGUF file: it starts with b'\x1f\x8b"),
        (sends(302, Location="/x/m.gguf"), "redirects"),
        (sends(302, Location="file:///etc/passwd"), "cannot fetch"),
        (endless, "sends no length of the file"),
        (sends(404), "answers with status 404"),
        (sends(401), "answers with status 401"),
        (sends(503), "answers with status 503"),
        (sends(200, b""), "is not a GGUF file: it starts with b''"),
        (sends(200, b"GG"), "is not a GGUF file: it starts with b'GG'"),
        (sends(206, MODEL, Content_Range=f"bytes 0-9/{len(MODEL)}"), "continued at another"),
        (whole(stop=1000, tag=""), "cannot fetch"),
    ],
)
def test_what_is_no_whole_model_is_not_kept(
    serve: Callable[..., httpx.URL], tmp_path: Path, answer: Answer, message: str
) -> None:
    assert message in refusal(serve(answer), tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())
    fetch(serve(whole()), tmp_path / "m.gguf")  # the server is right again
    assert (tmp_path / "m.gguf").read_bytes() == MODEL


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == module.__name__]


def test_without_a_terminal_the_log_has_the_start_and_no_bar(
    serve: Callable[..., httpx.URL],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    download(serve(whole()), tmp_path / "m.gguf")
    assert capsys.readouterr() == ("", "")
    assert lines_of(caplog) == ["downloading m.gguf: 0 MiB"]


def test_a_long_download_has_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 1000.0
    lines = DownloadLog("m.gguf", lambda: now)
    lines.reached(100 * MIB, 1000 * MIB)  # resumed
    for n in range(130, 1001, 10):
        now += 3.0
        lines.reached(n * MIB, 1000 * MIB)
    assert lines_of(caplog)[:2] == [
        "downloading m.gguf: 1,000 MiB, 100 of them are already stored",
        "downloading m.gguf: 320 of 1,000 MiB (32%), 3.7 MiB/s, 3 min 5 s to go",
    ]
    assert len(lines_of(caplog)) == 1 + int(88 * 3.0 / 60)
    DownloadLog("unknown.gguf", lambda: now).reached(0, None)
    assert lines_of(caplog)[-1] == "downloading unknown.gguf"


def test_what_broke_off_is_gone_on_with(serve: Callable[..., httpx.URL], tmp_path: Path) -> None:
    fetch(serve(whole(stop=30_000), sends(503), whole(stop=70_000), whole()), tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == MODEL
    starts = [int(seen.get("range", "bytes=0-")[6:-1]) for seen in Handler.seen]
    assert starts[0] == 0 < starts[1] == starts[2] < starts[3], starts
    assert [seen.get("if-range") for seen in Handler.seen] == [None, '"1"', '"1"', '"1"']


def test_a_later_start_goes_on_where_an_earlier_one_gave_up(
    serve: Callable[..., httpx.URL], tmp_path: Path
) -> None:
    assert "cannot fetch" in refusal(serve(whole(stop=50_000)), tmp_path / "m.gguf")
    assert len(Handler.seen) == module.MAX_TRIES
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf.part", "m.gguf.part.json"}
    fetch(serve(whole()), tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == MODEL
    assert Handler.seen[-1]["range"] == "bytes=50000-"
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf"}


def test_bytes_that_may_not_have_reached_the_disk_are_fetched_again(
    serve: Callable[..., httpx.URL], tmp_path: Path
) -> None:
    refusal(serve(whole(stop=50_000)), tmp_path / "m.gguf")
    with (tmp_path / "m.gguf.part").open("ab") as file:
        file.write(
            bytes(10_000)
        )  # a process that was killed had written these, and a power failure made them zeros
    fetch(serve(whole()), tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == MODEL


def with_other_range(handler: Handler, _: int) -> None:
    handler.send(
        206, OTHER[60_000:], ETag='"1"', Content_Range=f"bytes 60000-{len(OTHER) - 1}/{len(OTHER)}"
    )


def with_other_tag(handler: Handler, _: int) -> None:
    handler.send(
        206, OTHER[50_000:], ETag='"2"', Content_Range=f"bytes 50000-{len(OTHER) - 1}/{len(OTHER)}"
    )


@pytest.mark.parametrize("between", [None, with_other_range, with_other_tag, sends(416)])
def test_a_file_that_changed_is_fetched_anew(
    serve: Callable[..., httpx.URL], tmp_path: Path, between: Answer | None
) -> None:
    answers = [whole(stop=50_000), *([between] if between else []), whole(OTHER, '"2"')]
    fetch(serve(*answers), tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == OTHER


def test_without_a_word_whether_it_is_the_same_it_is_fetched_anew(
    serve: Callable[..., httpx.URL], tmp_path: Path
) -> None:
    fetch(serve(whole(stop=50_000, tag='W/"1"'), whole(tag='W/"1"')), tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == MODEL
    assert "range" not in Handler.seen[1]


def test_a_server_that_falls_silent_is_asked_again(
    serve: Callable[..., httpx.URL], tmp_path: Path
) -> None:
    """A connection without a byte for the limit is given up, and the next request begins at the
    first missing byte: a stalled download neither hangs nor starts again.
    """
    asked_again = threading.Event()

    def silent(handler: Handler, _: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(MODEL)))
        handler.send_header("ETag", '"1"')
        handler.end_headers()
        handler.wfile.write(MODEL[:40_000])
        handler.wfile.flush()
        asked_again.wait(60)
        handler.close_connection = True

    def answer(handler: Handler, n: int) -> None:
        asked_again.set()
        whole()(handler, n)

    # So long after its last byte the first connection is given up: enough for those that come to
    # get through.
    fetch(serve(silent, answer), tmp_path / "m.gguf", read_seconds=3.0)
    assert (tmp_path / "m.gguf").read_bytes() == MODEL
    assert Handler.seen[1]["range"] == "bytes=40000-"


def test_a_file_without_a_length_may_come_in_chunks(
    serve: Callable[..., httpx.URL], tmp_path: Path
) -> None:
    def chunked(handler: Handler, n: int) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for start in range(0, len(MODEL), 30_000):
            piece = MODEL[start : start + 30_000]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if n:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    fetch(serve(chunked), tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == MODEL
    assert len(Handler.seen) == 2, "the first time, its end was missing"


def test_a_disk_without_room_is_told_before_anything_is_written(
    serve: Callable[..., httpx.URL], tmp_path: Path
) -> None:
    url = serve(whole())
    with pytest.raises(ConfigError) as caught:
        download(url, tmp_path / "m.gguf", free_bytes=lambda _: SPARE_BYTES + 50_000)
    message = str(caught.value)
    assert f"needs 0 MiB more; 0 MiB are free in {tmp_path}" in message
    assert not list(tmp_path.iterdir())


def test_two_that_fetch_the_same_file_share_the_work(
    serve: Callable[..., httpx.URL], tmp_path: Path
) -> None:
    """The second download of a file waits for the first one and sends no request; two writers of
    one file would ruin it.
    """
    begun = threading.Event()

    def slow(handler: Handler, n: int) -> None:
        begun.set()
        time.sleep(0.5)
        whole()(handler, n)

    url = serve(slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(fetch, url, tmp_path / "m.gguf")
        assert begun.wait(60)
        second = pool.submit(fetch, url, tmp_path / "m.gguf")
        first.result(60)
        second.result(60)
    assert len(Handler.seen) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"m.gguf": MODEL}


def test_every_part_of_an_address_tells_models_apart(
    serve: Callable[..., httpx.URL], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses that differ in host, path or query have different files, else one model is served
    in place of another; each is found again without a network.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base = str(serve(whole())).removesuffix("/x/m.gguf")
    found = {
        fetch_url(address, offline=False)
        for address in (
            f"{base}/x/m.gguf",
            f"{base}/y/m.gguf",
            f"{base}/x/m.gguf?rev=1",
            f"{base}/x/m.gguf?rev=2",
            f"{base}/x/m%20n.gguf",
            f"{base}/x%2Fy/m.gguf",
            base.replace("127.0.0.1", "localhost") + "/x/m.gguf",
        )
    }
    assert len(found) == 7
    assert fetch_url(f"{base}/x/m.gguf", offline=True) in found
    assert {path.name for path in found} == {"m.gguf", "m n.gguf"}
    for address in (f"{base.replace('http', 'https')}/x/m.gguf", "http://127.0.0.1:9/x/m.gguf"):
        with pytest.raises(ConfigError, match="is not downloaded yet"):
            fetch_url(address, offline=True)
    assert all(path.is_relative_to(tmp_path / "pyctl" / "models") for path in found)


def test_parts_have_the_address_of_the_first_but_for_their_name(
    serve: Callable[..., httpx.URL], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base = str(serve(whole())).removesuffix("/x/m.gguf")
    name = "a b-00001-of-00002.gguf"
    fetch_url(
        f"{base}/{name}/a%20b-00001-of-00002.gguf?t={name}".replace(" ", "%20"), offline=False
    )
    assert Handler.paths == [
        f"/a%20b-00001-of-00002.gguf/a%20b-0000{n}-of-00002.gguf?t=a%20b-00001-of-00002.gguf"
        for n in (1, 2)
    ]


@pytest.mark.parametrize(
    "name", ["m.bin", "", "%2e%2e%2f", "a%1b%5d0%3bx.gguf", "a%0a.gguf", "m.gguf/"]
)
def test_names_that_no_model_has(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="does not end in the name of a GGUF file"):
        fetch_url(f"http://127.0.0.1:9/{name}", offline=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "said"),
    [("m" * 255 + ".gguf", "cannot store"), ("m-00001-of-99999.gguf", "at most 512")],
)
def test_names_of_no_file(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):  # a folder that is there changes nothing
        with pytest.raises(ConfigError, match=said):
            fetch_url(f"http://127.0.0.1:9/{name}", offline=False)


def test_a_refusal_keeps_secrets_of_the_address_to_itself(
    serve: Callable[..., httpx.URL], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    address = str(serve(sends(404))).replace("http://", "http://me:hunter2@") + "?token=hunter3"
    with pytest.raises(ConfigError) as caught:
        fetch_url(address, offline=False)
    assert "hunter" not in str(caught.value)
    assert "/x/m.gguf answers with status 404" in str(caught.value)

from __future__ import annotations

import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from pyctl.errors import ConfigError
from pyctl.server.app import create_loading_app, early_paths
from pyctl.server.app_state import AppState
from pyctl.server.middleware import LoadingApp
from pyctl.server.request_body import MAX_BODY_BYTES
from pyctl.server.run import serve
from pyctl.server.server_settings import ListenSettings, ServerSettings
from tests.client import HI, Client, events
from tests.process.server.child_server import (
    line,
    server,
)
from tests.unit.server.fake import Bench, play
from tests.waiting import until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_streams_and_lets_the_program_go_on(number: signal.Signals) -> None:
    with server() as process:
        address = line(process)
        assert httpx.get(f"{address}/health").json() == {"status": "ok"}
        body = {"messages": HI, "stream": True}
        with httpx.stream(
            "POST", f"{address}/v1/chat/completions", json=body, timeout=60
        ) as response:
            chunks = response.iter_bytes()
            received = next(chunks)
            process.send_signal(number)
            for chunk in chunks:
                received += chunk
        assert events(received)[-1]["error"]["type"] == "unavailable_error"
        assert line(process) == "ended in good order"
        assert process.wait(60) == 0


def test_an_idle_server_ends_at_once() -> None:
    with server(grace=300) as process:
        address = line(process)
        httpx.get(f"{address}/health")
        process.terminate()
        assert line(process) == "ended in good order"
        assert process.wait(60) == 0


def test_a_signal_while_loading() -> None:
    with server(grace=300, loading="slowly") as process:
        address = line(process)
        response = httpx.get(f"{address}/health")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "Loading model"
        process.terminate()
        assert line(process) == "ended in good order"
        assert process.wait(60) == 0


def test_a_failure_while_loading() -> None:
    with server(loading="failing") as process:
        assert line(process).startswith("http://")
        assert line(process) == "the model is broken"
        assert process.wait(60) == 2


def test_an_address_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with server(port=port) as process:
            said = line(process)
            assert f"127.0.0.1:{port}" in said
            assert "in use" in said
            assert process.wait(60) == 2


def test_a_certificate_that_is_none_is_one_line_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("no")
    for key, words in (
        ("cert", "not a PEM certificate with its key"),
        ("missing", "No such file or directory"),
    ):
        files = {"ssl_cert_file": str(tmp_path / "cert"), "ssl_key_file": str(tmp_path / key)}
        with pytest.raises(ConfigError, match=f"{key}: {words}"):
            serve(create_loading_app(AppState(ServerSettings())), [], ListenSettings(**files))


@pytest.mark.parametrize("leftover", [False, True])
def test_a_unix_socket(tmp_path: Path, leftover: bool) -> None:
    path = tmp_path / "s.sock"
    if leftover:
        with socket.socket(socket.AF_UNIX) as old:
            old.bind(str(path))
    with server(str(path)) as process:
        assert line(process) == f"unix://{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://server/health").json() == {"status": "ok"}
        process.terminate()
        assert line(process) == "ended in good order"
    assert not path.exists()


LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}


def test_everything_waits_for_the_model() -> None:
    """While the model loads, each API answers 503 in its own form, with the headers that pages and
    retries need, and the web page is served; afterwards the same application serves the model.
    """
    bench = Bench(play("x"))
    gate = LoadingApp(create_loading_app(AppState(ServerSettings())), seconds=0.01)
    client = Client.to_app(gate)
    for method, path in (
        ("GET", "/health"),
        ("POST", "/completion"),
        ("GET", "/nowhere"),
        ("DELETE", "/cache"),
    ):
        response = client.request(method, path, headers={"Origin": "http://page"})
        assert response.status_code == 503
        assert response.json() == LOADING
        assert response.headers["access-control-allow-origin"] == "http://page"
        assert int(response.headers["retry-after"]) > 0
    assert client.get("/v1/messages/batches").json()["error"]["type"] == "overloaded_error"
    assert client.get("/api/tags").json() == {"error": "Loading model"}
    assert client.options("/completion").status_code == 200
    page = client.get("/")
    assert page.status_code == 200
    assert page.text == client.get("/index.html").text
    assert client.get("/page/app.js").status_code == 200
    gate.open(bench.app)
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/").text == page.text
    assert client.get("/nowhere").status_code == 404
    assert client.post("/completion", {"prompt": "a"}).json()["content"] == "x"
    for settings in (ServerSettings(show_page=False), ServerSettings(static_path="/tmp")):
        without = Client.to_app(LoadingApp(create_loading_app(AppState(settings))))
        assert [without.get(path).status_code for path in ("/", "/page/app.js")] == [503, 503]


def test_the_page_gets_its_markdown_before_the_model_is_loaded() -> None:
    settings = ServerSettings(api_prefix="/llm", api_keys=("secret",))
    shared = AppState(settings)
    gate = LoadingApp(create_loading_app(shared), seconds=60.0, early=early_paths(settings))
    client = Client.to_app(gate)
    key = {"Authorization": "Bearer secret"}
    path = "/llm/page/markdown"
    with closing(shared.markdown):
        rendered = client.post(path, json={"texts": ["**a**"]}, headers=key)
    assert rendered.json() == {"html": ["<p><strong>a</strong></p>\n"]}
    assert client.post(path, json={"texts": ["a"]}).status_code == 401
    assert client.post(path, json={"texts": 1}, headers=key).status_code == 400
    assert client.post(path, content=b"x" * (MAX_BODY_BYTES + 1), headers=key).status_code == 413
    assert early_paths(ServerSettings(show_page=False)) == ()


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_request_is_held_while_the_model_is_loaded(is_loaded: bool) -> None:
    """A held request gets its reply; a request above the limit, or held when loading ends in
    another way, gets 503.
    """
    bench = Bench(play("x"))
    loading = create_loading_app(AppState(ServerSettings()))
    gate = LoadingApp(loading, seconds=60.0, max_held=1)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(Client.to_app(gate).post, "/completion", {"prompt": "a"})
        until(lambda: gate.n_held == 1)
        assert Client.to_app(gate).post("/completion", {"prompt": "a"}).status_code == 503
        assert Client.to_app(gate).get("/health").status_code == 503
        gate.open(bench.app) if is_loaded else gate.close()
        assert held.result(60).status_code == (200 if is_loaded else 503)

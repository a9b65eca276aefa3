"""The proxy that records the requests of a program and binds the replies to them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from bench.clients.recording_proxy import RecordingProxy, recording_proxy
from tests.web_server import Handler, web_server


class Target(Handler):
    """Answers with the body that it was sent, and refuses the path /refused."""

    def do_GET(self) -> None:
        self.send(200, b"ready")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = 400 if self.path == "/refused" else 200
        self.send(status, body, x_pyctl_cache="cached=7; evaluated=2; source=live")


@pytest.fixture
def proxy() -> Iterator[RecordingProxy]:
    with web_server(Target) as url, recording_proxy(url, lambda path, body: {"n": 1}) as proxy:
        yield proxy


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"X-Name": "seven"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_the_target_gets_the_added_fields(proxy: RecordingProxy) -> None:
    assert post(f"{proxy.url}/chat", {"a": 2}) == {"a": 2, "n": 1}


def test_a_request_is_recorded_as_the_program_sent_it(proxy: RecordingProxy) -> None:
    post(f"{proxy.url}/chat?beta=true", {"a": 2})
    (recorded,) = proxy.recorded
    assert recorded.path == "/chat"
    assert recorded.body == {"a": 2}
    assert recorded.headers["x-name"] == "seven"
    assert recorded.status == 200
    assert recorded.n_cached == 7
    assert recorded.n_evaluated == 2


def test_a_body_that_is_no_object_stays_as_it_is(proxy: RecordingProxy) -> None:
    assert post(f"{proxy.url}/chat", [1, 2]) == [1, 2]
    assert proxy.recorded[0].body is None


def test_a_refusal_is_passed_on(proxy: RecordingProxy) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(f"{proxy.url}/refused", {})
    assert proxy.recorded[0].status == 400


def test_a_request_without_a_body_is_recorded(proxy: RecordingProxy) -> None:
    with urllib.request.urlopen(f"{proxy.url}/health", timeout=60) as answer:
        assert answer.read() == b"ready"
    assert proxy.recorded[0].path == "/health"

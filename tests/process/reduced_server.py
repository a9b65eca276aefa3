"""Servers in front of pyctl that lack a feature: what SDKs do without it shows there."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.web_server import Handler, web_server

__all__ = ["without_fields", "without_threads"]

SECONDS = 300
"""The maximum wait for an answer of pyctl, on a busy machine too."""

NO_THREADS = {
    "type": "error",
    "error": {
        "type": "invalid_request_error",
        "message": "no threads here",
        "details": {"error_code": "thread_unsupported_request"},
    },
}


class _Reduced(Handler):
    """Passes POST requests on to the server at `url`."""

    url = ""

    def read_body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return body

    def pass_on(self, body: dict[str, Any]) -> None:
        """Answer as pyctl answers the request with this ``body``; a stream comes as a whole."""
        keys = {
            name: self.headers[name]
            for name in ("authorization", "x-api-key")
            if name in self.headers
        }
        request = urllib.request.Request(
            self.url + self.path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **keys},
        )
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                kind = answer.headers["Content-Type"]
                self.send(answer.status, answer.read(), Content_Type=kind)
        except urllib.error.HTTPError as error:
            self.send(error.code, error.read(), Content_Type="application/json")


@contextmanager
def without_threads(url: str) -> Iterator[str]:
    """Yield the address of a server that refuses Anthropic's threads and passes all else on to the
    one at ``url``.
    """

    class Refusing(_Reduced):
        def do_POST(self) -> None:
            body = self.read_body()
            if "thread" in body:
                self.send(400, json.dumps(NO_THREADS).encode(), Content_Type="application/json")
                return
            self.pass_on(body)

    Refusing.url = url
    with web_server(Refusing) as address:
        yield address


@contextmanager
def without_fields(url: str, *names: str) -> Iterator[str]:
    """Yield the address of a server that ignores the fields ``names`` of all requests, as servers
    of older versions do, and passes the rest on to the one at ``url``.
    """

    class Ignoring(_Reduced):
        def do_POST(self) -> None:
            body = self.read_body()
            self.pass_on(_without(body, frozenset(names)))

    Ignoring.url = url
    with web_server(Ignoring) as address:
        yield address


def _without(value: Any, names: frozenset[str]) -> Any:
    """Return the JSON ``value`` without the members ``names`` of its objects."""
    if isinstance(value, list):
        return [_without(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: _without(each, names) for name, each in value.items() if name not in names}

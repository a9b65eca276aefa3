"""Requests that are refused, as rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from tests.client import Client

__all__ = ["Case", "check_error"]

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
"""The type of an error in the form of OpenAI's API, by its status."""


def check_error(response: httpx.Response, status: int, *parts: str, kind: str = "") -> str:
    """Check an error in the form of the API at its path: its status, type and parts of its message.

    Return the message.
    """
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json; charset=utf-8"
    body = response.json()
    if response.url.path.startswith("/v1/messages"):  # Anthropic's API
        assert body["type"] == "error"
    else:
        assert list(body) == ["error"]
    error = body["error"]
    assert error["code"] == status
    assert error["type"] == (kind or KINDS[status])
    for part in parts:
        assert part in error["message"]
    return str(error["message"])


@dataclass(frozen=True)
class Case:
    """A request that is refused: its path and body, and the status and a part of the message of
    the answer.

    Bytes are sent as they are, anything else as JSON.
    """

    path: str
    body: Any
    status: int
    error: str

    def __str__(self) -> str:
        return f"{self.path} {self.body!r}"[:70]

    def send(self, client: Client) -> httpx.Response:
        """Return the answer to the request."""
        if isinstance(self.body, bytes):
            return client.post(self.path, content=self.body)
        return client.post(self.path, self.body)

    def check(self, client: Client) -> str:
        """Check that ``client`` gets the error, in the form of its API. Return the message."""
        return check_error(self.send(client), self.status, self.error)

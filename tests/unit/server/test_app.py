"""Paths and methods, and errors before an endpoint."""

from __future__ import annotations

import pytest

from pyctl.server.server_settings import ServerSettings
from tests.case import Case, check_error
from tests.client import CHAT
from tests.unit.server.fake import Bench, play


def test_unknown_paths_and_wrong_methods() -> None:
    client = Bench(play("x")).client
    check_error(client.get("/nothing/here"), 404, "no such endpoint: /nothing/here")
    check_error(client.get(CHAT), 404, f"no such endpoint: GET {CHAT}")
    Case("/v1/files", {}, 404, "no such endpoint: /v1/files").check(client)
    Case("/health", {}, 404, "no such endpoint: POST /health").check(client)


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_errors_before_an_endpoint_have_the_form_of_the_api(prefix: str) -> None:
    client = Bench(play("x"), settings=ServerSettings(api_keys=("k",), api_prefix=prefix)).client
    for key, status in (("wrong", 401), ("k", 404)):
        headers = {"authorization": f"Bearer {key}"}
        plain, anthropic, ollama = (
            client.request("PUT", f"{prefix}{path}", headers=headers)
            for path in ("/v1/files", "/v1/messages/batches", "/api/me")
        )
        assert [each.status_code for each in (plain, anthropic, ollama)] == [status] * 3
        assert list(plain.json()) == ["error"]
        assert anthropic.json()["type"] == "error"
        assert isinstance(ollama.json()["error"], str)

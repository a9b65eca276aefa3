"""Settings of the HTTP server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pyctl.errors import ConfigError
from pyctl.server.server_settings import (
    ListenSettings,
    RouterSettings,
    ServerSettings,
    addresses,
    existing,
    existing_or_new,
    key_lines,
    keys,
    url_path,
)
from pyctl.settings.convert import Convert


def test_addresses_may_have_the_brackets_that_they_have_before_a_port() -> None:
    assert addresses("[::1], 127.0.0.1,[::],a.sock") == ("::1", "127.0.0.1", "::", "a.sock")


@pytest.mark.parametrize(
    ("convert", "text", "value"),
    [
        (addresses, "127.0.0.1, /tmp/a.sock", ("127.0.0.1", "/tmp/a.sock")),
        (keys, "a, b", ("a", "b")),
        (url_path, "", ""),
        (url_path, "/llm/v-1.0~x", "/llm/v-1.0~x"),
        (existing, "/", "/"),
        (existing_or_new, "/nowhere/new", Path("/nowhere/new")),
    ],
)
def test_a_text_becomes_its_value(convert: Convert, text: str, value: Any) -> None:
    assert convert(text) == value


@pytest.mark.parametrize(
    ("convert", "text", "error"),
    [
        (addresses, " , ", "' , ' is not an address"),
        (keys, "", "no key given; omit the flag to serve without a key"),
        (url_path, "llm", "'llm' is not a path such as /llm"),
        (url_path, "/llm/", "is not a path such as /llm"),
        (url_path, "/a b", "is not a path such as /llm"),
        (existing, "/nowhere", "'/nowhere' does not exist"),
        (key_lines, "/nowhere/keys", "cannot read"),
    ],
)
def test_another_text_is_an_error(convert: Convert, text: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        convert(text)


def test_a_file_of_keys_may_have_comments_and_must_have_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\n a \n\nb\n")
    assert key_lines(str(path)) == ("a", "b")
    path.write_text("# none yet\n\n")
    with pytest.raises(ValueError, match="no key in"):
        key_lines(str(path))


@pytest.mark.parametrize("files", [("key.pem", ""), ("", "cert.pem")])
def test_a_key_and_its_certificate_come_together(files: tuple[str, str]) -> None:
    key, certificate = files
    with pytest.raises(ConfigError, match="must be given together"):
        ListenSettings(ssl_key_file=key, ssl_cert_file=certificate)


def test_a_directory_of_files_replaces_the_page() -> None:
    assert ServerSettings().has_page
    assert not ServerSettings(static_path="/srv").has_page
    assert not ServerSettings(show_page=False).has_page


def test_a_directory_or_a_preset_file_makes_several_models() -> None:
    assert not RouterSettings().is_router
    assert RouterSettings(models_dir="/m").is_router
    assert RouterSettings(preset_path="/m.ini").is_router

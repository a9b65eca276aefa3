"""`pyctl chat`: the backend that answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pyctl.cli.arguments import CommandSettings, parse_chat
from pyctl.cli.chat_command import chat, chat_backend
from pyctl.errors import ConfigError
from pyctl.terminal.remote import RemoteBackend
from tests.web_server import Handler, web_server


class OneModel(Handler):
    """A server with one model, "tiny"."""

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "tiny"}], "model_alias": "tiny"}'
        self.send(200, body, Content_Type="application/json")


@pytest.fixture
def url() -> Iterator[str]:
    with web_server(OneModel) as url:
        yield url


def settings_of(*flags: str) -> CommandSettings:
    return parse_chat(list(flags), {})


def test_a_server_elsewhere_answers_where_one_is_named(url: str) -> None:
    with chat_backend(settings_of("--url", url)) as backend:
        assert isinstance(backend, RemoteBackend)
        assert backend.name() == "tiny"


@pytest.mark.parametrize("run", [chat, lambda settings: chat_backend(settings).__enter__()])
def test_without_a_server_at_the_address_the_error_names_a_way_out(
    run: Callable[[CommandSettings], object],
) -> None:
    with pytest.raises(ConfigError, match=r"; pyctl serve starts a server$"):
        run(settings_of("--url", "http://127.0.0.1:9"))

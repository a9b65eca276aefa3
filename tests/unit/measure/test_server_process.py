"""A server program as a child process."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import pytest

from pyctl.measure.server_process import LIBRARY_CHOICE, ServerProcess, clean_environment

SERVE = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    n_loading = 2

    def do_GET(self):
        Handler.n_loading -= 1
        ready = self.path == "/llm/health" and Handler.n_loading < 0
        self.send_response(200 if ready else 503)
        self.end_headers()

    def log_message(self, *_):
        pass

print("listening", flush=True)
HTTPServer.allow_reuse_port = True
HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def serving(tmp_path: Path, program: str = SERVE) -> ServerProcess:
    command = [sys.executable, "-c", program]
    return ServerProcess(command, tmp_path / "log", prefix="/llm")


def test_a_server_runs_for_the_time_of_a_block(tmp_path: Path) -> None:
    server = serving(tmp_path)
    assert not server.is_running
    with server:
        assert server.is_running
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert server.load_seconds > 0
        with socket.create_connection(("127.0.0.1", server.port), 10):
            pass
    assert not server.is_running
    assert (tmp_path / "log").read_text() == "listening\n"


def test_a_server_can_be_started_again_at_its_port(tmp_path: Path) -> None:
    server = serving(tmp_path)
    server.start()
    port = server.port
    assert server.end(signal.SIGTERM) == -signal.SIGTERM
    server.start(port)
    assert server.port == port
    server.kill()
    assert not server.is_running
    assert server.end(signal.SIGTERM) is None, "it does not run"


def test_a_program_that_ends_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = serving(tmp_path, "print('no such model'); raise SystemExit(3)")
    with pytest.raises(OSError, match="did not start: no such model"):
        server.start()
    assert not server.is_running


def test_settings_of_the_user_reach_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LLAMA_ARG_CTX_SIZE", "LLAMA_API_KEY", "PYCTL_EXACT", LIBRARY_CHOICE, "MINE"):
        monkeypatch.setenv(name, "1")
    environment = clean_environment()
    assert "LLAMA_ARG_CTX_SIZE" not in environment
    assert "LLAMA_API_KEY" not in environment
    assert "PYCTL_EXACT" not in environment
    assert environment[LIBRARY_CHOICE] == "1"
    assert environment["MINE"] == "1"
    assert environment["PYCTL_KV_CACHE"] == "off"

"""A server program as a child process on a free port, for `pyctl bench`, the demo and the tests."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from pyctl.processes.module_command import module_command
from pyctl.processes.module_process import end_with_parent

__all__ = ["PYCTL_SERVE", "ServerProcess", "clean_environment"]

PYCTL_SERVE = (*module_command("pyctl"), "serve")

STOP_SECONDS = 30.0

POLL_SECONDS = 0.05
"""The time between two requests to a server that starts; the error of `load_seconds`."""

LIBRARY_CHOICE = "PYCTL_LIBS"
"""The variable that chooses between builds of llama.cpp, the same for a server as for the program
that starts it.
"""


def clean_environment() -> dict[str, str]:
    """Return the environment without settings (LLAMA_ARG_*, LLAMA_API_KEY, PYCTL_*), except the
    choice of libraries, and with no disk cache.
    """
    settings = ("LLAMA_ARG_", "LLAMA_API_KEY", "PYCTL_")
    hidden = {name for name in os.environ if name.startswith(settings)} - {LIBRARY_CHOICE}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**environment, "PYCTL_KV_CACHE": "off"}


class ServerProcess:
    """A server process: ``command`` with `--port`, and its output in ``log``; may be started again
    after it was stopped.

    Its environment is `clean_environment`, and ``environment``. It ends with the thread that
    started it. As a context manager it is started at once, within ``timeout`` seconds, and stopped
    in the end.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        prefix: str = "",
        timeout: float = 60.0,
        poll_seconds: float = POLL_SECONDS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Take the ``command`` and the ``timeout`` of a start in seconds, in which the server is
        polled each ``poll_seconds``; nothing runs yet.
        """
        self.command = command
        self.log = log
        self.prefix = prefix
        self.timeout = timeout
        self._poll_seconds = poll_seconds
        self._environment = {**clean_environment(), **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.load_seconds = 0.0
        """Seconds that the last start took."""

    @property
    def url(self) -> str:
        """Its address, without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The id of the running process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """True if the server was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, port: int = 0) -> None:
        """Start the server; return when it answers at ``port``, 0 for a free one. Raises OSError
        with the end of its log if it does not.
        """
        with _reserved(port) as self.port:
            began = time.monotonic()
            with self.log.open("ab") as out:
                self._process = subprocess.Popen(
                    [*self.command, "--port", str(self.port)],
                    stdout=out,
                    stderr=out,
                    env=self._environment,
                    preexec_fn=partial(end_with_parent, signal.SIGKILL),
                )
            while not self._answers():
                if not self.is_running or time.monotonic() - began > self.timeout:
                    self.kill()
                    end = self.log.read_text(errors="replace")[-800:]
                    raise OSError(f"{self.command[0]} did not start: {end}")
                time.sleep(self._poll_seconds)
            self.load_seconds = time.monotonic() - began

    def _answers(self) -> bool:
        """Return whether the model is loaded; until then the answer is 503."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", f"{self.prefix}/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        """Let the server end and wait; kill it if it does not."""
        self.end(signal.SIGTERM)

    def end(self, number: signal.Signals) -> int | None:
        """End the server by a signal; return its exit code as subprocess has it: -9 after a kill,
        None if it did not run.
        """
        if self._process is None:
            return None
        process = self._process
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        self.kill()
        return process.returncode

    def kill(self) -> None:
        """Kill the server without a chance to tidy up."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def _reserved(port: int) -> Iterator[int]:
    """Provide a port, any free one for 0, that no other process gets meanwhile; a server that
    reuses addresses can listen.
    """
    with socket.socket() as bound:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(("127.0.0.1", port))
        yield bound.getsockname()[1]

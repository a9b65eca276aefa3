"""The server of `pyctl launch`: one that runs, or a child process for the time of the program."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx

from pyctl.cli.arguments import CommandSettings
from pyctl.cli.programs import NO_KEY, Endpoint, LaunchSettings
from pyctl.cli.service_command import pyctl_command
from pyctl.cli.signals import ending_by_signal, handled
from pyctl.errors import ConfigError
from pyctl.files.atomic_file import make_private, open_private
from pyctl.files.user_directory import user_directory
from pyctl.processes.module_process import end_with_parent
from pyctl.server.listen import bind
from pyctl.text import one_line

__all__ = ["find_server", "follow", "server_address", "started_server"]

STOP_SECONDS = 70.0
"""A server ends within a minute of SIGTERM, all cache writes included."""

FIRST_PROMPT = "an agent's first prompt has 10,000 to 40,000 tokens and may take minutes"
"""The note about a first prompt. Until its end a program without a screen, such as claude -p,
prints nothing.
"""

FOLLOW_SECONDS = 1.0
FOLLOW_BYTES = 2**16
"""Bytes of the log that are read at a time, and the longest line."""

ANSWER_SECONDS = 5.0
POLL_SECONDS = 0.1


def server_address(settings: CommandSettings, port: int | None = None) -> str:
    """Return the address where programs on this machine find a server with ``settings``. Raises
    ConfigError for sockets and TLS.
    """
    listen = settings.listen
    host = next((host for host in listen.hosts if not host.endswith(".sock")), None)
    if host is None or listen.ssl_cert_file:
        raise ConfigError(
            "programs need an http address: leave out --ssl-cert-file and paths as --host"
        )
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listen.port if port is None else port}{settings.server.api_prefix}"


def find_server(url: str, key: str, *, waits: bool = True) -> Endpoint | None:
    """Return the pyctl or llama-server at ``url``, without /v1, after it has loaded its model; None
    if neither answers.

    Raises ConfigError if it refuses ``key``, or without ``waits`` if it has not loaded a model yet.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(timeout=ANSWER_SECONDS, headers=headers, trust_env=False) as client:
        try:
            while (
                (health := client.get(f"{url}/health")).status_code == 503
                and waits
                and "Loading" in health.text
            ):
                time.sleep(POLL_SECONDS)
            if health.status_code == 503:
                raise ConfigError(f"the server at {url} has failed; restart it")
            reply = client.get(f"{url}/props")
            if reply.status_code in (401, 403):
                raise ConfigError(
                    f"{url} requires {'another' if key else 'a'} key: pass --api-key KEY"
                )
            props = reply.json()
            n_ctx = int(props["default_generation_settings"]["n_ctx"])
            model = str(client.get(f"{url}/v1/models").json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None
    return Endpoint(url, key or NO_KEY, model, n_ctx, str(props.get("model_path") or ""))


@contextmanager
def started_server(
    settings: CommandSettings, own: LaunchSettings, flags: Sequence[str], key: str
) -> Iterator[Endpoint]:
    """Run `pyctl serve` with ``flags`` for the time of the block. Raises ConfigError if it does not
    start.
    """
    port = _port_for(settings, is_typed="--port" in own.server_flags)
    log = user_directory("state", os.environ) / f"launch-{port}.log"
    url = server_address(settings, port)
    print(f"pyctl: starting the server, log: {log}", file=sys.stderr)
    began = time.monotonic()
    with _child([*pyctl_command(), "serve", *flags, "--port", str(port)], log) as process:
        while (server := find_server(url, key)) is None:
            if process.poll() is not None:
                raise ConfigError(
                    f"the server ended with exit code {process.returncode}: {_log_error(log)}"
                )
            time.sleep(POLL_SECONDS)
        shown = f"{one_line(server.model)} at {url}, {server.n_ctx:,} tokens of context"
        print(f"pyctl: {shown}, after {time.monotonic() - began:.0f} s", file=sys.stderr)
        print(
            f"pyctl: {FIRST_PROMPT}; its progress: tail -f {shlex.quote(str(log))}", file=sys.stderr
        )
        try:
            with _progress_of_prompts(log):
                yield server
        finally:
            if process.poll() is not None:
                print(
                    f"pyctl: the server ended with exit code {process.returncode}, log: {log}",
                    file=sys.stderr,
                )


@contextmanager
def _progress_of_prompts(log: Path) -> Iterator[None]:
    """Print the progress of long prompts for the time of the block, unless the program may draw on
    the terminal.
    """
    if sys.stdout.isatty():
        yield
        return
    closed = threading.Event()
    thread = threading.Thread(target=follow, args=(log, closed), name="pyctl-follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()


def follow(log: Path, closed: threading.Event) -> None:
    """Print the lines about prompts that the server adds to ``log`` on stderr, until ``closed`` is
    set.
    """
    rest = b""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        while not closed.wait(FOLLOW_SECONDS):
            *lines, rest = (rest + file.read(FOLLOW_BYTES)).split(b"\n")
            rest = rest[-FOLLOW_BYTES:]
            for line in lines:
                _, mark, progress = line.decode("utf-8", "replace").partition("prefill ")
                if mark:
                    print(f"pyctl: prompt: {one_line(' '.join(progress.split()))}", file=sys.stderr)


@contextmanager
def _child(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` in its own session: Ctrl-C and Ctrl-Z at the terminal reach only the
    program.
    """
    try:
        make_private(log.parent)
        descriptor = open_private(log, os.O_WRONLY | os.O_TRUNC)
    except OSError as error:
        raise ConfigError(f"cannot write the server's log {log}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
    with ending_by_signal():
        try:
            yield process
        finally:
            # The writes take seconds; a signal meanwhile must not leave the server running.
            with handled(
                dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN)
            ):
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
                process.kill()
                process.wait()


def _port_for(settings: CommandSettings, *, is_typed: bool) -> int:
    """Return the server's port: the typed one, else the usual one or, if that is taken, a free
    one.
    """
    port = settings.listen.port
    hosts = [host for host in settings.listen.hosts if not host.endswith(".sock")]
    for tried in (port, 0):
        with suppress(ConfigError), bind(hosts[:1], tried) as sockets:
            return int(sockets[0].getsockname()[1])
        if is_typed:
            break
    return port


def _log_error(log: Path) -> str:
    """Return the error that the log ends with, or its last lines, and its path."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("pyctl: error: ")]
    text = errors[-1].removeprefix("pyctl: error: ") if errors else " | ".join(lines[-5:])
    return f"{one_line(text)} (log: {log})"

"""`pyctl chat`: a conversation in the terminal, with a model in this process or with a running server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyctl.cli.arguments import CommandSettings
from pyctl.cli.logs import start_log
from pyctl.terminal.chat_backend import ChatBackend
from pyctl.terminal.interactive import run_chat

__all__ = ["chat", "chat_backend"]


def chat(settings: CommandSettings) -> int:
    """Chat until the input ends; returns the exit code."""
    start_log(settings.log, settings.warnings)
    terminal = settings.terminal
    with chat_backend(settings) as backend:
        return run_chat(backend, prompt=terminal.prompt, system=terminal.system_prompt, stats=terminal.stats)


@contextmanager
def chat_backend(settings: CommandSettings) -> Iterator[ChatBackend]:
    """Who answers, for the time of the block."""
    terminal = settings.terminal
    if terminal.url:
        from pyctl.terminal.remote import RemoteBackend

        remote = RemoteBackend(terminal.url, terminal.api_key, settings.request_fields)
        try:
            yield remote
        finally:
            remote.close()
        return
    # Only now: a running server needs no engine here.
    from pyctl.cli.assemble import assemble, found
    from pyctl.terminal.local import LocalBackend

    service = assemble(found(settings))
    try:
        yield LocalBackend(service)
    finally:
        service.worker.close()

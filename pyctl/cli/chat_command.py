"""`pyctl chat`: a conversation in the terminal, with a model in this process or with a running
server.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from typing import cast

from pyctl.cli.arguments import CommandSettings
from pyctl.cli.logs import start_log
from pyctl.cli.signals import ending_by_signal
from pyctl.engine.openmp import without_blas_threads
from pyctl.errors import ConfigError, UnavailableError
from pyctl.mcp.toolbox import ToolBox
from pyctl.terminal.conversation import ChatBackend
from pyctl.terminal.interactive import run_chat
from pyctl.terminal.mcp_calls import OwnTools, ToolSource
from pyctl.text import error_text

__all__ = ["chat"]

log = logging.getLogger(__name__)


def chat(settings: CommandSettings) -> int:
    """Chat until the input ends; return the exit code. SIGTERM and SIGHUP end it after the cache's
    pending writes.
    """
    start_log(settings.log, settings.warnings)
    box = ToolBox(settings.tools)
    with ending_by_signal(), closing(box), chat_backend(settings) as backend:
        box.start()
        box.wait()
        tools: ToolSource | None = OwnTools(box) if box else None
        if tools is None and settings.terminal.url:
            tools = cast(ToolSource, backend)  # the server's
        return run_chat(backend, settings.terminal, tools=tools)


@contextmanager
def chat_backend(settings: CommandSettings) -> Iterator[ChatBackend]:
    """Provide the backend that answers, for the time of the block. Raises ConfigError if no server
    is at --url.
    """
    terminal = settings.terminal
    if terminal.url:
        from pyctl.terminal.remote import RemoteBackend

        with closing(
            RemoteBackend(terminal.url, terminal.api_key, settings.request_fields)
        ) as remote:
            try:
                remote.name()  # a request to the server
            except UnavailableError as error:
                raise ConfigError(f"{error_text(error)}; pyctl serve starts a server") from error
            yield remote
        return
    # Only now: a running server needs no engine here.
    with without_blas_threads():
        import_module("numpy")
    from pyctl.cli.assemble import assemble
    from pyctl.cli.choose_directory import log_cache_dir, with_directory
    from pyctl.cli.model_paths import resolve_files
    from pyctl.llama.library.extension import describe_missing
    from pyctl.terminal.local import LocalBackend

    for line in describe_missing():
        log.warning("%s", line)
    settings = resolve_files(with_directory(settings))
    log_cache_dir(settings.disk)
    service = assemble(settings)
    with closing(service.worker):
        yield LocalBackend(service)

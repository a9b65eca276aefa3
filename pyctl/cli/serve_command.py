"""`pyctl serve`: llama-server's HTTP API at an address."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress

from pyctl.cli.arguments import CommandSettings
from pyctl.cli.defaults import log_cache_dir, with_directory, with_shared_budget
from pyctl.cli.import_block import without_collections
from pyctl.cli.load_model import ModelLoad
from pyctl.cli.logs import start_log
from pyctl.cli.model_paths import check_files, is_router, resolve_files
from pyctl.cli.open_spans import check_spans
from pyctl.errors import ConfigError
from pyctl.llama.library.devices import devices
from pyctl.llama.library.extension import describe_missing
from pyctl.llama.library.rpc import connect_workers
from pyctl.machine.libraries import unused_card, unused_choice
from pyctl.processes.process_memory import share_heaps
from pyctl.server.listen import bind
from pyctl.text import one_line

__all__ = ["run_serve"]

log = logging.getLogger("pyctl")


def run_serve(
    settings: CommandSettings, argv: Sequence[str], environ: Mapping[str, str] = os.environ
) -> int:
    """Serve until a signal; return the exit code: 1 if an engine failed, or could not write
    everything.

    ``argv`` are the flags of ``settings``, read for each of several models. Raises ConfigError if
    it cannot start.
    """
    share_heaps()
    os.environ.pop(
        "LLAMA_API_KEY", None
    )  # has been read: no child needs it, such as the browser of --open
    start_log(settings.log, settings.warnings)
    for line in [*describe_missing(), *filter(None, [unused_choice()])]:
        log.warning("%s", line)
    check_spans(settings.server)
    connect_workers(settings.model.workers)
    if not any(device.is_gpu for device in devices()) and (line := unused_card()):
        log.warning("%s", line)
    listen = settings.listen
    with ExitStack() as bound:
        try:
            sockets = bound.enter_context(bind(listen.hosts, listen.port))
        except ConfigError as error:
            reason = error.__cause__
            is_busy = (
                isinstance(reason, OSError)
                and reason.errno == errno.EADDRINUSE
                and reason.filename is None
            )
            raise ConfigError(f"{error}{_port_owner(settings) if is_busy else ''}") from error
        settings = with_directory(settings)
        is_one = not is_router(settings)
        if not is_one:
            settings = with_shared_budget(settings)
        settings = resolve_files(settings)
        check_files(settings)
        log_cache_dir(settings.disk)
        loading = bound.enter_context(closing(ModelLoad(settings))) if is_one else None
        # Half of the imports of a server: llama.cpp loads the model meanwhile.
        with without_collections():
            from pyctl.cli.serving import serve_models
        return serve_models(settings, argv, environ, sockets, loading)


def _port_owner(settings: CommandSettings) -> str:
    """Return the end of an error: the server that answers at a port that is taken, and a way
    out.
    """
    from pyctl.cli.launched_server import (  # only now: most ports are free
        find_server,
        server_address,
    )

    server = None
    with suppress(ConfigError):  # it has another key or no model yet
        server = find_server(
            server_address(settings), next(iter(settings.server.api_keys), ""), waits=False
        )
    return (
        f"{f'; a server of {one_line(server.model)} answers there' if server else ''}; --port 0 "
        "takes a free port"
    )

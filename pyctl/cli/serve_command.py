"""`pyctl serve`: llama-server's HTTP API at an address."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from importlib import import_module

from pyctl.cli.arguments import CommandSettings
from pyctl.cli.defaults import with_shared_budget
from pyctl.cli.early_load import ModelLoad
from pyctl.cli.import_block import without_collections
from pyctl.cli.logs import start_log
from pyctl.cli.model_paths import check_files, fetches_files, is_router, resolve_files
from pyctl.cli.open_spans import check_spans
from pyctl.engine.openmp import without_blas_threads
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
        if is_router(settings):
            settings = with_shared_budget(settings)
        is_cached = fetches_files(settings)
        if is_cached:
            # A directory that cannot be used is an error before the download.
            settings = resolve_files(_with_cache(settings))
        loading = None
        if not is_router(settings):
            loading = bound.enter_context(closing(ModelLoad(settings)))
        if not is_cached:
            settings = _with_cache(settings)
        check_files(settings)
        with without_collections():
            # First the modules of the rest of the load, which would otherwise wait for all others.
            import_module("pyctl.cli.load_model")
            if loading is not None:
                loading.go_on(settings.disk)
            from pyctl.cli.serving import serve_models
        return serve_models(settings, argv, environ, sockets, loading)


def _with_cache(settings: CommandSettings) -> CommandSettings:
    """Return the settings with the cache directory that can be used, which is logged. Raises
    ConfigError for a given one that cannot be.
    """
    # Only now: llama.cpp fits the model into memory during most imports of a server.
    with without_collections():
        with without_blas_threads():
            import_module("numpy")
        from pyctl.cli.choose_directory import log_cache_dir, with_directory
    settings = with_directory(settings)
    log_cache_dir(settings.disk)
    return settings


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

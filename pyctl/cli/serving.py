"""The serving of models at an address: the gate, the loading, the end."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import socket

from starlette.types import ASGIApp

from pyctl.cache.cache_settings import DiskSettings
from pyctl.cache.ram_budget import RamBudget
from pyctl.cache.saved_time import Saved
from pyctl.cli.arguments import CommandSettings
from pyctl.cli.assemble import LoadContext, assemble
from pyctl.cli.defaults import cache_budget
from pyctl.cli.doctor_command import log_findings
from pyctl.cli.early_load import ModelLoad
from pyctl.cli.model_loader import ModelLoader
from pyctl.cli.model_paths import is_router
from pyctl.cli.open_spans import open_spans
from pyctl.cli.presets import SHARED_DISK, Preset, find_models
from pyctl.cli.startup_banner import (
    Addresses,
    cache_text,
    device_text,
    ready_text,
    restored_text,
    saved_text,
)
from pyctl.disk.remote_store import connect
from pyctl.errors import ConfigError, EngineError
from pyctl.llama.library.extension import build_line
from pyctl.llama.settings.resolved import gpus
from pyctl.mcp.toolbox import ToolBox
from pyctl.requests.request_pool import PostReplyQueue, RequestPool
from pyctl.server.app import create_app, create_loading_app, early_paths
from pyctl.server.app_state import AppState
from pyctl.server.load_order import LoadOrder
from pyctl.server.middleware import LoadingApp
from pyctl.server.models import Models, ModelSource
from pyctl.server.run import exit_process, serve
from pyctl.server.supervisor import Supervisor
from pyctl.text import duration

__all__ = ["Serving", "build_router", "open_in_browser", "serve_models"]

log = logging.getLogger("pyctl")


def open_in_browser(
    address: str,
    pool: RequestPool,
    browser: Callable[[str], object] | None = None,
    platform: str = sys.platform,
) -> None:
    """Open ``address`` in ``browser``, by default the user's, on a thread of ``pool``, if there is
    a screen to show it on.

    Without one, browsers for terminals would be started, in the middle of the log.
    """
    has_screen = platform == "darwin" or any(
        map(os.environ.get, ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
    )
    if not address or not has_screen:
        log.warning("--open: no browser found, the page is at %s", address or "no address")
        return
    import webbrowser

    PostReplyQueue(pool).add(partial(browser or webbrowser.open, address))


def serve_models(
    settings: CommandSettings,
    argv: Sequence[str],
    environ: Mapping[str, str],
    sockets: list[socket],
    loading: ModelLoad | None,
) -> int:
    """Serve on ``sockets`` until a signal, and end the process: with 1 if an engine failed, or
    could not write everything.

    ``loading`` is the load of the one model; None for several. Raises ConfigError if it cannot
    start.
    """
    listen = settings.listen
    tools = ToolBox(settings.tools)
    addresses = Addresses.from_sockets(
        [sock.getsockname() for sock in sockets],
        "https" if listen.ssl_cert_file else "http",
        settings.server.api_prefix,
    )
    models = build_router(settings, argv, environ, tools)
    serving = Serving(settings, models, tools, addresses, loading)
    code = 0
    try:
        serve(serving.app, sockets, listen, on_ready=serving.run, on_stop=serving.close)
    except EngineError as error:
        log.critical("the server exits: %s", error)
        code = 1
    finally:
        complete = serving.close()
        serving.close_spans()
    for sock in sockets:
        sock.close()
    log.info("stopped%s", serving.end_text)
    return exit_process(code if complete else 1)


def build_router(
    settings: CommandSettings,
    argv: Sequence[str],
    environ: Mapping[str, str],
    tools: ToolBox | None = None,
) -> Models | None:
    """Return the models that requests choose among; None if the settings name one model or none.

    Raises ConfigError as `find_models` does, and for more models to load at the start than
    --models-max.
    """
    router = settings.router
    if not is_router(settings):
        if router.is_router:
            log.warning("--models-dir and --models-preset have no effect: a model is named")
        return None
    shared = AppState(settings.server, build_line(), tools=tools or ToolBox())
    ram = RamBudget(cache_budget(settings.cache, None))
    context = LoadContext(shared, ram, 0)

    def find() -> list[ModelSource]:
        presets = find_models(router, argv, environ)
        # All models share the directory, which has been checked.
        return [_source(preset, context, settings.disk) for preset in presets]

    models = Models(
        shared, find, LoadOrder(router.max_loaded, router.patience), autoload=router.autoload
    )
    sources = [model.source for model in models]
    if 0 < router.max_loaded < (n_first := sum(source.on_start for source in sources)):
        raise ConfigError(
            f"{n_first} models have load-on-startup, --models-max is {router.max_loaded}"
        )
    context.n_encoders = sum(source.card.vision for source in sources)
    if ram.n_bytes and context.n_encoders:
        ram.n_bytes -= context.n_encoders * context.image_bytes(ram.n_bytes)
    return models


def _source(preset: Preset, context: LoadContext, shared: DiskSettings) -> ModelSource:
    disk = replace(preset.settings.disk, **{name: getattr(shared, name) for name in SHARED_DISK})
    if disk.cache_dir and disk.store_url not in (
        "",
        shared.store_url,
    ):  # the shared one has been tried
        connect(disk.store_url)
    settings = replace(preset.settings, disk=disk)
    return ModelSource(
        preset.card,
        ModelLoader(settings, context),
        preset.on_start,
        preset.keeps,
        preset.stop_seconds,
        settings.engine.sleep_seconds,
        settings,
    )


def _time_saved(saved: Saved) -> str:
    """Return the time that restored tokens saved, for the end of a line; "" if none were
    restored.
    """
    if not saved.requests:
        return ""
    return f", {restored_text(saved)}: about {duration(saved.seconds)} saved"


TOOLS_SECONDS = 2.0
"""Wait for the lists of MCP servers before requests are served; a server that never answers would
take 30 s.
"""


class Serving:
    """The server at the address: a gate at once, and the application as soon as the model is
    loaded.

    Of several ``models``, none has to be.
    """

    def __init__(
        self,
        settings: CommandSettings,
        models: Models | None,
        tools: ToolBox,
        addresses: Addresses,
        loading: ModelLoad | None = None,
    ) -> None:
        """Create the gate, which answers before any model is loaded; ``loading`` is the load of the
        one model, if ``models`` are None.
        """
        self._settings = settings
        self._loading = loading
        self._tools = tools
        self._addresses = addresses
        self._shared = (
            models.shared
            if models is not None
            else AppState(settings.server, build_line(), tools=tools)
        )
        if settings.disk.cache_dir:
            self._shared.saved.keep_in(Path(settings.disk.cache_dir).expanduser())
        self._closing = threading.Event()
        self._models = models
        self._load_context = LoadContext(self._shared)
        self._started_at = loading.started_at if loading is not None else time.monotonic()
        self.gate = LoadingApp(create_loading_app(self._shared), early=early_paths(settings.server))
        self.app: ASGIApp = self.gate
        self._spans = open_spans(self._shared)
        if self._spans is not None:
            self.app = self._spans.wrap(self.gate, settings.server.api_prefix)

    def run(self) -> None:
        """Load the model, let requests through, and wait for `close`, which another thread may call
        at any time.

        Raises EngineError if the engine ends before.
        """
        server = self._settings.server
        addresses = self._addresses
        if self._settings.listen.open_page:
            open_in_browser(
                f"{addresses.local}/" if addresses.local and server.has_page else "",
                self._shared.pool,
            )
        self._tools.start()
        models = self._models or self._load_one()
        if models is None:
            return
        self._tools.wait(TOOLS_SECONDS)
        self._models = models
        self.gate.open(create_app(models))
        if models.only is not None:
            log_findings(self._settings)
        if not server.api_keys and (warning := addresses.open_text):
            log.warning("%s", warning)
        self._log_ready(models)
        Supervisor(models).run()

    def _load_one(self) -> Models | None:
        """Return the one model, loaded; None if `close` was called meanwhile."""
        service = assemble(
            self._settings,
            lambda fraction: not self._closing.is_set(),
            self._load_context,
            self._loading,
        )
        models = self._models = Models.from_service(service)
        if self._closing.is_set():
            models.close()
            return None
        return models

    def _log_ready(self, models: Models) -> None:
        """Log the addresses, the device and the cache of the server, which is ready."""
        disk = self._settings.disk
        only = models.only
        budget = cache_budget(self._settings.cache, None)
        budget = (
            only.admin.view().result().budget
            if only is not None
            else -1
            if budget is None
            else budget
        )
        text = ready_text(
            time.monotonic() - self._started_at,
            self._addresses,
            has_page=self._settings.server.has_page,
            info=only.info if only is not None else ", ".join(model.name for model in models),
            device=device_text(
                [f"{gpu.description} ({gpu.name})" for gpu in gpus(self._settings.model)],
                self._load_context.threads,
            ),
            cache=cache_text(
                budget, disk.cache_dir, only.admin.stored() if only is not None else ()
            ),
            saved=saved_text(self._shared.saved.so_far_today),
        )
        # Not as an argument: those stay in one line. Names in it are the user's own.
        log.info(text, extra={"strong": text.partition("\n")[0]})

    @property
    def end_text(self) -> str:
        """The end of the last line of the log: prefixes written to the cache directory, and time
        saved.
        """
        services = self._models.services if self._models is not None else ()
        saved = [n for service in services if (n := service.admin.n_saved) is not None]
        prefixes = (
            ""
            if not saved
            else ", 1 prefix saved"
            if sum(saved) == 1
            else f", {sum(saved):,} prefixes saved"
        )
        return prefixes + _time_saved(self._shared.saved.since_start)

    def close(self) -> bool:
        """Stop loading, or end the engines; return whether everything that was to be kept is
        written. Idempotent.
        """
        self._closing.set()
        if self._loading is not None:
            self._loading.stop()
        self.gate.close()
        self._tools.close()
        # Abandoned requests may still be tokenised: `exit_process` ends the process without freeing
        # the model.
        is_complete = self._models is None or self._models.close()
        self._shared.saved.close()
        return is_complete

    def close_spans(self) -> None:
        """Send the spans of the last requests, which have ended."""
        if self._spans is not None:
            self._spans.close()

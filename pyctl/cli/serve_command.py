"""`pyctl serve`: llama-server's HTTP API at an address."""

from __future__ import annotations

import logging
import threading
from dataclasses import fields, replace

from pyctl.cache.persist import DiskPolicy
from pyctl.cli.arguments import CommandSettings
from pyctl.cli.assemble import Assembled, assemble, found
from pyctl.cli.logs import start_log
from pyctl.engine.admin import EngineAdmin
from pyctl.server.app import create_app
from pyctl.server.lifecycle import LoadingApp, bind, serve
from pyctl.server.service import Settings

__all__ = ["run_serve"]

log = logging.getLogger("pyctl")


def run_serve(settings: CommandSettings) -> int:
    """Serve until a signal; returns the exit code."""
    start_log(settings.log, settings.warnings)
    listen = settings.listen
    with bind(listen.host, listen.port) as sock:
        # Here and not behind the address: Ctrl-C must end a download.
        service = _Service(replace(settings, model=found(settings.model, settings.hub)))
        try:
            serve(
                service.gate,
                sock,
                ssl_key_file=listen.ssl_key_file,
                ssl_cert_file=listen.ssl_cert_file,
                on_ready=service.open,
                on_stop=service.close,
            )
        finally:
            service.close()
    return 0


class _Service:
    """What answers at the address: a gate at once, behind it the application as soon as the model is loaded."""

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings
        self._closing = threading.Event()
        self._made: Assembled | None = None
        self.gate = LoadingApp(settings.server.cors)

    def open(self, address: str) -> None:
        """Load the model and let requests through; may be stopped by `close` on another thread."""
        log.debug("listening at %s, loading the model", address)
        made = self._made = assemble(self._settings, go_on=lambda: not self._closing.is_set())
        if self._closing.is_set():
            made.worker.close()
            return
        settings = _server_settings(self._settings, made)
        self.gate.open(create_app(made.worker, made.chat_format, made.chat_format.tokenizer, settings))
        log.info("%s on %s", made.worker.info.model_path, address)

    def close(self) -> None:
        """Stop loading, or end the engine. Idempotent."""
        self._closing.set()
        if self._made is not None:
            self._made.worker.close()


def _server_settings(settings: CommandSettings, made: Assembled) -> Settings:
    given = settings.server
    admin = EngineAdmin(made.worker, made.engine)
    return Settings(
        **{item.name: getattr(given, item.name) for item in fields(given)},
        disk_policy=DiskPolicy.parse(settings.disk.disk_policy),
        cache=admin,
        engine=admin,
        slots=admin,
    )

"""`pyctl serve`: llama-server's HTTP API at an address."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from pyctl.cli.arguments import CommandSettings
from pyctl.cli.assemble import assemble, found
from pyctl.cli.logs import start_log
from pyctl.server.app import create_app
from pyctl.server.lifecycle import LoadingApp, bind, serve
from pyctl.server.service import Service

__all__ = ["run_serve"]

log = logging.getLogger("pyctl")


def run_serve(settings: CommandSettings) -> int:
    """Serve until a signal; returns the exit code."""
    start_log(settings.log, settings.warnings)
    listen = settings.listen
    with bind(listen.host, listen.port) as sock:
        # Here and not behind the address: Ctrl-C must end a download.
        serving = _Serving(replace(settings, model=found(settings.model, settings.hub)))
        try:
            serve(
                serving.gate,
                sock,
                ssl_key_file=listen.ssl_key_file,
                ssl_cert_file=listen.ssl_cert_file,
                on_ready=serving.open,
                on_stop=serving.close,
            )
        finally:
            serving.close()
    return 0


class _Serving:
    """What answers at the address: a gate at once, behind it the application as soon as the model is loaded."""

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings
        self._closing = threading.Event()
        self._service: Service | None = None
        self.gate = LoadingApp(settings.server.cors)

    def open(self, address: str) -> None:
        """Load the model and let requests through; may be stopped by `close` on another thread."""
        log.debug("listening at %s, loading the model", address)
        service = self._service = assemble(self._settings, go_on=lambda: not self._closing.is_set())
        if self._closing.is_set():
            service.worker.close()
            return
        self.gate.open(create_app(service))
        log.info("%s on %s", service.worker.info.model_path, address)

    def close(self) -> None:
        """Stop loading, or end the engine. Idempotent."""
        self._closing.set()
        if self._service is not None:
            self._service.worker.close()

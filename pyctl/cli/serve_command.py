"""`pyctl serve`: llama-server's HTTP API at an address."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import webbrowser

from pyctl.cli.arguments import CommandSettings
from pyctl.cli.assemble import assemble, found
from pyctl.cli.defaults import with_directory
from pyctl.cli.doctor_command import log_findings
from pyctl.cli.logs import start_log
from pyctl.cli.ready import Addresses, cache_text, ready_text
from pyctl.errors import EngineError, PyctlError
from pyctl.llama import devices, gpus
from pyctl.server.app import create_app, create_loading_app
from pyctl.server.body import ChatBody
from pyctl.server.lifecycle import LoadingApp, bind, leave, serve
from pyctl.server.memory import share_heaps
from pyctl.server.prepare import prepare_warm_up
from pyctl.server.service import Service
from pyctl.setup import unused_card

__all__ = ["open_in_browser", "run_serve"]

log = logging.getLogger("pyctl")


def open_in_browser(address: str) -> None:
    """Open ``address`` if there is a screen to show it on; returns at once.

    Without one, browsers for terminals would be started, in the middle of the log.
    """
    has_screen = sys.platform == "darwin" or any(map(os.environ.get, ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")))
    if not address or not has_screen:
        log.warning("--open: no browser found, the page is at %s", address or "no address for a browser")
        return
    threading.Thread(target=_open, args=(address,), name="pyctl-open", daemon=True).start()


def _open(address: str) -> None:
    if not webbrowser.open(address):
        log.warning("--open: cannot start a browser, the page is at %s", address)


def run_serve(settings: CommandSettings) -> int:
    """Serve until a signal; returns the exit code: 1 if the engine failed, or could not write all it had to."""
    share_heaps()
    start_log(settings.log, settings.warnings)
    if not any(device.is_gpu for device in devices()) and (line := unused_card()):
        log.warning("%s", line)
    listen, code = settings.listen, 0
    with bind(listen.hosts, listen.port) as sockets:
        # Before requests are taken: Ctrl-C must end a download.
        serving = _Serving(found(with_directory(settings)))
        try:
            serve(serving.gate, sockets, listen, on_ready=serving.run, on_stop=serving.close)
        except EngineError as error:
            log.critical("the server exits: %s", error)
            code = 1
        finally:
            complete = serving.close()
    log.info("stopped%s", serving.saved_text)
    return leave(code if complete else 1)


class _Serving:
    """Answers at the address: a gate at once, and the application as soon as the model is loaded."""

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings
        self._closing = threading.Event()
        self._began = time.monotonic()
        self._service: Service | None = None
        self.gate = LoadingApp(create_loading_app(settings.server))

    def run(self, bound: str) -> None:
        """Load the model, let requests through, and wait for `close`, which another thread may call at any time.

        ``bound`` are the server's addresses. EngineError if the engine ends before.
        """
        log.debug("listening at %s, loading the model", bound)
        server = self._settings.server
        addresses = Addresses.of(bound, server.api_prefix)
        if self._settings.listen.open_page and server.has_page:
            open_in_browser(addresses.local and f"{addresses.local}/")
        elif self._settings.listen.open_page:
            log.warning("--open ignored: --no-ui or --path removes the page")
        service = self._service = assemble(self._settings, go_on=lambda: not self._closing.is_set())
        if self._closing.is_set():
            service.worker.close(unload=False)
            return
        service.worker.prepare()
        self.gate.open(create_app(service))
        for body in self._settings.replies.warm:
            try:
                service.worker.warm(prepare_warm_up(service, ChatBody.of(body)))
            except PyctlError as error:
                log.warning("--warm: %s", error)
        log_findings(self._settings)
        if not server.api_keys and (warning := addresses.open_text(bound)):
            log.warning("%s", warning)
        self._log_ready(service, addresses)
        service.worker.watch()

    def _log_ready(self, service: Service, addresses: Addresses) -> None:
        disk = self._settings.disk
        text = ready_text(
            time.monotonic() - self._began,
            addresses,
            has_page=self._settings.server.has_page,
            info=service.info,
            devices=[f"{gpu.description} ({gpu.name})" for gpu in gpus(self._settings.model)],
            cache=cache_text(service.admin.view().result().budget, disk.cache_dir, service.admin.stored()),
        )
        # Not as an argument: those stay in one line. Names in it are the user's own.
        log.info(text, extra={"strong": text.partition("\n")[0]})

    @property
    def saved_text(self) -> str:
        """What the log says of the cache directory after the end; "" without one."""
        saved = self._service.admin.n_saved if self._service is not None else None
        return "" if saved is None else ", 1 prefix saved" if saved == 1 else f", {saved:,} prefixes saved"

    def close(self) -> bool:
        """Stop loading, or end the engine; whether all is written that was to be kept. Idempotent."""
        self._closing.set()
        self.gate.close()
        # Requests that clients have given up may be tokenised still: `leave` ends the process with the model in it.
        return self._service is None or self._service.worker.close(unload=False)

"""The load of a model, which starts before the rest of a server is imported: llama.cpp then reads
weights while Python reads modules.

So this module imports no more than `prepare_model` needs: neither numpy, nor the cache, the engine
or the disk.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pyctl.cache.cache_settings import DiskSettings
from pyctl.cli.arguments import CommandSettings
from pyctl.cli.model_paths import with_model
from pyctl.cli.prepare_model import prepare_model

if TYPE_CHECKING:
    from pyctl.cli.load_model import LoadedModel

__all__ = ["ModelLoad"]

JOIN_SECONDS = 10.0
"""The time that a load may take to stop."""


class ModelLoad:
    """The load of one model on a thread, which starts at once.

    It fits the model into memory, then waits for `go_on`.
    """

    def __init__(self, settings: CommandSettings) -> None:
        """Start the load of the model that ``settings`` name."""
        self._settings = settings
        self._disk: Future[DiskSettings] = Future()
        self._stopping = threading.Event()
        self._result: Future[LoadedModel] = Future()
        self._is_taken = False
        self.started_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="pyctl-load", daemon=True)
        self._thread.start()

    def go_on(self, disk: DiskSettings) -> None:
        """Let the weights be loaded; ``disk`` has the cache directory that can be used."""
        self._disk.set_result(disk)

    def take(self) -> LoadedModel:
        """Wait for the model and return it to its new owner. Raises the errors of `load_model`."""
        model = self._result.result()
        self._is_taken = True
        return model

    def stop(self) -> None:
        """Let the load end early, with UnavailableError."""
        self._stopping.set()

    def close(self) -> None:
        """Stop the load, wait for its end, and free a model that was not taken.

        The process would otherwise end the libraries while their code runs.
        """
        self.stop()
        self._disk.cancel()
        self._thread.join(JOIN_SECONDS)
        if self._result.done() and not self._is_taken:
            with suppress(Exception, CancelledError):  # the load failed: there is no model
                self._result.result().close()

    def _run(self) -> None:
        try:
            settings = with_model(self._settings)
            prepared = prepare_model(settings)
            settings = replace(settings, disk=self._disk.result())
            # Another thread imports it meanwhile, with everything else that a server needs.
            from pyctl.cli.load_model import LoadMemory, finish_loading

            model = finish_loading(settings, prepared, self._report, LoadMemory())
        except BaseException as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(model)

    def _report(self, fraction: float) -> bool:
        """Return whether to continue after ``fraction`` of the weights."""
        return not self._stopping.is_set()

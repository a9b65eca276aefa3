"""The supervisor of a process with several models: loads and unloads them, and watches their
engines.
"""

from __future__ import annotations

import logging
import threading

from pyctl.engine.watchdog import WATCH_SECONDS
from pyctl.errors import EngineError, ModelError, PyctlError, UnavailableError
from pyctl.processes.process_memory import collect_all
from pyctl.server.models import Models, Progress, ServedModel, Status
from pyctl.text import without_addresses

__all__ = ["Supervisor"]

log = logging.getLogger("pyctl")

PROGRESS_STEP = 0.05
"""Fraction of loading between two events about it."""


class Supervisor:
    """The thread that loads the ``models`` that requests wait for.

    One thread loads and unloads, one model after the other, in the order of `LoadOrder`. The thread
    that calls `run` watches the engines meanwhile: a call for a device that failed may never
    return.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._left: dict[
            str, float
        ] = {}  # models unloaded for the one to be loaded, and when that started
        self._thread = threading.Thread(target=self._run, name="pyctl-models", daemon=True)

    def run(self) -> None:
        """Load the models of the start, then serve until `Models.close`.

        Raises EngineError if an engine fails.
        """
        models = self._models
        if models.only is not None:
            return models.only.worker.watch()
        self._thread.start()
        for model in models:
            if model.source.on_start:
                models.load(model)
        while not models.closing.wait(WATCH_SECONDS):
            try:
                for service in models.services:
                    service.worker.poll()
            except PyctlError as error:
                models.fail(error)
        if models.trouble is not None:
            raise models.trouble

    # -- the thread that loads
    # ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._models.closing.is_set():
            try:
                self.step()
            except Exception:
                if (
                    not self._models.closing.is_set()
                ):  # else calls of engines that close are cancelled
                    log.exception("the thread that loads models failed in one step")
                    self._models.closing.wait(1.0)

    def step(self) -> None:
        """Unload or load one model, or wait until something changes."""
        self._models.changed.clear()
        now = self._models.clock()
        order = self._models.order
        with self._models.lock:
            leaving = self._to_unload(now)
        if leaving is not None:
            return self._unload(*leaving)
        if self._models.is_reloading:
            self._adopt()
        with self._models.lock:
            name = order.next_model if not self._models.is_reloading else None
        if name is not None:
            model = self._models.get(name)
            try:
                # Before any model is unloaded for it: an invalid file affects no other model.
                has_room = order.is_empty or model.source.loader.fits()
            except Exception as error:
                return self._failed(model, error)
            with self._models.lock:
                is_full = order.is_full or not has_room
                victim = order.victim(now)
                if is_full and order.all_pinned:
                    return self._failed(
                        model,
                        ModelError("all loaded models are kept, and there is no room for one more"),
                    )
            if not is_full or order.is_empty:
                return self._load(model)
            if victim is not None:
                return self._unload(self._models.get(victim), "unloaded", for_another=True)
        elif not self._models.is_reloading:
            self._left = {}
        self._models.admit()
        with self._models.lock:
            seconds = self._seconds(now)
        if not self._models.closing.is_set():
            self._models.changed.wait(seconds)

    def _adopt(self) -> None:
        """Finish reloads, once the models that they replace or remove are unloaded."""
        if (adopted := self._models.adopt()) is None:
            return
        outdated, done = adopted
        names = {model.name for model in self._models}
        while outdated:
            model = outdated.pop(0)
            log.info(
                "%s %s",
                model.name,
                "has other settings or files" if model.name in names else "is gone",
            )
            _close(model)
            del model
        # Objects that threads still use, as to prepare a vocabulary, are freed at the next reload.
        collect_all()
        for future in done:
            future.set_result(None)

    def _to_unload(self, now: float) -> tuple[ServedModel, Status] | None:
        """Return a model to unload now, because of a client or its idle time, and its state
        then.
        """
        for model in self._models:
            since = self._models.order.idle_since(model.name)
            if model.unload_at is not None:
                if since is not None:
                    return model, "unloaded"
                if now >= model.unload_at and model.service is not None:
                    model.unload_at = now + model.source.stop_seconds
                    model.service.worker.end_requests(
                        UnavailableError(f"the model {model.name} was unloaded")
                    )
            if since is not None and 0 <= model.source.sleep_seconds <= now - since:
                return model, "sleeping"
        return None

    def _seconds(self, now: float) -> float | None:
        """Return the seconds until the thread has to check again without an event."""
        due = [model.unload_at - now for model in self._models if model.unload_at is not None]
        if (seconds := self._models.order.seconds(now)) is not None:
            due.append(seconds)
        for model in self._models:
            since = self._models.order.idle_since(model.name)
            if since is not None and model.source.sleep_seconds >= 0:
                due.append(since + model.source.sleep_seconds - now)
        return max(min(due), 0.0) if due else None

    def _load(self, model: ServedModel) -> None:
        """Load the model, or fail its waiting requests.

        The first load creates the service, later ones load its worker again. An error may mean that
        the files have changed: then the model is closed and loaded anew.
        """
        began = self._models.clock()
        source = model.source
        self._models.set_status(model, "loading")
        try:
            if model.service is None:
                service = source.loader.load(self._progress(model))
                if self._models.closing.is_set():
                    service.worker.close(unload=False)
                    return
                model.service = service
            else:
                model.service.worker.load().result()
        except Exception as error:
            if model.service is None or source.loader.is_current():
                return self._failed(model, error)
            # Its vocabulary and snapshots belong to the old files. Its requests wait for it to be
            # loaded anew.
            log.info("%s has other files", model.name)
            self._models.renew(model)
            _close(model)
            return collect_all()
        now = self._models.clock()
        model.load_seconds = now - began
        model.error = None
        unloaded = self._left
        self._left = {}
        n_kept = model.service.admin.n_kept().result()
        with self._models.lock:
            self._models.order.loaded(model.name, now, keeps=source.keeps)
            self._models.set_status(model, "loaded")
        self._models.admit()
        text = "switched to %s in %.1f s (weights %.1f s, %d conversations kept)"
        seconds = now - min([began, *unloaded.values()])
        log.info(
            text if unloaded else text.replace("switched to", "loaded"),
            model.name,
            seconds,
            now - began,
            n_kept,
        )

    def _unload(self, model: ServedModel, status: Status, *, for_another: bool = False) -> None:
        """Unload the model and set its ``status``, unless a request of it runs.

        The order admits no more requests before the worker unloads, which takes a while. An error
        ends the server: the memory may still be in use. With ``for_another`` the time counts to the
        switch to the next model.
        """
        began = self._models.clock()
        with self._models.lock:
            if self._models.order.n_running(model.name):
                return  # a request came after all
            self._models.order.stop_admitting(model.name)
        assert model.service is not None
        try:
            model.service.worker.unload().result()
        except Exception as error:
            self._models.fail(EngineError(f"cannot unload {model.name}: {error}"))
            return
        with self._models.lock:
            self._models.order.unloaded(model.name)
            model.unload_at = None
            self._models.set_status(model, status)
        if for_another:
            self._left[model.name] = began
        log.info("%s unloaded in %.1f s", model.name, self._models.clock() - began)

    def _failed(self, model: ServedModel, error: Exception) -> None:
        """Fail all requests that wait for ``model``, and reload the models unloaded for it; nothing
        at the end.
        """
        if self._models.closing.is_set():
            return
        reason = (
            error
            if isinstance(error, PyctlError)
            else ModelError(f"cannot load {model.name}: internal error")
        )
        if reason is not error:
            log.error("cannot load %s", model.name, exc_info=error)
        else:
            log.error("cannot load %s: %s", model.name, error)
            if (shown := without_addresses(str(error))) != str(error):  # clients get all else of it
                reason = ModelError(shown)
        with self._models.lock:
            model.error = reason
            model.failed_at = self._models.clock()
            self._models.set_status(model, "unloaded")
            self._models.fail_waiting(model.name, reason)
        unloaded = self._left
        self._left = {}
        for each in self._models:
            if each.name in unloaded and not self._models.order.is_loaded(each.name):
                self._load(each)

    def _progress(self, model: ServedModel) -> Progress:
        last = 0.0

        def report(fraction: float) -> bool:
            nonlocal last
            if fraction - last >= PROGRESS_STEP:
                last = fraction
                stage = {"stages": ["text_model"], "current": "text_model", "value": fraction}
                self._models.set_status(model, "loading", progress=stage)
            return not self._models.closing.is_set()

        return report


def _close(model: ServedModel) -> None:
    """End the engine of a model that is not loaded, and its cache."""
    if model.service is not None:
        model.service.worker.close()

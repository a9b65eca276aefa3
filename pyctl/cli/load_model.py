"""The load of a model, which starts before the rest of a server is imported: llama.cpp then reads
weights while Python reads modules.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from pyctl.cache.ram_budget import RamBudget
from pyctl.cache.resume_points import ANYWHERE
from pyctl.cli.arguments import CommandSettings
from pyctl.cli.defaults import cache_budget
from pyctl.cli.exact_fingerprint import exact_fingerprint
from pyctl.cli.logs import LoadProgress
from pyctl.cli.model_paths import check_files, with_model
from pyctl.cli.open_disk import open_directory
from pyctl.disk.directory import CacheDirectory
from pyctl.errors import ModelError
from pyctl.llama.library.pinned_memory import reserve_pinned
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.memory_plan import MemoryPlan
from pyctl.llama.settings.resolved import Resolved

__all__ = ["LoadMemory", "LoadedModel", "ModelLoad", "Progress", "load_model"]

log = logging.getLogger("pyctl")

Progress: TypeAlias = Callable[[float], bool]
"""Gets fractions from 0 to 1; returns whether to continue."""

JOIN_SECONDS = 10.0
"""The time that a load may take to stop."""


@dataclass
class LoadMemory:
    """The memory that the models of a process share while they load.

    Attributes:
        ram: The budget of several models; None for one model.
        is_pinned: Whether memory for snapshots is being pinned already, which happens once for all.
        plan: The memory of the model that was loaded last.
    """

    ram: RamBudget | None = None
    is_pinned: bool = False
    plan: MemoryPlan | None = None


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model, to be assembled or closed.

    Attributes:
        settings: Its settings, with the paths of its files.
        loaded: The model.
        directory: The open cache directory, None without one.
        budget: The bytes of RAM for snapshots, None for no limit.
    """

    settings: CommandSettings
    loaded: Loaded
    directory: CacheDirectory | None
    budget: int | None

    def close(self) -> None:
        """Free the model, and close the directory."""
        self.loaded.backend.unload()
        if self.directory is not None:
            self.directory.close()


class ModelLoad:
    """The load of one model on a thread, which starts at once."""

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings
        self._stopping = threading.Event()
        self._result: Future[LoadedModel] = Future()
        self._is_taken = False
        self.started_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="pyctl-load", daemon=True)
        self._thread.start()

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
        self._thread.join(JOIN_SECONDS)
        if self._result.done() and not self._is_taken:
            with suppress(Exception):  # the load failed: there is no model
                self._result.result().close()

    def _run(self) -> None:
        try:
            model = load_model(
                self._settings, lambda fraction: not self._stopping.is_set(), LoadMemory()
            )
        except BaseException as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(model)


def load_model(settings: CommandSettings, report: Progress, memory: LoadMemory) -> LoadedModel:
    """Return the model that ``settings`` name, loaded; ``report`` returns whether to continue.

    Raises ConfigError and ModelError if it cannot be loaded, UnavailableError if ``report`` stopped
    it.
    """
    settings = with_model(settings)
    check_files(settings)
    directory = open_directory(settings.disk)
    try:
        loaded, budget = _load(settings, report, memory, directory)
    except BaseException:
        if directory is not None:
            directory.close()
        raise
    return LoadedModel(settings, loaded, directory, budget)


def _load(
    settings: CommandSettings,
    report: Progress,
    memory: LoadMemory,
    directory: CacheDirectory | None,
) -> tuple[Loaded, int | None]:
    """Return the model and the bytes of RAM for snapshots, None for no limit, with memory made
    ready for those that ``directory`` has.
    """
    budget = memory.ram.n_bytes if memory.ram is not None else cache_budget(settings.cache, None)

    def announce(resolved: Resolved) -> None:
        """Log the plan of memory and its warnings, and start to pin memory for snapshots.

        The budget of the cache follows from the plan, so it comes first: all later lines depend on
        it.
        """
        nonlocal budget
        plan = resolved.memory
        memory.plan = plan
        budget = cache_budget(settings.cache, plan) if memory.ram is None else budget
        table = "\n  ".join(plan.lines(budget))
        log.info(f"memory:\n  {table}")
        for row in resolved.values:
            log.debug("%s %s: %s", row.flag, row.value, row.reason)
        for warning in plan.warnings(budget):
            log.warning("%s", warning)
        if settings.model.n_gpu_layers != 0 and not memory.is_pinned:
            # While the model loads; snapshots that a restart restores go into memory that is ready
            # for it.
            n_stored = 0
            unwritten = 0
            if directory is not None:
                n_stored = directory.n_bytes
                unwritten = settings.engine.device.max_unwritten(budget)
            reserve_pinned(budget, n_stored, unwritten)
            memory.is_pinned = True

    with LoadProgress(settings.model.path) as progress:

        def show(fraction: float) -> bool:
            progress.show(fraction)
            return report(fraction)

        load_with = partial(
            load, settings.model, show, announce, settings.drafts, pool=settings.pool
        )
        try:
            loaded = load_with(settings.vision)
        except ModelError as error:
            if not (settings.vision.is_optional and settings.vision.mmproj_path):
                raise
            log.warning("images disabled: %s", error)
            loaded = load_with()
    return _checked(settings, loaded), budget


def _checked(settings: CommandSettings, loaded: Loaded) -> Loaded:
    """Check that with --exact the model is known to come back to the same bits, or is not
    cached.
    """
    backend = loaded.backend
    if settings.engine.exact:
        backend.check_restoring()
        info = replace(loaded.info, n_ctx=backend.facts.n_ctx, memory=backend.memory_text)
        loaded = replace(loaded, info=replace(info, fingerprint=exact_fingerprint(loaded)))
    is_usual = backend.memory.shape.resume_points == ANYWHERE and not backend.memory.kv.reason
    level = logging.DEBUG if is_usual else logging.WARNING
    log.log(level, "memory of the model: %s", loaded.info.memory)
    return loaded

"""The load of a model that settings name, with the cache directory for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec

from pyctl.cache.ram_budget import RamBudget
from pyctl.cache.resume_points import ANYWHERE
from pyctl.cli.arguments import CommandSettings
from pyctl.cli.defaults import cache_budget
from pyctl.cli.exact_fingerprint import exact_fingerprint
from pyctl.cli.logs import LoadProgress
from pyctl.cli.model_paths import with_model
from pyctl.cli.open_disk import open_directory
from pyctl.cli.prepare_model import prepare_model, prepare_without_images
from pyctl.disk.directory import CacheDirectory
from pyctl.errors import ModelError
from pyctl.llama.library.pinned_memory import reserve_pinned
from pyctl.llama.loader import Loaded, finish_load
from pyctl.llama.prepare_load import PreparedLoad
from pyctl.llama.settings.memory_plan import MemoryPlan
from pyctl.llama.settings.resolved import Resolved

__all__ = ["LoadMemory", "LoadedModel", "Progress", "finish_loading", "load_model"]

log = logging.getLogger("pyctl")

Progress: TypeAlias = Callable[[float], bool]
"""Gets fractions from 0 to 1; returns whether to continue."""


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


class LoadedModel(msgspec.Struct, frozen=True):
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


def load_model(settings: CommandSettings, report: Progress, memory: LoadMemory) -> LoadedModel:
    """Return the model that ``settings`` name, loaded; ``report`` returns whether to continue.

    Raises ConfigError and ModelError if it cannot be loaded, UnavailableError if ``report`` stopped
    it.
    """
    settings = with_model(settings)
    return finish_loading(settings, prepare_model(settings), report, memory)


def finish_loading(
    settings: CommandSettings, prepared: PreparedLoad, report: Progress, memory: LoadMemory
) -> LoadedModel:
    """Return the model of ``prepared``, loaded, as `load_model` does; ``settings`` have its path.

    Raises the errors of `load_model`.
    """
    directory = open_directory(settings.disk)
    try:
        loaded, budget = _load(settings, prepared, report, memory, directory)
    except BaseException:
        if directory is not None:
            directory.close()
        raise
    return LoadedModel(settings, loaded, directory, budget)


def _load(
    settings: CommandSettings,
    prepared: PreparedLoad,
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

        announce(prepared.resolved)
        try:
            loaded = finish_load(prepared, show)
        except ModelError as error:
            if not (settings.vision.is_optional and prepared.encoder is not None):
                raise
            prepared = prepare_without_images(settings, error)
            announce(prepared.resolved)
            loaded = finish_load(prepared, show)
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

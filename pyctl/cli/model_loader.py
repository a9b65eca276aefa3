"""The loading of one of several models, and whether it has room."""

from __future__ import annotations

from dataclasses import replace

from pyctl.cli.arguments import CommandSettings
from pyctl.cli.assemble import LoadContext, assemble
from pyctl.cli.model_paths import check_files, file_states, resolve_files
from pyctl.llama.fit.memory_fit import has_room, required_memory
from pyctl.llama.settings.memory_plan import MemoryPlan
from pyctl.server.app_state import HttpService
from pyctl.server.models import Progress

__all__ = ["ModelLoader"]


class ModelLoader:
    """The loader of one of several models; ``settings`` are its own. The thread that loads models
    calls it.
    """

    def __init__(self, settings: CommandSettings, context: LoadContext) -> None:
        self._settings = settings
        self._load_context = context
        self._is_found = False
        self._plan: MemoryPlan | None = None
        self._is_loaded = False
        self._loaded: list[tuple[int, int, int]] = []

    def load(self, report: Progress) -> HttpService:
        """Load the model and return a new service of it."""
        settings = self._find()
        self._loaded = file_states(settings)
        service = assemble(settings, report, self._load_context)
        self._plan = self._load_context.memory.plan
        self._is_loaded = True
        return service

    def is_current(self) -> bool:
        """Return whether the files have not changed since the last `load`. Files that cannot be
        read now count as unchanged.
        """
        files = file_states(self._settings) if self._loaded else []
        return not files or files == self._loaded

    def fits(self) -> bool:
        """Return whether the model has room next to those that are loaded, with the whole context
        that it requests.

        Raises ConfigError if the model cannot be loaded.
        """
        settings = self._find()
        check_files(settings)
        if not self.is_current():
            self._plan = None
            self._is_loaded = False
        if settings.pool.n_pooled and self._plan is None:
            return False  # a pool takes the cells that are free
        if self._plan is None:
            self._plan = required_memory(settings.model, settings.drafts, settings.vision)
        return has_room(self._plan, is_known=self._is_loaded)

    def _find(self) -> CommandSettings:
        if not self._is_found:
            alias = self._settings.model.alias
            settings = resolve_files(self._settings)
            self._settings = replace(settings, model=replace(settings.model, alias=alias))
            self._is_found = True
        return self._settings

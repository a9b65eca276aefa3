"""Loading of models: after `prepare_load`, the weights, contexts and draft models."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from pyctl.engine.backend import EngineInfo
from pyctl.llama.draft.draft_model import Attach, DraftModel
from pyctl.llama.fingerprint import fingerprint, shared_split
from pyctl.llama.images.image_encoder import ImageEncoder
from pyctl.llama.library.bindings import api
from pyctl.llama.library.llama_tokenizer import LlamaTokenizer
from pyctl.llama.llama_backend import ContextLimits, LlamaBackend, ModelOpener, OpenModel
from pyctl.llama.memory.context_memory import ContextMemory
from pyctl.llama.model_info import describe_model
from pyctl.llama.open_draft import open_draft
from pyctl.llama.open_model import load_model, make_context, open_embedder
from pyctl.llama.prepare_load import PreparedLoad, prepare_load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.memory_plan import MemoryPlan
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.params import ModelParams, context_params, without_texts
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.llama.settings.resolved import Resolved
from pyctl.llama.settings.vision_settings import VisionSettings

__all__ = ["Loaded", "finish_load", "load"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A loaded model and the settings in use."""

    backend: LlamaBackend
    info: EngineInfo
    resolved: Resolved
    images: ImageEncoder | None = None  # `picture` is thread-safe

    @property
    def tokenizer(self) -> LlamaTokenizer:
        """The tokenizer, which stays usable while the model is unloaded."""
        return self.backend.tokenizer

    @property
    def drafts(self) -> DraftSettings:
        """The settings of the draft sources in use."""
        return self.resolved.drafts

    @property
    def split_mode(self) -> str:
        """The way in which GPUs share the model, see `shared_split`."""
        return shared_split(self.resolved)


def load(
    settings: ModelSettings,
    progress: Callable[[float], bool] | None = None,
    announce: Callable[[Resolved], None] | None = None,
    drafts: DraftSettings | None = None,
    vision: VisionSettings | None = None,
    *,
    pool: PoolSettings | None = None,
) -> Loaded:
    """Load the model, its context, and optionally a draft model, a vision encoder and a pool.

    ``announce`` receives the settings in use before allocation. ``progress`` receives fractions
    from 0 to 1 and returns whether to continue. The tokenizer has its own copy of the vocabulary,
    read with the weights and usable while the model is unloaded. Raises ModelError if a file is
    missing, damaged, unsupported or too large for memory, and UnavailableError if ``progress``
    stopped loading.
    """
    prepared = prepare_load(settings, drafts, vision, pool=pool)
    if announce is not None:
        announce(prepared.resolved)
    return finish_load(prepared, progress)


def finish_load(prepared: PreparedLoad, progress: Callable[[float], bool] | None = None) -> Loaded:
    """Load the weights of ``prepared`` and everything that needs them: the second half of `load`,
    whose ``progress`` and errors it has.
    """
    resolved = prepared.resolved
    encoder = prepared.encoder
    opener = _Opener(resolved, prepared.vocabulary, progress, sees_images=encoder is not None)
    memory = ContextMemory(resolved.memory.pool, marks=resolved.drafts.drafts_from_text)
    limits = ContextLimits(resolved.n_outputs, resolved.batch_cost, resolved.max_tokens)
    backend = LlamaBackend(opener, memory, limits, encoder)  # loads the weights
    _warn_of_slow_parts(backend, resolved)
    return Loaded(backend, describe_model(backend, resolved), resolved, encoder)


class _Opener(ModelOpener):
    """Opens the model that ``resolved`` names, with the tokenizer of ``vocabulary``.

    ``progress`` receives fractions from 0 to 1. The weights come without the texts of tokens, which
    the tokenizer has, unless another model looks them up in this one.
    """

    def __init__(
        self,
        resolved: Resolved,
        vocabulary: Future[LlamaTokenizer],
        progress: Callable[[float], bool] | None,
        *,
        sees_images: bool,
    ) -> None:
        self._resolved = resolved
        self._vocabulary = vocabulary
        self._progress = progress
        # Encoders of images and draft models look token texts up in this model; without them a
        # draft model is refused as one of another vocabulary.
        self._needs_token_texts = sees_images or bool(resolved.drafts.draft_path)

    def open(self) -> OpenModel:
        resolved = self._resolved
        settings = resolved.model if self._needs_token_texts else without_texts(resolved)
        params = ModelParams(settings, with_head=resolved.drafts.uses_own_head)
        of_context = context_params(resolved, resolved.n_cells)
        with ExitStack() as undone:
            model = load_model(resolved.path, params, self._progress)
            undone.callback(api.llama_model_free, model)
            # Before the context is made: if the vocabulary fails, only the model is to be freed.
            tokenizer = self._vocabulary.result()
            ctx = make_context(model, resolved.model.lora, of_context)
            undone.callback(api.llama_free, ctx)
            embedder = open_embedder(model, resolved) if resolved.model.embeddings else None
            undone.pop_all()
        return OpenModel(model, ctx, tokenizer, embedder)

    def open_drafts(self, model: Any, ctx: Any, attach: Attach) -> DraftModel | None:
        return open_draft(self._resolved, model, ctx, attach)

    def identify(self, backend: LlamaBackend) -> str:
        return fingerprint(backend, self._resolved)


def _warn_of_slow_parts(backend: LlamaBackend, resolved: Resolved) -> None:
    """Log the settings that slow the model down, and remedies."""
    if not backend.facts.is_async:
        _warn_of_blocking_copies(resolved.memory)
    has_head = api.llama_model_n_layer_nextn(backend.model) > 0
    if has_head and not resolved.drafts.draft_types:
        log.info("the model has a draft head: --spec-type draft-mtp enables it")


def _warn_of_blocking_copies(plan: MemoryPlan) -> None:
    """Warn that copies of rows and states block evaluation, if GPUs hold some of them."""
    holders = [place for place in plan.places if place.usage.kv or place.usage.states]
    if any(place.is_gpu for place in holders):
        log.warning(
            "saving and restoring block evaluation: K, V and states are on %s",
            " and ".join(place.name for place in holders),
        )

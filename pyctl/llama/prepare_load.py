"""The first half of a load, which needs no weights: the settings that fit into memory.

The process is still importing the second half, `pyctl.llama.loader`, while this one runs; so it
imports neither the engine's ports nor numpy.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from pyctl.llama.fit.fitting import fit_all
from pyctl.llama.fit.resolve import resolve
from pyctl.llama.library import extension
from pyctl.llama.library.bindings import api
from pyctl.llama.library.device_loss import shut_down_lost_device, when_aborted
from pyctl.llama.library.devices import start_backends
from pyctl.llama.read_vocabulary import read_vocabulary
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import NUMA, ModelSettings
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.llama.settings.resolved import NO_DRAFTS, Resolved
from pyctl.llama.settings.vision_settings import VisionSettings

if TYPE_CHECKING:
    from pyctl.llama.images.image_encoder import ImageEncoder
    from pyctl.llama.library.llama_tokenizer import LlamaTokenizer

__all__ = ["PreparedLoad", "prepare_load"]

log = logging.getLogger(__name__)


class PreparedLoad(NamedTuple):
    """A model whose weights are still to be loaded.

    Attributes:
        resolved: The settings in use, with the plan of memory.
        vocabulary: The tokenizer, which is being read. Raises ModelError.
        encoder: The vision encoder, which opens with the model; None without one.
    """

    resolved: Resolved
    vocabulary: Future[LlamaTokenizer]
    encoder: ImageEncoder | None


def prepare_load(
    settings: ModelSettings,
    drafts: DraftSettings | None = None,
    vision: VisionSettings | None = None,
    *,
    pool: PoolSettings | None = None,
) -> PreparedLoad:
    """Start llama.cpp, begin to read the vocabulary, and fit the settings into memory.

    Raises ModelError if a file is missing, damaged, unsupported or too large for memory.
    """
    _start(settings)
    requested = resolve(settings, drafts or NO_DRAFTS)
    vocabulary = read_vocabulary(settings)
    encoder = _make_encoder(requested, vision) if _can_see(vision) else None
    encoder_memory = encoder.usage if encoder is not None else None
    resolved = fit_all(requested, encoder_memory, pool if _can_pool(pool) else None)
    return PreparedLoad(resolved, vocabulary, encoder)


def _start(settings: ModelSettings) -> None:
    """Start llama.cpp's backends."""
    start_backends()
    when_aborted(shut_down_lost_device)
    if settings.numa:
        api.llama_numa_init(NUMA[settings.numa])


def _can_see(vision: VisionSettings | None) -> TypeGuard[VisionSettings]:
    """Return whether a vision encoder is named, and can be used."""
    if vision is None or not vision.mmproj_path:
        return False
    if extension.core is None:
        log.error("--mmproj disabled: it requires the extension")
    return extension.core is not None


def _make_encoder(requested: Resolved, vision: VisionSettings) -> ImageEncoder:
    # Most models have none, and its module needs numpy.
    from pyctl.llama.images.make_encoder import make_encoder

    return make_encoder(requested, vision)


def _can_pool(pool: PoolSettings | None) -> bool:
    """Return whether a pool is requested, and can be used."""
    if pool is None or not pool.n_pooled:
        return False
    if extension.pool is None:
        log.error("--kv-pool disabled: it requires the extension")
    return extension.pool is not None

"""Opening of models, their contexts and their embedders, as settings name them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pyctl.errors import ModelError, UnavailableError
from pyctl.llama.embedder import Embedder
from pyctl.llama.library import extension
from pyctl.llama.library.bindings import api
from pyctl.llama.library.devices import metadata_text
from pyctl.llama.library.library_log import forget_log_errors, last_log_error
from pyctl.llama.settings.model_settings import POOLING
from pyctl.llama.settings.params import ModelParams, context_params
from pyctl.llama.settings.resolved import Resolved
from pyctl.settings.limit import limit

__all__ = ["load_model", "make_context", "open_embedder"]

log = logging.getLogger(__name__)

MAX_EMBEDDED = limit(
    8192, "tokens of a text that is ranked, or embedded by its end", "400", "request", "tokens"
)


def load_model(
    path: Path, params: ModelParams, progress: Callable[[float], bool] | None = None
) -> Any:
    """Return the llama_model of the file ``path``. ``progress`` receives fractions from 0 to 1.

    Raises ModelError if it cannot be loaded, and UnavailableError if ``progress`` stopped loading.
    """
    if progress is not None:
        params.report(progress)
    model = params.load(str(path))
    if params.stopped:
        if model:
            api.llama_model_free(model)
        raise UnavailableError("loading was stopped")
    _release_copied(model)
    return model


def _release_copied(model: Any) -> None:
    """Take the pages of the file whose weights have a copy elsewhere out of this process: repacked
    weights would count twice, and those on a GPU once.
    """
    if extension.core is None:
        return
    n_bytes = extension.core.release_copied(model)
    log.debug("%d bytes of the file have a copy in other memory", n_bytes)


Adapters: TypeAlias = Sequence[tuple[str, float]]
"""LoRA adapters: path, scale."""


def make_context(model: Any, adapters: Adapters, params: Any) -> Any:
    """Return a llama_context of ``model`` with ``adapters``. Raises ModelError."""
    forget_log_errors()
    ctx = api.llama_init_from_model(model, params)
    if not ctx:
        reason = last_log_error("it does not fit into memory")
        raise ModelError(
            f"cannot make the context of {params.n_ctx} tokens: {reason}; try a smaller --ctx-size"
        )
    try:
        _apply_adapters(model, ctx, adapters)
    except BaseException:
        api.llama_free(ctx)
        raise
    return ctx


def _apply_adapters(model: Any, ctx: Any, adapters: Adapters) -> None:
    """Load ``adapters``, which the model then owns, and apply them to ``ctx``."""
    if not adapters:
        return
    forget_log_errors()
    handles = []
    for path, _ in adapters:
        handle = api.llama_adapter_lora_init(model, str(Path(path).expanduser()).encode())
        if not handle:
            raise ModelError(
                f"cannot load the adapter {path}: {last_log_error('llama.cpp gave no reason')}"
            )
        handles.append(ctypes.cast(handle, ctypes.c_void_p).value)
    array = (ctypes.c_void_p * len(handles))(*handles)
    scales = (ctypes.c_float * len(handles))(*(scale for _, scale in adapters))
    pointer = ctypes.cast(array, ctypes.POINTER(api.llama_adapter_lora_p_ctypes))
    if api.llama_set_adapters_lora(ctx, pointer, len(handles), scales) != 0:
        raise ModelError(f"cannot use the adapters: {last_log_error('llama.cpp gave no reason')}")


def open_embedder(model: Any, resolved: Resolved) -> Embedder:
    """Return an embedder of ``model``, which evaluates one text at a time in another context.

    With pooling by the last token, texts may exceed a batch.
    """
    settings = resolved.model
    n_ubatch = settings.n_ubatch
    architecture = metadata_text(model, "general.architecture")
    of_model = metadata_text(model, f"{architecture}.pooling_type")
    pooling = str(POOLING.get(settings.pooling, of_model))
    n_ctx = n_ubatch
    if pooling in (str(POOLING["last"]), str(POOLING["rank"])):
        n_ctx = max(min(settings.n_ctx or MAX_EMBEDDED, MAX_EMBEDDED), n_ubatch)
    params = context_params(resolved.embedder, n_ctx)
    # Without pooling every token has an output.
    params.n_outputs_max = n_ubatch
    params.n_outputs_max_per_seq = n_ubatch
    params.embeddings = True
    params.pooling_type = POOLING.get(settings.pooling, -1)
    return Embedder(model, make_context(model, settings.lora, params))

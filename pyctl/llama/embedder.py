"""Embeddings of texts, by a context that does nothing else."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyctl.errors import ContextSizeError, EngineError, RequestError
from pyctl.llama.library.batch import Batch
from pyctl.llama.library.bindings import api
from pyctl.llama.settings.model_settings import POOLING
from pyctl.prompt import Tokens

__all__ = ["Embedder"]


class Embedder:
    """The embedding of one text at a time on ``ctx``, a context with embeddings, which it owns."""

    def __init__(self, model: Any, ctx: Any) -> None:
        self._ctx = ctx
        self._memory = api.llama_get_memory(ctx)
        kind = int(api.llama_pooling_type(ctx))
        self.pooling = next((name for name, value in POOLING.items() if value == kind), "")
        n_classes = api.llama_model_n_cls_out(model)
        n_embd = api.llama_model_n_embd_out(model)
        self._width = int(n_classes if self.pooling == "rank" else n_embd)
        self._n_batch = int(api.llama_n_ubatch(ctx))
        # If only the last token counts and attention is causal, a text may span several batches.
        is_causal = hasattr(api, "llama_get_causal_attn") and api.llama_get_causal_attn(
            ctx
        )  # since 0.3.35
        is_long = self.pooling in ("last", "rank") and bool(self._memory) and is_causal
        self.n_max = int(api.llama_n_ctx(ctx)) if is_long else self._n_batch
        self._batch = Batch(self._n_batch)

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        """Return embeddings of ``tokens``, shape (1, width), or (n, width) without pooling; for
        "rank" (1, classes).

        Raises ContextSizeError or RequestError if they exceed the context or a batch, EngineError
        if llama.cpp fails.
        """
        n = int(tokens.size)
        if n > self.n_max > self._n_batch:
            raise ContextSizeError(n, self.n_max)
        if n > self.n_max:
            raise RequestError(
                f"input ({n} tokens) is too large to process. increase the physical batch size "
                f"(current batch size: {self.n_max})"
            )
        if self._memory:
            api.llama_memory_clear(self._memory, True)
        for start in range(0, n, self._n_batch):
            self._batch.fill(0, tokens[start : start + self._n_batch], start, every=True)
            code = api.llama_decode(self._ctx, self._batch.struct)
            if code != 0:
                raise EngineError(f"evaluation failed: llama_decode returned {code}")
        if self.pooling == "none":
            return np.stack(
                [self._vector(api.llama_get_embeddings_ith(self._ctx, i)) for i in range(n)]
            )
        return self._vector(api.llama_get_embeddings_seq(self._ctx, 0))[None]

    def close(self) -> None:
        """Free the context."""
        api.llama_free(self._ctx)

    def _vector(self, pointer: Any) -> NDArray[np.float32]:
        if not pointer:
            raise EngineError("llama.cpp returned no embeddings")
        values = np.ctypeslib.as_array(
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self._width,)
        )
        return np.array(values, np.float32)

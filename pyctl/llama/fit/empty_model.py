"""Models without weights, whose contexts show the memory that llama.cpp would take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from pyctl.errors import ModelError
from pyctl.llama.fit import breakdown
from pyctl.llama.fit.breakdown import Parts, measure_parts, tensor_layer
from pyctl.llama.library.bindings import api
from pyctl.llama.library.devices import metadata_text
from pyctl.llama.library.library_log import captured_log, forget_log_errors, last_log_error
from pyctl.llama.settings.model_settings import LOAD_MODES
from pyctl.llama.settings.params import (
    ModelParams,
    context_params,
    head_params,
    layer_bytes,
    without_texts,
)
from pyctl.llama.settings.resolved import Resolved

__all__ = ["ContextCost", "EmptyModel", "empty_model"]


class ContextCost(NamedTuple):
    """The memory that a context would take.

    Attributes:
        n_cells: The cells of the context.
        n_states: The states of a sequence: the last one and the earlier ones.
        parts: The bytes by llama.cpp's names of devices, "" for the host.
    """

    n_cells: int
    n_states: int
    parts: Mapping[str, Parts]


class EmptyModel:
    """A llama_model without weights, and its contexts, which have no memory.

    Attributes:
        handle: The llama_model.
        path: The model's file.
        n_ctx_train: The tokens of the model's own context.
        n_layers: The layers in the file, including a head's.
        layer_bytes: The average bytes of the weights of a layer.
        layer_devices: llama.cpp's names of the layers' devices; empty without the extension.
        tensors: The bytes of the tensors in use by name.
        file_head: The metadata of the model's first file.
    """

    def __init__(self, handle: Any, resolved: Resolved, *, with_head: bool) -> None:
        """Read the sizes of the llama_model ``handle``, which was loaded as ``resolved`` has it."""
        self.handle = handle
        self.path = resolved.model.path
        self._resolved = resolved
        self.file_head = resolved.file_head
        self.n_ctx_train = int(api.llama_model_n_ctx_train(handle))
        n_own_layers = int(api.llama_model_n_layer(handle))
        self.n_layers = n_own_layers + int(api.llama_model_n_layer_nextn(handle))
        self.layer_bytes = layer_bytes(handle)
        n_used = self.n_layers if with_head else n_own_layers
        self.tensors: Mapping[str, int] = {
            name: size for name, size in resolved.tensors.items() if tensor_layer(name) < n_used
        }
        core = breakdown.core
        self.layer_devices: tuple[str, ...] = ()
        if core is not None:
            self.layer_devices = tuple(core.layer_devices(handle))

    def metadata(self, key: str) -> str:
        """Return the value of ``key`` in the model's file as text; empty if there is none."""
        return metadata_text(self.handle, key)

    @contextmanager
    def context(self, n_ctx: int) -> Iterator[Any]:
        """Open a context of ``n_ctx`` tokens. Raises ModelError if llama.cpp refuses it."""
        with self._opened(context_params(self._resolved, n_ctx)) as ctx:
            yield ctx

    @contextmanager
    def head_context(self, head: Resolved, trunk: Any, n_ctx: int) -> Iterator[Any]:
        """Open the context of the draft head ``head`` on the context ``trunk``, for ``n_ctx``
        tokens of that. Raises ModelError if llama.cpp refuses it.
        """
        with self._opened(head_params(head, trunk, n_ctx)) as ctx:
            yield ctx

    @contextmanager
    def _opened(self, params: Any) -> Iterator[Any]:
        forget_log_errors()
        with captured_log():
            ctx = api.llama_init_from_model(self.handle, params)
        if not ctx:
            reason = last_log_error("llama.cpp gave no reason")
            raise ModelError(f"cannot make the context: {reason}")
        try:
            yield ctx
        finally:
            api.llama_free(ctx)

    def cost(self, ctx: Any) -> ContextCost:
        """Return the memory that the context ``ctx`` of this model would take."""
        return ContextCost(
            n_cells=int(api.llama_n_ctx(ctx)),
            # llama_memory_recurrent allocates the last state and the earlier ones of a sequence
            # side by side.
            n_states=int(api.llama_n_rs_seq(ctx)) + 1,
            parts=measure_parts(ctx, self._resolved, self.tensors),
        )


@contextmanager
def empty_model(resolved: Resolved, *, with_head: bool) -> Iterator[EmptyModel]:
    """Open the model of ``resolved`` without weights and texts of tokens. Raises ModelError as
    loading would.
    """
    params = ModelParams(without_texts(resolved), with_head=with_head)
    params.struct.no_alloc = True
    params.struct.use_mmap = False  # releases before 0.3.35 would map the file
    params.struct.load_mode = LOAD_MODES["none"]
    with captured_log():
        handle = params.load(resolved.model.path)
    try:
        yield EmptyModel(handle, resolved, with_head=with_head)
    finally:
        with captured_log():
            api.llama_model_free(handle)

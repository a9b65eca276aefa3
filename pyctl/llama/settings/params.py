"""llama.cpp's parameters of models and contexts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyctl.errors import ModelError
from pyctl.llama.library.bindings import api
from pyctl.llama.library.devices import TYPES, devices, missing_text
from pyctl.llama.library.library_log import forget_log_errors, last_log_error
from pyctl.llama.settings.model_settings import (
    FLASH_MODES,
    LAZY_MODES,
    LOAD_MODES,
    ROPE_SCALING,
    SPLIT_MODES,
    ModelSettings,
)
from pyctl.llama.settings.resolved import Resolved, padded

__all__ = [
    "ModelParams",
    "context_params",
    "draft_cells",
    "head_params",
    "layer_bytes",
    "without_texts",
]


class _Placement(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class ModelParams:
    """A llama_model_params in ``struct``, and the memory that it points to. The object must outlive
    the load.

    ``stopped``: the callback of `report` ended the load. ``with_head`` also loads the draft head.
    Raises ModelError for unknown devices and buffer types.
    """

    def __init__(self, settings: ModelSettings, *, with_head: bool = False) -> None:
        """Fill ``struct`` from ``settings``. Raises ModelError for unknown devices and buffer
        types, and for more shares of a tensor split than devices.
        """
        self._kept: list[object] = []
        self.stopped = False
        self.struct = params = api.llama_model_default_params()
        params.n_gpu_layers = settings.n_gpu_layers
        params.load_mtp = with_head
        params.split_mode = SPLIT_MODES[settings.split_mode]
        params.main_gpu = settings.main_gpu
        params.load_mode = LOAD_MODES[settings.load_mode]
        params.lazy_mode = LAZY_MODES[settings.lazy_mode]
        params.check_tensors = settings.check_tensors
        params.use_extra_bufts = settings.repack
        params.no_host = settings.no_host
        if settings.tensor_split:
            n_devices = api.llama_max_devices()
            if len(settings.tensor_split) > n_devices:
                raise ModelError(
                    f"--tensor-split has {len(settings.tensor_split)} shares for {n_devices} "
                    "devices"
                )
            params.tensor_split = (ctypes.c_float * n_devices)(*settings.tensor_split)
        if settings.devices:
            params.devices = self._devices(settings.devices)
        if settings.placements:
            params.tensor_buft_overrides = self._placements(settings)
        if settings.metadata:
            params.kv_overrides = self._metadata(settings.metadata)

    def load(self, path: str, what: str = "the model") -> Any:
        """Return the llama_model of the file ``path``. ModelError if that fails, but not if the
        load was stopped.
        """
        forget_log_errors()
        model = api.llama_model_load_from_file(path.encode(), self.struct)
        if not (model or self.stopped):
            reason = last_log_error("llama.cpp gave no reason")
            raise ModelError(f"cannot load {what} {path}: {reason}{missing_text(Path(path))}")
        return model

    def report(self, progress: Callable[[float], bool]) -> None:
        """Call ``progress`` with fractions from 0 to 1 during the load; it returns whether to
        continue.
        """

        def tell(fraction: float, _: ctypes.c_void_p) -> bool:
            self.stopped = not progress(fraction)
            return not self.stopped

        callback = api.llama_progress_callback(tell)
        self._kept.append(callback)
        self.struct.progress_callback = callback

    def _devices(self, names: tuple[str, ...]) -> Any:
        if names == ("none",):
            return self._pointer((ctypes.c_void_p * 1)(None))
        gpus = {device.name: device.handle for device in devices() if device.is_gpu}
        if unknown := [name for name in names if name not in gpus]:
            raise ModelError(
                f"--device: no device {unknown[0]}; found {', '.join(gpus) or 'only the CPU'}"
            )
        return self._pointer(
            (ctypes.c_void_p * (len(names) + 1))(*(gpus[name] for name in names), None)
        )

    def _placements(self, settings: ModelSettings) -> Any:
        buffers = {device.buffer_name: device.buffer_type for device in devices()}
        if unknown := [name for _, name in settings.placements if name not in buffers]:
            raise ModelError(
                f"--override-tensor: no buffer type {unknown[0]}; found {', '.join(buffers)}"
            )
        maximum = int(api.llama_max_tensor_buft_overrides())
        if len(settings.placements) >= maximum:
            raise ModelError(
                f"{len(settings.placements)} tensor placements; llama.cpp allows {maximum - 1}"
            )
        rows = [
            _Placement(pattern.encode(), buffers[name]) for pattern, name in settings.placements
        ]
        return self._pointer((_Placement * (len(rows) + 1))(*rows, _Placement(None, None)))

    def _metadata(self, metadata: Sequence[tuple[str, bool | int | float | str]]) -> Any:
        rows = (api.llama_model_kv_override * (len(metadata) + 1))()
        for row, (key, value) in zip(rows, metadata, strict=False):
            row.key = key.encode()
            # bool is a subclass of int, so it comes first.
            for tag, kind, field in (
                (api.LLAMA_KV_OVERRIDE_TYPE_BOOL, bool, "val_bool"),
                (api.LLAMA_KV_OVERRIDE_TYPE_INT, int, "val_i64"),
                (api.LLAMA_KV_OVERRIDE_TYPE_FLOAT, float, "val_f64"),
                (api.LLAMA_KV_OVERRIDE_TYPE_STR, str, "val_str"),
            ):
                if isinstance(value, kind):
                    row.tag = tag
                    setattr(row.value, field, value.encode() if isinstance(value, str) else value)
                    break
        return ctypes.cast(self._pointer(rows), ctypes.POINTER(api.llama_model_kv_override))

    def _pointer(self, array: Any) -> ctypes.c_void_p:
        self._kept.append(array)
        return ctypes.cast(array, ctypes.c_void_p)


def without_texts(resolved: Resolved) -> ModelSettings:
    """Return the model's settings with metadata that keep llama.cpp from reading the texts of the
    vocabulary, which takes most of the time of a load without weights.

    Tokens are then numbers. The settings are unchanged if the file has no tokens. Raises ModelError
    if the file cannot be read.
    """
    settings = resolved.model
    head = resolved.file_head
    if not (head.arch and head.n_vocab) or "tokenizer.ggml.model" in dict(settings.metadata):
        return settings
    no_texts = (
        ("tokenizer.ggml.model", "no_vocab"),
        (f"{head.arch}.vocab_size", head.n_vocab),
    )
    return replace(settings, metadata=(*no_texts, *settings.metadata))  # the first one counts


def layer_bytes(model: Any) -> int:
    """Return the average bytes of weights per layer of a loaded model."""
    return int(api.llama_model_size(model)) // max(int(api.llama_model_n_layer(model)), 1)


def context_params(resolved: Resolved, n_ctx: int) -> Any:
    """Return a llama_context_params for ``n_ctx`` tokens, padded per sequence without
    ``kv_unified``.
    """
    settings = resolved.model
    params = api.llama_context_default_params()
    params.n_ctx = n_ctx
    if not settings.kv_unified:
        params.n_ctx = padded(n_ctx // settings.n_seqs) * settings.n_seqs
    params.n_batch = settings.n_batch
    params.n_ubatch = settings.n_ubatch
    params.n_seq_max = settings.n_seqs
    params.n_outputs_max = resolved.n_outputs
    # A draft model has the output of the last token alone.
    params.n_outputs_max_per_seq = 1 if resolved.is_draft else resolved.n_outputs
    params.n_rs_seq = resolved.n_state_history
    params.n_threads = resolved.n_threads
    params.n_threads_batch = resolved.n_threads_batch
    params.flash_attn_type = FLASH_MODES[settings.flash_attn]
    params.type_k = TYPES[settings.type_k]
    params.type_v = TYPES[settings.type_v]
    params.offload_kqv = settings.offload_kqv
    params.op_offload = settings.op_offload
    params.swa_full = settings.swa_full
    params.rope_scaling_type = ROPE_SCALING.get(settings.rope_scaling, -1)
    params.rope_freq_base = settings.rope_freq_base
    params.rope_freq_scale = settings.rope_freq_scale
    params.yarn_orig_ctx = settings.yarn_orig_ctx
    params.yarn_ext_factor = settings.yarn_ext_factor
    params.yarn_attn_factor = settings.yarn_attn_factor
    params.yarn_beta_fast = settings.yarn_beta_fast
    params.yarn_beta_slow = settings.yarn_beta_slow
    # Rows can be shared between sequences only within one stream of cells; `Resolved.max_tokens`
    # limits each sequence.
    params.kv_unified = True
    params.no_perf = True
    return params


def draft_cells(draft: Resolved, n_cells: int) -> int:
    """Return the cells of a separate ``draft`` model for ``n_cells`` of the model: as many, and the
    last draft of each sequence.
    """
    return n_cells + draft.model.n_seqs * draft.drafts.n_draft


def head_params(draft: Resolved, trunk: Any, n_ctx: int) -> Any:
    """Return a llama_context_params for a ``draft`` model or head that reads the context
    ``trunk``, for ``n_ctx`` tokens of that.
    """
    drafts = draft.drafts
    n_seqs = draft.model.n_seqs
    is_head = drafts.has("draft-mtp")
    # A block takes one cell more than it drafts.
    n_cells = n_ctx if is_head else draft_cells(draft, n_ctx) + n_seqs
    params = context_params(draft, n_cells)
    params.ctx_other = trunk
    if is_head:
        params.ctx_type = api.LLAMA_CONTEXT_TYPE_MTP
    else:
        params.n_outputs_max_per_seq = drafts.n_draft + 1
        params.n_outputs_max = n_seqs * params.n_outputs_max_per_seq
    return params

"""Fingerprints: a digest of everything that determines the bytes of rows and states."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from pyctl.cache.plan import RULES
from pyctl.llama.library.bindings import api
from pyctl.llama.library.devices import Device, metadata_text, tensor_bytes
from pyctl.llama.library.extension import build_version
from pyctl.llama.library.file_digest import file_digest
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.resolved import Resolved
from pyctl.machine.libraries import libraries_in_use

__all__ = ["fingerprint", "shared_split"]

ROPE_FIELDS = ("rope_scaling", "rope_freq_base", "rope_freq_scale")
YARN_FIELDS = (
    "yarn_orig_ctx",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_slow",
    "yarn_beta_fast",
)

SUMS = "GGML_CUDA_ALLREDUCE"
"""The variable for how GPUs with parts of tensors sum."""

HARMLESS = ("DEBUG", "BACKTRACE", "PINNED", "REGISTER_HOST", "P2P", SUMS)
"""Parts of the names of ggml's environment variables that do not affect results."""


def fingerprint(backend: LlamaBackend, resolved: Resolved) -> str:
    """Return the BLAKE2b-128 of model files, adapters, layout, positions, batches, kernels and
    devices; 32 hex digits.

    The digest is independent of paths, file times, and flags that do not affect bytes. ModelError
    if a file cannot be read.
    """
    path = Path(resolved.model.path)
    has_factors = any("rope_factors_long" in name for name in tensor_bytes(path))
    factors = _rope_factors(backend, resolved.model) if has_factors else ""
    return file_digest(path, _facts(backend, resolved, factors))


def shared_split(resolved: Resolved) -> str:
    """Return how equal GPUs share all layers, empty if others do: their rows and states serve any
    such split.

    The split still changes sums, so with --exact nothing is shared between two.
    """
    settings = resolved.model
    layers = resolved.memory.layers
    gpus = resolved.gpus
    is_one_kind = len({gpu.description for gpu in gpus}) == 1
    are_equal = len(gpus) > 1 and is_one_kind and not any(gpu.is_remote for gpu in gpus)
    have_all = "CPU" not in layers and settings.split_mode in ("layer", "tensor")
    if not (are_equal and have_all):
        return ""
    return f" {settings.split_mode} {layers} {settings.tensor_split} {os.environ.get(SUMS)}"


def _facts(backend: LlamaBackend, resolved: Resolved, rope_factors: str) -> Iterator[object]:
    """Yield everything besides the model's files that determines the bytes of rows and states."""
    settings = resolved.model
    yield build_version()
    libraries = libraries_in_use()
    if libraries is not None and libraries.digests:  # trees may differ and have one version
        yield libraries.digests["archive"] or str(libraries.built)
    # Instruction sets and device libraries: their kernels round differently.
    yield (api.llama_print_system_info() or b"").decode("utf-8", "replace")
    variables = sorted(
        item for item in os.environ.items() if item[0].startswith(("GGML_", "LLAMA_ATTN_"))
    )
    yield [(name, value) for name, value in variables if not any(word in name for word in HARMLESS)]
    yield backend.memory.layout
    if backend.memory.kind == "opaque":
        # The layout does not describe llama.cpp's own state format.
        yield (
            settings.type_k,
            settings.type_v,
            settings.flash_attn,
            settings.swa_full,
            backend.facts.n_seqs,
        )
    # Batch ends: rows and states of the same tokens in other batches round differently.
    yield backend.facts.n_ubatch, RULES, resolved.batch_cost
    yield tuple(getattr(settings, name) for name in (*ROPE_FIELDS, *YARN_FIELDS)), rope_factors
    yield settings.metadata
    for adapter, scale in settings.lora:
        yield scale, hashlib.blake2b(Path(adapter).expanduser().read_bytes()).hexdigest()
    yield settings.repack, settings.placements
    if resolved.gpus:
        yield from _gpu_facts(resolved)


def _gpu_facts(resolved: Resolved) -> Iterator[object]:
    """Yield the GPUs, and how they share the layers unless any such split serves."""
    settings = resolved.model
    split: tuple[object, ...] = ()
    if not shared_split(resolved):
        split = (resolved.memory.layers, settings.split_mode)
    names = [_describe_gpu(gpu) for gpu in resolved.gpus]
    yield names, *split, settings.offload_kqv, settings.op_offload, settings.no_host
    if split and settings.split_mode != "layer":
        yield settings.tensor_split, settings.main_gpu


def _describe_gpu(gpu: Device) -> str:
    # Of a worker's device, only the address and the size are known.
    size = f" {gpu.total}" if gpu.is_remote else ""
    return f"{gpu.name} {gpu.description}{size}"


def _rope_factors(backend: LlamaBackend, settings: ModelSettings) -> str:
    """Return which of the two RoPE factor tables llama.cpp uses, which depends on the context
    size.
    """
    architecture = metadata_text(backend.model, "general.architecture")
    key = f"{architecture}.rope.scaling.original_context_length"
    given = dict(settings.metadata).get(key) or metadata_text(backend.model, key)
    original = int(given or api.llama_model_n_ctx_train(backend.model))
    return "long" if backend.facts.n_ctx > original else "short"

"""What saved rows and states mean: a digest of everything that decides their bytes."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as api

from pyctl.cache import RULES
from pyctl.engine.model_settings import ModelSettings
from pyctl.errors import ModelError
from pyctl.llama.devices import FileTensor, file_tensors, model_files
from pyctl.llama.library import build_version
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.params import batch_cost, gpus

__all__ = ["file_digest", "fingerprint", "metadata_text"]

SAMPLE_BYTES = 4096

SAMPLE_STEP = 2**23
"""Of each tensor these many bytes are read at its beginning, at its end, and once in so many between: some 10 MB of a
model of 17 GB. A change smaller than that and within one tensor would go unseen."""

ROPE_FIELDS = ("rope_scaling", "rope_freq_base", "rope_freq_scale")
YARN_FIELDS = ("yarn_orig_ctx", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_slow", "yarn_beta_fast")

HARMLESS = ("DEBUG", "BACKTRACE", "PINNED", "REGISTER_HOST")
"""What is in the names of ggml's variables that change no number."""


def fingerprint(backend: LlamaBackend, settings: ModelSettings, layers: Sequence[str]) -> str:
    """BLAKE2b-128 of the model's files, adapters, layout, positions, batches, kernels and devices; 32 hex digits.

    ``layers`` are the devices of the layers. Equal flags give the same again, wherever the files are and whenever they
    were made; a flag that changes no byte does not count. ModelError if a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = {file: file_tensors(file) for file in model_files(Path(settings.path))}
    has_factors = any("rope_factors_long" in tensor.name for tensors in files.values() for tensor in tensors)
    try:
        for fact in _facts(backend, settings, layers, _rope_factors(backend, settings) if has_factors else ""):
            digest.update(f"{fact}\0".encode())
        for file, tensors in files.items():
            for piece in _content(file, tensors):
                digest.update(piece)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or settings.path}: {error.strerror}") from error
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """BLAKE2b-128 of a model's files: sizes, metadata and samples of the weights. ModelError if one cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        for file in model_files(path):
            for piece in _content(file, file_tensors(file)):
                digest.update(piece)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or path}: {error.strerror}") from error
    return digest.hexdigest()


def metadata_text(model: Any, key: str, default: str = "") -> str:
    """The value of ``key`` in the file of a llama_model, as text."""
    buffer = ctypes.create_string_buffer(1024)
    n = api.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if n >= 0 else default


def _facts(
    backend: LlamaBackend, settings: ModelSettings, layers: Sequence[str], rope_factors: str
) -> Iterator[object]:
    yield build_version()
    # The instruction sets and device libraries in use: each has kernels of its own, which round differently.
    yield (api.llama_print_system_info() or b"").decode("utf-8", "replace")
    yield sorted(item for item in os.environ.items() if _matters(item[0]))
    yield backend.memory.layout
    if backend.memory.kind == "opaque":
        # The layout says nothing of a state that is llama.cpp's own.
        yield settings.type_k, settings.type_v, settings.flash_attn, settings.swa_full, backend.facts.n_seqs
    # Where batches end: rows and states of the same tokens in other batches differ by a rounding.
    yield backend.facts.n_ubatch, RULES, batch_cost(settings)
    yield tuple(getattr(settings, name) for name in (*ROPE_FIELDS, *YARN_FIELDS)), rope_factors
    yield settings.metadata
    for adapter, scale in settings.lora:
        yield scale, hashlib.blake2b(Path(adapter).expanduser().read_bytes()).hexdigest()
    yield settings.repack, settings.placements
    if found := gpus(settings):
        names = [f"{gpu.name} {gpu.description}" for gpu in found]
        yield names, layers, settings.split_mode, settings.offload_kqv, settings.op_offload, settings.no_host
        if settings.split_mode != "layer":
            yield settings.tensor_split, settings.main_gpu


def _matters(variable: str) -> bool:
    return variable.startswith(("GGML_", "LLAMA_ATTN_")) and not any(word in variable for word in HARMLESS)


def _rope_factors(backend: LlamaBackend, settings: ModelSettings) -> str:
    """Which of its two tables of factors for positions llama.cpp takes: that depends on the size of the context."""
    key = f"{metadata_text(backend.model, 'general.architecture')}.rope.scaling.original_context_length"
    given = dict(settings.metadata).get(key) or metadata_text(backend.model, key)
    return "long" if backend.facts.n_ctx > int(given or api.llama_model_n_ctx_train(backend.model)) else "short"


def _content(file: Path, tensors: Sequence[FileTensor]) -> Iterator[bytes]:
    """The size of a GGUF file, all that comes before its tensors, and samples of each of those."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        yield size.to_bytes(8, "little")
        yield stream.read(min((tensor.first for tensor in tensors), default=size))
        for tensor in tensors:
            for at in (*range(0, tensor.n_bytes, SAMPLE_STEP), max(tensor.n_bytes - SAMPLE_BYTES, 0)):
                stream.seek(tensor.first + at)
                yield stream.read(min(SAMPLE_BYTES, tensor.n_bytes - at))

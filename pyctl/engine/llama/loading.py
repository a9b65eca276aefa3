"""Opens a GGUF file and makes a context for it, or says in one line why not."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
from llama_cpp import llama_cpp as api

from pyctl.config import ModelSettings
from pyctl.engine.info import EngineInfo
from pyctl.engine.llama.backend import LlamaBackend
from pyctl.engine.llama.embedder import POOLING, Embedder
from pyctl.engine.llama.log import last_error, redirect
from pyctl.engine.llama.tokenizer import LlamaTokenizer
from pyctl.errors import ModelError, UnavailableError
from pyctl.native import build_version

__all__ = ["Loaded", "load"]

log = logging.getLogger(__name__)

TYPES = {
    name: int(gguf.GGMLQuantizationType[name.upper()])
    for name in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
}
SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}
FLASH = {"auto": -1, "off": 0, "on": 1}
ROPE_SCALING = {"": -1, "none": 0, "linear": 1, "yarn": 2, "longrope": 3}

MIN_FITTED_CTX = 4096
"""A context sized by us is never made smaller than this."""


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to evaluate."""

    backend: LlamaBackend
    tokenizer: LlamaTokenizer
    info: EngineInfo


def load(
    settings: ModelSettings, progress: Callable[[float], bool] | None = None, *, keep_vocabulary: bool = False
) -> Loaded:
    """Load the model and make its context; ``progress`` hears fractions from 0 to 1 and says whether to go on.

    With ``keep_vocabulary`` the tokenizer has a copy of its own and stays usable while the backend is closed. Raises
    ModelError when the file is missing, damaged or unsupported, or when it does not fit into memory, and
    UnavailableError when ``progress`` said no.
    """
    path = Path(settings.path)
    redirect()
    api.llama_backend_init()
    source = _Source(path, settings, progress)
    backend = LlamaBackend(
        source,
        lambda backend: _fingerprint(path, backend, settings),
        (lambda model: _make_embedder(model, settings)) if settings.embeddings else None,
    )
    source.settle(backend.n_ctx)
    tokenizer = LlamaTokenizer(_load_vocabulary(path)) if keep_vocabulary else backend.tokenizer
    return Loaded(backend, tokenizer, _describe(path, backend, settings))


class _Source:
    """Makes the model and its context, again and again the same."""

    def __init__(self, path: Path, settings: ModelSettings, progress: Callable[[float], bool] | None) -> None:
        self._path, self._settings, self._progress = path, settings, progress

    def settle(self, n_ctx: int) -> None:
        """Whatever memory there is next time, the context has this size."""
        self._settings = replace(self._settings, n_ctx=n_ctx)

    def __call__(self) -> tuple[Any, Any]:
        _check_file(self._path)
        model = _load_model(self._path, self._settings, self._progress)
        try:
            return model, _make_context(model, self._settings)
        except BaseException:
            api.llama_model_free(model)
            raise


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read the model {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file")


def _load_model(path: Path, settings: ModelSettings, progress: Callable[[float], bool] | None) -> Any:
    params = api.llama_model_default_params()
    params.n_gpu_layers = settings.n_gpu_layers
    params.split_mode = SPLIT_MODES[settings.split_mode]
    params.main_gpu = settings.main_gpu
    params.load_mode = LOAD_MODES[settings.load_mode]
    if settings.tensor_split:
        n_devices = api.llama_max_devices()
        if len(settings.tensor_split) > n_devices:
            raise ModelError(f"--tensor-split names {len(settings.tensor_split)} devices, {n_devices} are possible")
        split = (ctypes.c_float * n_devices)(*settings.tensor_split)
        params.tensor_split = split
    stopped = False

    def report(fraction: float, _: ctypes.c_void_p) -> bool:
        nonlocal stopped
        stopped = progress is not None and not progress(fraction)
        return not stopped

    callback = api.llama_progress_callback(report)
    params.progress_callback = callback
    model = api.llama_model_load_from_file(str(path).encode(), params)
    if stopped:
        if model:
            api.llama_model_free(model)
        raise UnavailableError("loading was stopped")
    if not model:
        raise ModelError(f"cannot load the model {path}: {last_error('llama.cpp gave no reason')}")
    return model


def _load_vocabulary(path: Path) -> Any:
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise ModelError(f"cannot load the vocabulary of {path}: {last_error('llama.cpp gave no reason')}")
    return model


def _make_embedder(model: Any, settings: ModelSettings) -> Embedder:
    """A context for one text at a time, which must fit into one batch."""
    params = _context_params(settings)
    params.n_seq_max = 1
    params.n_ctx = params.n_batch = params.n_ubatch
    params.n_outputs_max = params.n_outputs_max_per_seq = params.n_ubatch  # without pooling every token has one
    params.embeddings = True
    params.pooling_type = POOLING[settings.pooling]
    ctx = api.llama_init_from_model(model, params)
    if not ctx:
        raise ModelError(f"cannot make the context for embeddings: {last_error('llama.cpp gave no reason')}")
    return Embedder(model, ctx)


def _context_params(settings: ModelSettings) -> Any:
    params = api.llama_context_default_params()
    params.n_batch = settings.n_batch
    params.n_ubatch = settings.n_ubatch
    params.n_seq_max = settings.n_seqs
    # One output per sequence: room for those of a whole batch would cost half a GB with a large vocabulary.
    params.n_outputs_max, params.n_outputs_max_per_seq = settings.n_seqs, 1
    params.n_threads = settings.n_threads if settings.n_threads > 0 else _physical_cores()
    params.n_threads_batch = settings.n_threads_batch if settings.n_threads_batch > 0 else params.n_threads
    params.flash_attn_type = FLASH[settings.flash_attn]
    params.type_k, params.type_v = TYPES[settings.type_k], TYPES[settings.type_v]
    params.offload_kqv = settings.offload_kqv
    params.rope_scaling_type = ROPE_SCALING[settings.rope_scaling]
    params.rope_freq_base, params.rope_freq_scale = settings.rope_freq_base, settings.rope_freq_scale
    params.yarn_orig_ctx = settings.yarn_orig_ctx
    params.yarn_ext_factor, params.yarn_attn_factor = settings.yarn_ext_factor, settings.yarn_attn_factor
    params.yarn_beta_fast, params.yarn_beta_slow = settings.yarn_beta_fast, settings.yarn_beta_slow
    # Rows move between sequences only within one stream of cells; and one cache of cells serves long prompts better.
    params.kv_unified = True
    params.no_perf = True
    return params


def _make_context(model: Any, settings: ModelSettings) -> Any:
    params = _context_params(settings)
    n_train = int(api.llama_model_n_ctx_train(model))
    row_bytes = _row_bytes(model, settings)
    available = _available_bytes() if not _uses_gpu(settings) else None
    n_ctx = settings.n_ctx or n_train
    while True:
        fits = available is None or n_ctx * row_bytes < available
        params.n_ctx = n_ctx
        ctx = api.llama_init_from_model(model, params) if fits else None
        if ctx:
            break
        needed = f"about {n_ctx * row_bytes / 2**20:,.0f} MiB for {n_ctx} tokens"
        if settings.n_ctx or n_ctx <= MIN_FITTED_CTX:
            reason = last_error("it does not fit into memory")
            raise ModelError(f"cannot make the context ({needed}): {reason}; try a smaller --ctx-size")
        n_ctx = max(n_ctx // 2, MIN_FITTED_CTX)
    if n_ctx < (settings.n_ctx or n_train):
        log.warning("the context is cut from %d to %d tokens to fit into memory", n_train, n_ctx)
    return ctx


def _physical_cores() -> int:
    """Cores this process may use; two threads of one core count once, since they share its arithmetic units."""
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        try:
            siblings.add(
                Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
            )
        except OSError:
            siblings.add(str(cpu))
    return max(len(siblings), 1)


def _uses_gpu(settings: ModelSettings) -> bool:
    return bool(api.llama_supports_gpu_offload()) and settings.n_gpu_layers != 0 and settings.offload_kqv


def _available_bytes() -> int | None:
    """Memory that can be had without swapping, in bytes; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _row_bytes(model: Any, settings: ModelSettings) -> int:
    """Bytes that one token will take in the KV cache, estimated from the metadata before anything is allocated."""
    arch = _meta(model, "general.architecture")
    n_layers = int(api.llama_model_n_layer(model)) // int(_meta(model, f"{arch}.full_attention_interval", "1"))
    n_head_kv = max(int(api.llama_model_n_head_kv(model)), 1)
    head = int(api.llama_model_n_embd(model)) // max(int(api.llama_model_n_head(model)), 1)
    widths = [int(_meta(model, f"{arch}.attention.{part}_length", str(head))) * n_head_kv for part in ("key", "value")]
    kinds = (TYPES[settings.type_k], TYPES[settings.type_v])
    return n_layers * sum(_type_bytes(kind, width) for kind, width in zip(kinds, widths, strict=True))


def _type_bytes(kind: int, n: int) -> int:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    return n * size // block


def _meta(model: Any, key: str, default: str = "") -> str:
    buffer = ctypes.create_string_buffer(1024)
    n = api.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if n >= 0 else default


def _describe(path: Path, backend: LlamaBackend, settings: ModelSettings) -> EngineInfo:
    model, tokenizer = backend.model, backend.tokenizer
    template = api.llama_model_chat_template(model, None)
    name = _meta(model, "general.name") or path.stem
    return EngineInfo(
        model_path=str(path),
        model_name=name,
        model_alias=settings.alias[0] if settings.alias else path.name,
        arch=_meta(model, "general.architecture"),
        ftype_name=api.llama_ftype_name(api.llama_model_ftype(model)).decode(),
        n_ctx=backend.n_ctx,
        n_ctx_train=int(api.llama_model_n_ctx_train(model)),
        n_seqs=backend.n_seqs,
        n_vocab=tokenizer.n_vocab,
        n_embd=int(api.llama_model_n_embd(model)),
        n_params=int(api.llama_model_n_params(model)),
        model_size=int(api.llama_model_size(model)),
        chat_template=template.decode("utf-8", "replace") if template else "",
        bos_token=_special(model, tokenizer, "bos", tokenizer.bos),
        eos_token=_special(model, tokenizer, "eos", tokenizer.eos),
        build=build_version(),
        vocab_type=int(api.llama_vocab_type(api.llama_model_get_vocab(model))),
        pooling=backend.embedder.pooling if backend.embedder is not None else "",
        fingerprint=backend.identity,
    )


def _special(model: Any, tokenizer: LlamaTokenizer, name: str, token: int) -> str:
    """The text of a special token that the file names; llama.cpp makes one up where it does not."""
    if not _meta(model, f"tokenizer.ggml.{name}_token_id"):
        return ""
    return tokenizer.piece(token).decode("utf-8", "replace")


SAMPLES, SAMPLE_BYTES, HEAD_BYTES = 64, 1 << 16, 1 << 24


def _fingerprint(path: Path, backend: LlamaBackend, settings: ModelSettings) -> str:
    """BLAKE2b-128 over everything that decides what saved bytes mean.

    That is: the model (size, head of the file with all its metadata, and samples of the weights; neither its name nor
    its date), the layout of rows and state, the positional encoding, the batch size that fixes the batch ends, and the
    llama.cpp release.
    """
    digest = hashlib.blake2b(digest_size=16)
    rope = [str(getattr(settings, name)) for name in sorted(vars(settings)) if name.startswith(("rope_", "yarn_"))]
    digest.update("\0".join([build_version(), backend.layout, str(backend.n_ubatch), *rope]).encode())
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        digest.update(file.read(HEAD_BYTES))
        for sample in range(1, SAMPLES + 1):
            file.seek(max(size * sample // SAMPLES - SAMPLE_BYTES, 0))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()

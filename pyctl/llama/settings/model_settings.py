"""The model file and the context that llama.cpp makes for it, as frozen settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pyctl.engine.openmp import SPIN_LEVEL
from pyctl.errors import ConfigError
from pyctl.llama.settings.placements import CPU_EXPERTS, as_placements, cpu_experts, cpu_ffn
from pyctl.machine.environment import USE_EXTENSION
from pyctl.settings.convert import (
    choice,
    integer,
    integers,
    number,
    on_off,
    on_off_auto,
    tokens,
    words,
)
from pyctl.settings.limit import SetLimit, limit
from pyctl.settings.setting import CONTEXT, MODEL, SERVER, Flag

__all__ = [
    "FLASH_MODES",
    "KV_TYPES",
    "LAZY_MODES",
    "LOAD_MODES",
    "NUMA",
    "POOLING",
    "ROPE_SCALING",
    "SERVED_SEQS",
    "SPLIT_MODES",
    "ModelSettings",
]

SERVED_SEQS = 4
"""Sequences of a server without ``--parallel``, as in llama-server."""

MAX_SEQS = 255
"""llama.cpp's 256 less the one used to restore rows."""

MAX_WORKERS = limit(16, "workers of --rpc", "the program ends, exit code 2", "process")
"""llama.cpp's GGML_RPC_MAX_SERVERS."""

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""Types of the KV cache: ggml's names in lower case."""

SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}
LAZY_MODES = {"on": 2, "off": 0, "auto": 1}
FLASH_MODES = {"on": 1, "off": 0, "auto": -1}
NUMA = {"distribute": 1, "isolate": 2, "numactl": 3}
ROPE_SCALING = {"none": 0, "linear": 1, "yarn": 2}
POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
"""llama.cpp's numbers of all these modes; -1 is its default."""


def proportions(text: str) -> tuple[float, ...]:
    """Parse shares separated by commas or slashes. Raises ValueError if all are 0."""
    values = tuple(float(number(0.0)(part)) for part in re.split("[,/]+", text))
    if not any(values):
        raise ValueError("at least one proportion must be above 0")
    return values


def as_metadata(text: str) -> tuple[tuple[str, int | float | bool | str], ...]:
    """Parse ``KEY=TYPE:VALUE,...``, TYPE int, float, bool or str, 127 bytes each. Raises ValueError
    for others.
    """
    overrides: list[tuple[str, int | float | bool | str]] = []
    for part in words(text):
        match = re.fullmatch(r"([^=]{1,127})=(int|float|bool|str):(.{0,127})", part)
        if match is None or not part.isascii():
            raise ValueError(
                f"{part!r} is not of the form KEY=TYPE:VALUE with a type of int, float, bool or str"
            )
        key, kind, value = match.groups()
        made: Any = value
        if kind == "int":
            made = integer(-(2**63), 2**63 - 1)(value)
        elif kind == "float":
            made = float(number()(value))
        elif kind == "bool":
            if value not in ("true", "false"):
                raise ValueError(f"{value!r} is neither true nor false")
            made = value == "true"
        overrides.append((key, made))
    return tuple(overrides)


def unscaled(text: str) -> tuple[tuple[str, float], ...]:
    """Parse adapter files separated by commas, each with scale 1."""
    return tuple((name, 1.0) for name in words(text))


def scaled(text: str) -> tuple[tuple[str, float], ...]:
    """Parse ``FILE:SCALE,...``. Raises ValueError for other forms."""
    adapters = []
    for part in words(text):
        name, colon, scale = part.rpartition(":")
        if not (name and colon):
            raise ValueError(f"{part!r} is not of the form FILE:SCALE")
        adapters.append((name, float(number()(scale))))
    return tuple(adapters)


def as_workers(text: str) -> tuple[str, ...]:
    """Parse ``HOST:PORT,...``, up to MAX_WORKERS, HOST a name or an IPv4 address. Raises ValueError
    for others.
    """
    workers = tuple(dict.fromkeys(words(text)))
    for worker in workers:
        match = re.fullmatch(r"[A-Za-z0-9_.-]{1,253}:([0-9]{1,5})", worker)
        if match is None or not 0 < int(match[1]) < 2**16:
            raise ValueError(
                f"{worker!r} is not of the form HOST:PORT with a name or an IPv4 address"
            )
    if not 0 < len(workers) <= MAX_WORKERS:
        raise ValueError(f"1 to {MAX_WORKERS} workers can be named")
    return workers


@dataclass(frozen=True)
class ModelSettings:
    """The model file and the context that llama.cpp makes for it; counts are tokens or layers.

    ``n_gpu_layers`` -1 means as many as fit, -2 all. ``placements`` are (regular expression over
    tensor names, buffer type); the first match applies. ``fit`` reduces values not given, the
    context to ``fit_ctx`` tokens at least, then the layers on the GPU, until ``fit_target`` MiB are
    free on each GPU. ``metadata`` are (key, value), ``lora`` (file, scale). ``n_threads`` below 1
    is automatic; ``n_threads_batch`` below 1 is ``n_threads`` if given, else one per core.
    ``n_ubatch`` 0 is automatic. ``n_ctx`` 0, ``rope_*`` 0 or empty, ``yarn_orig_ctx`` 0, other
    ``yarn_*`` -1 and an empty ``pooling`` mean the model's own. ``tensor_split`` are proportions,
    empty for an even split. ``pooling`` requires ``embeddings``. ``workers`` are host:port of
    machines that lend devices. With ``kv_unified`` all ``n_seqs`` share ``n_ctx``, each up to
    ``n_ctx_per_seq``, 0 for no limit. Raises ConfigError if values exclude each other.
    """

    path: str = MODEL.flag("", "-m --model", "GGUF file to load", str, "LLAMA_ARG_MODEL", "FILE")
    alias: tuple[str, ...] = MODEL.flag(
        (),
        "-a --alias",
        "names for clients, comma-separated",
        words,
        "LLAMA_ARG_ALIAS",
        "NAMES",
        many=True,
    )
    tags: tuple[str, ...] = MODEL.flag(
        (),
        "--tags",
        "tags in /v1/models, comma-separated",
        words,
        "LLAMA_ARG_TAGS",
        "TAGS",
        many=True,
    )
    extension: bool = MODEL.flag(
        True,
        "--extension",
        "use pyctl's extension; off: only llama.cpp's API",
        None,
        USE_EXTENSION,
        off="--no-extension",
    )
    n_gpu_layers: int = MODEL.flag(
        -1,
        "-ngl --gpu-layers --n-gpu-layers",
        "layers on the GPU: a number, auto (-1) or all (-2)",
        integer(-2, auto=-1, all=-2),
        "LLAMA_ARG_N_GPU_LAYERS",
    )
    split_mode: str = MODEL.flag(
        "layer",
        "-sm --split-mode",
        "how GPUs share the model: none, layer, row or tensor",
        choice(*SPLIT_MODES),
        "LLAMA_ARG_SPLIT_MODE",
        "MODE",
    )
    tensor_split: tuple[float, ...] = MODEL.flag(
        (),
        "-ts --tensor-split",
        "share of each GPU",
        proportions,
        "LLAMA_ARG_TENSOR_SPLIT",
        "N,N,...",
    )
    main_gpu: int = MODEL.flag(
        0, "-mg --main-gpu", "GPU for split modes none and row", integer(0), "LLAMA_ARG_MAIN_GPU"
    )
    load_mode: str = MODEL.flag(
        "auto",
        "-lm --load-mode",
        f"read the file by: {', '.join(LOAD_MODES)}",
        choice(*LOAD_MODES),
        "LLAMA_ARG_LOAD_MODE",
        "MODE",
    )
    lazy_mode: str = MODEL.flag(
        "auto",
        "-lzm --lazy-mode",
        "read some large tensors on demand: on, off or auto",
        on_off_auto,
        "LLAMA_ARG_LAZY_MODE",
        "WHEN",
    )
    devices: tuple[str, ...] = MODEL.flag(
        (),
        "-dev --device",
        "devices to use, comma-separated, none = only the CPU; --list-devices names them",
        words,
        "LLAMA_ARG_DEVICE",
        "NAMES",
    )
    workers: tuple[str, ...] = MODEL.flag(
        (),
        "--rpc",
        "workers that lend their devices (pyctl worker), comma-separated",
        as_workers,
        "LLAMA_ARG_RPC",
        "HOST:PORT,...",
    )
    placements: tuple[tuple[str, str], ...] = MODEL.flag(
        (),
        "-ot --override-tensor",
        "buffer for tensors whose names match; may be repeated",
        as_placements,
        "LLAMA_ARG_OVERRIDE_TENSOR",
        "PATTERN=BUFFER,...",
        many=True,
        also=(
            Flag(
                "-cmoe --cpu-moe",
                "keep all experts on the CPU",
                None,
                "LLAMA_ARG_CPU_MOE",
                const=((CPU_EXPERTS, "CPU"),),
                many=True,
            ),
            Flag(
                "-ncmoe --n-cpu-moe",
                "keep the experts of the first N layers on the CPU",
                cpu_experts,
                "LLAMA_ARG_N_CPU_MOE",
                many=True,
            ),
            Flag(
                "-ncffn --n-cpu-ffn",
                "keep the dense feed-forward weights of the first N layers on the CPU",
                cpu_ffn,
                "LLAMA_ARG_N_CPU_FFN",
                many=True,
            ),
        ),
    )
    fit: bool = MODEL.flag(
        True,
        "-fit --fit",
        "fit missing values into memory: on or off",
        on_off,
        "LLAMA_ARG_FIT",
        "WHEN",
    )
    fit_target: tuple[int, ...] = MODEL.flag(
        (1024,),
        "-fitt --fit-target",
        "MiB to leave free on each GPU",
        integers,
        "LLAMA_ARG_FIT_TARGET",
        "MiB,...",
    )
    fit_ctx: int = MODEL.flag(
        4096,
        "-fitc --fit-ctx",
        "smallest context that --fit chooses",
        tokens(1),
        "LLAMA_ARG_FIT_CTX",
    )
    metadata: tuple[tuple[str, int | float | bool | str], ...] = MODEL.flag(
        (),
        "--override-kv",
        "override metadata of the file; types int, float, bool, str; may be repeated",
        as_metadata,
        metavar="KEY=TYPE:VALUE,...",
        many=True,
    )
    check_tensors: bool = MODEL.flag(
        False, "--check-tensors", "look for invalid values in the weights"
    )
    repack: bool = MODEL.flag(
        True,
        "--repack",
        "rearrange weights for the CPU",
        None,
        "LLAMA_ARG_REPACK",
        off="-nr --no-repack",
    )
    no_host: bool = MODEL.flag(
        False,
        "--no-host",
        "bypass host buffers, so that extra buffers can be used",
        None,
        "LLAMA_ARG_NO_HOST",
    )
    numa: str = MODEL.flag(
        "", "--numa", "distribute, isolate or numactl", choice(*NUMA), "LLAMA_ARG_NUMA", "TYPE"
    )
    lora: tuple[tuple[str, float], ...] = MODEL.flag(
        (),
        "--lora",
        "LoRA adapters, comma-separated; may be repeated",
        unscaled,
        metavar="FILES",
        many=True,
        also=(
            Flag(
                "--lora-scaled",
                "LoRA adapters with scales; may be repeated",
                scaled,
                metavar="FILE:SCALE,...",
                many=True,
            ),
        ),
    )
    n_ctx: int = CONTEXT.flag(
        0,
        "-c --ctx-size",
        "tokens of context that all requests share, 0 = the model's",
        tokens(0),
        "LLAMA_ARG_CTX_SIZE",
    )
    n_seqs: int = CONTEXT.flag(
        1,
        "-np --parallel",
        "requests that run at the same time; -1 is the default",
        integer(1, MAX_SEQS, **{"-1": -1}),
        "LLAMA_ARG_N_PARALLEL",
        shown=f"{SERVED_SEQS} for serve, 1 for chat",
        limit=SetLimit(f"running requests, up to {MAX_SEQS}", "requests wait", "request"),
    )
    kv_unified: bool = CONTEXT.flag(
        True,
        "-kvu --kv-unified",
        "running requests share the context; off: each gets an equal part",
        None,
        "LLAMA_ARG_KV_UNIFIED",
        off="-no-kvu --no-kv-unified",
    )
    n_ctx_per_seq: int = CONTEXT.flag(
        0,
        "--kv-unified-per-slot",
        "largest context of one request; without -c, the context of each",
        tokens(1),
        "LLAMA_ARG_KV_UNIFIED_PER_SLOT",
    )
    n_batch: int = CONTEXT.flag(
        2048, "-b --batch-size", "tokens in one call of llama.cpp", tokens(1), "LLAMA_ARG_BATCH"
    )
    n_ubatch: int = CONTEXT.flag(
        0,
        "-ub --ubatch-size",
        "tokens in one evaluation",
        tokens(1),
        "LLAMA_ARG_UBATCH",
        shown="512; on a GPU 768, of a mixture of experts 1024",
    )
    n_threads: int = CONTEXT.flag(
        -1,
        "-t --threads",
        "CPU threads for generation, -1 = automatic",
        integer(),
        "LLAMA_ARG_THREADS",
    )
    n_threads_batch: int = CONTEXT.flag(
        0,
        "-tb --threads-batch",
        "CPU threads for prompts, 0 = the value of -t, else one per core",
        integer(),
    )
    poll: int = CONTEXT.flag(
        SPIN_LEVEL,
        "--poll",
        "how long CPU threads spin before they sleep, 0 = none, 100 = longest",
        integer(0, 100),
    )
    flash_attn: str = CONTEXT.flag(
        "auto",
        "-fa --flash-attn",
        "flash attention: on, off or auto",
        on_off_auto,
        "LLAMA_ARG_FLASH_ATTN",
        "WHEN",
        bare="on",
    )
    type_k: str = CONTEXT.flag(
        "f16",
        "-ctk --cache-type-k",
        f"type of K in the KV cache: {', '.join(KV_TYPES)}",
        choice(*KV_TYPES),
        "LLAMA_ARG_CACHE_TYPE_K",
        "TYPE",
    )
    type_v: str = CONTEXT.flag(
        "f16",
        "-ctv --cache-type-v",
        "type of V in the KV cache, as -ctk",
        choice(*KV_TYPES),
        "LLAMA_ARG_CACHE_TYPE_V",
        "TYPE",
    )
    offload_kqv: bool = CONTEXT.flag(
        True,
        "-kvo --kv-offload",
        "keep the KV cache on the GPU",
        None,
        "LLAMA_ARG_KV_OFFLOAD",
        off="-nkvo --no-kv-offload",
    )
    op_offload: bool = CONTEXT.flag(
        True,
        "--op-offload",
        "run operations of CPU tensors on the GPU for large batches",
        off="--no-op-offload",
    )
    swa_full: bool = CONTEXT.flag(
        False,
        "--swa-full",
        "allocate the full context for sliding-window layers",
        None,
        "LLAMA_ARG_SWA_FULL",
    )
    rope_scaling: str = CONTEXT.flag(
        "",
        "--rope-scaling",
        "none, linear or yarn",
        choice(*ROPE_SCALING),
        "LLAMA_ARG_ROPE_SCALING_TYPE",
        "TYPE",
    )
    rope_freq_base: float = CONTEXT.flag(
        0.0, "--rope-freq-base", "base frequency", number(0.0), "LLAMA_ARG_ROPE_FREQ_BASE"
    )
    rope_freq_scale: float = CONTEXT.flag(
        0.0,
        "--rope-freq-scale",
        "scale the context by 1/N",
        number(0.0),
        "LLAMA_ARG_ROPE_FREQ_SCALE",
    )
    yarn_orig_ctx: int = CONTEXT.flag(
        0, "--yarn-orig-ctx", "context before YaRN", tokens(0), "LLAMA_ARG_YARN_ORIG_CTX"
    )
    yarn_ext_factor: float = CONTEXT.flag(
        -1.0, "--yarn-ext-factor", "extrapolation mix", number(), "LLAMA_ARG_YARN_EXT_FACTOR"
    )
    yarn_attn_factor: float = CONTEXT.flag(
        -1.0, "--yarn-attn-factor", "attention scale", number(), "LLAMA_ARG_YARN_ATTN_FACTOR"
    )
    yarn_beta_slow: float = CONTEXT.flag(
        -1.0, "--yarn-beta-slow", "high correction dimension", number(), "LLAMA_ARG_YARN_BETA_SLOW"
    )
    yarn_beta_fast: float = CONTEXT.flag(
        -1.0, "--yarn-beta-fast", "low correction dimension", number(), "LLAMA_ARG_YARN_BETA_FAST"
    )
    embeddings: bool = SERVER.flag(
        False, "--embedding --embeddings", "serve embeddings", None, "LLAMA_ARG_EMBEDDINGS"
    )
    pooling: str = SERVER.flag(
        "",
        "--pooling",
        "how embeddings are pooled: none, mean, cls, last or rank",
        choice(*POOLING),
        "LLAMA_ARG_POOLING",
        "TYPE",
    )

    def __post_init__(self) -> None:
        if self.flash_attn == "off" and "q" in self.type_v:
            raise ConfigError(
                f"--cache-type-v {self.type_v} needs flash attention, which --flash-attn off "
                "forbids"
            )
        if self.workers and self.split_mode == "tensor":
            raise ConfigError("--rpc excludes --split-mode tensor: workers hold whole layers")

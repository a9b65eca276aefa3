"""The model file and the context that llama.cpp makes for it, as frozen settings."""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.errors import ConfigError

__all__ = ["CPU_EXPERTS", "ModelSettings", "experts_on_cpu"]

CPU_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Expert weights of any layer, as llama-server's --cpu-moe matches them."""


def experts_on_cpu(n_layers: int) -> tuple[tuple[str, str], ...]:
    """Placements that keep the experts of the first ``n_layers`` layers on the CPU."""
    return tuple((rf"blk\.{layer}{CPU_EXPERTS}", "CPU") for layer in range(n_layers))


@dataclass(frozen=True)
class ModelSettings:
    """The model file and the context that llama.cpp makes for it; counts are tokens or layers.

    ``n_gpu_layers`` -1 means as many as fit, -2 all. ``placements`` are (regular expression over tensor names, buffer
    type), the first match counts. With ``fit``, what was not given is made to fit: the context down to ``fit_ctx``
    tokens, then the layers on the GPU, so that ``fit_target`` MiB stay free on each. ``metadata`` are (key, value),
    ``lora`` are (file, scale). ``n_threads`` below 1 leaves the choice to llama.cpp, and ``n_threads_batch`` below 1
    means the same number. ``n_ctx`` 0, ``rope_*`` 0 or empty, ``yarn_orig_ctx`` 0, the other ``yarn_*`` -1 and an empty
    ``pooling`` mean the model's own value. ``tensor_split`` are proportions, empty for an even split. ``pooling`` is
    none, mean, cls, last or rank, for ``embeddings`` only.
    """

    path: str = ""
    alias: tuple[str, ...] = ()
    n_gpu_layers: int = -1
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    load_mode: str = "auto"
    lazy_mode: str = "auto"
    devices: tuple[str, ...] = ()
    placements: tuple[tuple[str, str], ...] = ()
    fit: bool = True
    fit_target: tuple[int, ...] = (1024,)
    fit_ctx: int = 4096
    metadata: tuple[tuple[str, int | float | bool | str], ...] = ()
    check_tensors: bool = False
    repack: bool = True
    no_host: bool = False
    numa: str = ""
    lora: tuple[tuple[str, float], ...] = ()
    n_ctx: int = 0
    n_seqs: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = -1
    n_threads_batch: int = 0
    flash_attn: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    offload_kqv: bool = True
    op_offload: bool = True
    swa_full: bool = False
    rope_scaling: str = ""
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_beta_fast: float = -1.0
    embeddings: bool = False
    pooling: str = ""

    def __post_init__(self) -> None:
        if self.flash_attn == "off" and "q" in self.type_v:
            raise ConfigError(f"--cache-type-v {self.type_v} needs flash attention, which --flash-attn off forbids")

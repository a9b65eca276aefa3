"""Settings of drafts: which sources draft, and the draft model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyctl.llama.settings.model_settings import KV_TYPES, ModelSettings
from pyctl.llama.settings.placements import CPU_EXPERTS, as_placements, cpu_experts
from pyctl.settings.convert import choice, integer, number, words
from pyctl.settings.setting import SPECULATION, Flag

__all__ = [
    "AUTOMATIC",
    "AUTOMATIC_LENGTH",
    "BLOCK_TYPES",
    "DRAFT_TYPES",
    "FEATURE_TYPES",
    "MODEL_TYPES",
    "PRIVATE",
    "DraftSettings",
]

BLOCK_TYPES = ("draft-dflash", "draft-dspark")
"""The sources that draft a block of tokens in one evaluation."""

FEATURE_TYPES = ("draft-eagle3", *BLOCK_TYPES)
"""The sources whose file reads rows that enter layers of the target model."""

MODEL_TYPES = ("draft-simple", "draft-mtp", *FEATURE_TYPES)
"""The sources that require a model; all but a head in the model's own file require ``draft_path``.
"""

DRAFT_TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "cache", *MODEL_TYPES)
"""Draft sources in the order of their use: llama-server's, and pyctl's own `cache`."""

AUTOMATIC = ("auto",)
"""The types of a model for which no flag names a source; loading replaces them."""

PRIVATE = ("auto", "private")
"""Return the settings for clients with several keys: without `cache`, which drafts from the texts
of all.
"""

AUTOMATIC_LENGTH = 2
"""Most tokens of a draft if no flag names a source: a third token gains next to nothing for a
single reply, and takes a recurrent state of each sequence
(docs/internals/decisions/006-defaults.md).
"""

_NOT_HERE = ("ngram-cache",)


def as_draft_types(text: str) -> tuple[str, ...]:
    """Parse names of `DRAFT_TYPES` separated by commas; ``none`` overrides all. Raises ValueError
    for others.
    """
    names = words(text)
    for name in names:
        if name in _NOT_HERE:
            raise ValueError(f"{name} is not supported; use one of {', '.join(DRAFT_TYPES)}")
        if name not in (*DRAFT_TYPES, "none"):
            known = ", ".join((*DRAFT_TYPES, "none"))
            raise ValueError(f"unknown speculative type: {name}; use one of {known}")
    return ("none",) if "none" in names else names


@dataclass(frozen=True)
class DraftSettings:
    """The sources of drafts and their settings.

    ``draft_types`` are names of `DRAFT_TYPES` as given, "none", or `AUTOMATIC`. ``draft_path`` is
    the GGUF file of a draft model, of any of `MODEL_TYPES`. A draft ends after ``n_draft`` tokens
    or at a token with probability below ``draft_p_min``; drafts of fewer than ``n_draft_min``
    tokens are dropped. Layers, devices, placements and threads apply to ``draft_path``; devices and
    threads default to the model's. The types of K and V apply to any draft model or head.
    """

    draft_types: tuple[str, ...] = SPECULATION.flag(
        (),
        "--spec-type",
        f"sources of drafts, comma-separated: {', '.join(DRAFT_TYPES)}, or none",
        as_draft_types,
        "LLAMA_ARG_SPEC_TYPE",
        "TYPES",
        shown="on a GPU draft-mtp, if the model has a head, and cache, as memory allows",
        many=True,
        also=(
            Flag(
                "--spec-default",
                "the same as --spec-type ngram-mod",
                const=("ngram-mod",),
                many=True,
            ),
        ),
    )
    n_draft: int = SPECULATION.flag(
        3,
        "--spec-draft-n-max",
        "maximum tokens per draft",
        integer(0),
        "LLAMA_ARG_SPEC_DRAFT_N_MAX",
        shown=f"3; {AUTOMATIC_LENGTH} without --spec-type",
    )
    n_draft_min: int = SPECULATION.flag(
        0,
        "--spec-draft-n-min",
        "drop drafts of fewer tokens",
        integer(),
        "LLAMA_ARG_SPEC_DRAFT_N_MIN",
    )
    draft_p_min: float = SPECULATION.flag(
        0.0,
        "--spec-draft-p-min --draft-p-min",
        "end a draft at a token below this probability",
        number(),
        "LLAMA_ARG_SPEC_DRAFT_P_MIN",
        "P",
    )
    draft_path: str = SPECULATION.flag(
        "",
        "-md --model-draft --spec-draft-model",
        "GGUF file of a draft model of any type",
        str,
        "LLAMA_ARG_SPEC_DRAFT_MODEL",
        "FILE",
    )
    draft_gpu_layers: int = SPECULATION.flag(
        -1,
        "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl",
        "layers of the draft model on the GPU: a number, auto (-1) or all (-2)",
        integer(-2, auto=-1, all=-2),
        "LLAMA_ARG_N_GPU_LAYERS_DRAFT",
    )
    draft_devices: tuple[str, ...] = SPECULATION.flag(
        (),
        "-devd --device-draft --spec-draft-device",
        "devices of the draft model, comma-separated, none = CPU (default: those of -dev)",
        words,
        metavar="NAMES",
    )
    draft_placements: tuple[tuple[str, str], ...] = SPECULATION.flag(
        (),
        "-otd --override-tensor-draft --spec-draft-override-tensor",
        "buffer for tensors of the draft model whose names match; may be repeated",
        as_placements,
        metavar="PATTERN=BUFFER,...",
        many=True,
        also=(
            Flag(
                "-cmoed --cpu-moe-draft --spec-draft-cpu-moe",
                "keep all experts of the draft model on the CPU",
                None,
                "LLAMA_ARG_SPEC_DRAFT_CPU_MOE",
                const=((CPU_EXPERTS, "CPU"),),
                many=True,
            ),
            Flag(
                "-ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe",
                "keep the experts of the draft model's first N layers on the CPU",
                cpu_experts,
                "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
                many=True,
            ),
        ),
    )
    draft_threads: int = SPECULATION.flag(
        0,
        "-td --threads-draft --spec-draft-threads",
        "CPU threads of the draft model for tokens, 0 = the value of -t",
        integer(),
    )
    draft_threads_batch: int = SPECULATION.flag(
        0,
        "-tbd --threads-batch-draft --spec-draft-threads-batch",
        "CPU threads of the draft model for prompts, 0 = the value of -td",
        integer(),
    )
    draft_type_k: str = SPECULATION.flag(
        "f16",
        "-ctkd --cache-type-k-draft --spec-draft-type-k",
        "type of K in the draft model's KV cache",
        choice(*KV_TYPES),
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
        "TYPE",
    )
    draft_type_v: str = SPECULATION.flag(
        "f16",
        "-ctvd --cache-type-v-draft --spec-draft-type-v",
        "type of V, as -ctkd",
        choice(*KV_TYPES),
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
        "TYPE",
    )

    @property
    def is_automatic(self) -> bool:
        """Return whether no flag names a source: the head in the model's own file and `cache` draft
        if memory allows.
        """
        return self.draft_types in (AUTOMATIC, PRIVATE)

    @property
    def ordered_types(self) -> tuple[str, ...]:
        """``draft_types``, each once, in the order of `DRAFT_TYPES`."""
        return tuple(name for name in DRAFT_TYPES if name in self.draft_types)

    def has(self, *names: str) -> bool:
        """Return whether ``draft_types`` contains one of ``names``."""
        return any(name in self.draft_types for name in names)

    @property
    def drafts_from_text(self) -> bool:
        """True if n-gram or cache sources draft, whose drafts may be longer than a model's."""
        return any(name.startswith("ngram-") or name == "cache" for name in self.draft_types)

    @property
    def uses_own_head(self) -> bool:
        """True if the head in the model's own file drafts."""
        return self.has("draft-mtp") and not self.draft_path and self.n_draft > 0

    @property
    def uses_file(self) -> bool:
        """True if the draft model or head of ``draft_path`` drafts."""
        return bool(self.draft_path) and self.n_draft > 0

    @property
    def reads_rows(self) -> bool:
        """Return whether the draft model reads rows of the target model, and so runs beside its
        context.
        """
        return self.has("draft-mtp", *FEATURE_TYPES)

    def for_context(self, model: ModelSettings) -> ModelSettings:
        """Return settings for the context of a draft model; ``model`` are those of the target
        model.
        """
        return replace(
            model,
            type_k=self.draft_type_k,
            type_v=self.draft_type_v,
            embeddings=False,
            lora=(),
            kv_unified=True,
        )

    def for_file(self, model: ModelSettings) -> ModelSettings:
        """Return settings for ``draft_path`` and its context; ``model`` are those of the target
        model.
        """
        settings = self.for_context(model)
        if self.draft_threads > 0:
            threads = self.draft_threads, self.draft_threads_batch
            settings = replace(
                settings, n_threads=threads[0], n_threads_batch=max(threads[1], 0) or threads[0]
            )
        if len(self.draft_devices) == 1 and self.draft_devices != ("none",):
            settings = replace(settings, split_mode="layer", tensor_split=(), main_gpu=0)
        return replace(
            settings,
            path=self.draft_path,
            n_gpu_layers=self.draft_gpu_layers,
            devices=self.draft_devices or model.devices,
            placements=self.draft_placements,
        )

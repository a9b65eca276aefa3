"""Every automatic value of a model's settings, chosen once, each with the reason for it.

`Resolved.from_settings` chooses the values that follow from the machine, `pyctl.llama.fit.resolve`
those that follow from the model's files, and `pyctl.llama.fit.fitting` those that follow from free
memory. Loader, dry runs, parameters of llama.cpp and fingerprint read the result: none of them
chooses a value.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pyctl.engine.draft.ngram_settings import LONGEST
from pyctl.llama.library.bindings import api
from pyctl.llama.library.devices import (
    Device,
    FileHead,
    devices,
    file_head,
    model_files,
    tensor_bytes,
)
from pyctl.llama.settings.draft_settings import MODEL_TYPES, DraftSettings
from pyctl.llama.settings.memory_plan import MemoryPlan
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.machine.control_groups import read_text
from pyctl.settings.limit import limit

__all__ = [
    "CPU_UBATCH",
    "EXPERTS_UBATCH",
    "GPU_UBATCH",
    "LONG_DRAFT",
    "NO_DRAFTS",
    "PREDICTED_DRAFT",
    "Resolved",
    "ResolvedValue",
    "gpus",
    "padded",
    "physical_cores",
]

MIB = 2**20

NO_DRAFTS = DraftSettings()

CPU_UBATCH = 512
"""Default tokens of one evaluation without a GPU: llama.cpp's own."""

GPU_UBATCH = 768
"""Default tokens of one evaluation on a GPU.

27B evaluates prompts at 0.99 of the speed of 1,024 tokens, and with 512 at 0.96. Each token of a
batch takes 0.4 MiB of the card at a context of 65,536.
"""

EXPERTS_UBATCH = 1024
"""Default tokens of one evaluation of a mixture of experts on a GPU. All its weights are read for
each batch: 35B-A3B evaluates 768 tokens at 0.89 of this speed.
"""

ON_GPU = "the default on a GPU"

BYTES_PER_THREAD = 2**20
"""Minimum weights of a layer per thread for single tokens: with fewer, threads wait at barriers for
longer than they work. Prompts use every core.
"""

LONG_DRAFT = limit(64, "tokens of a draft from n-grams", "cut", "request")

PREDICTED_DRAFT = limit(
    16, "tokens of a draft from a prediction, on a server without `cache`", "cut", "request"
)
"""A prediction alone is worth few outputs: each takes a float per vocabulary entry, 1 MiB with
248,320 of them.
"""
"""llama-server's default maximum; each token costs memory for one more output of logits."""

CELL_STEP = 256
"""llama.cpp rounds the cells of a context up to a multiple of this."""

TRIAL_CELLS = 256
"""Cells of a pooled context besides a batch: for the row before it, and the trial at start."""

MIN_POOL_CELLS = 1024
"""Minimum cells of a pooled context, for the texts of that trial."""


GIVEN = "given"
DEFAULT = "default"
"""The reasons for values that nothing chose."""

REDUCED = "as much as fits into memory"
"""The reason for values that fitting into memory has changed."""


class ResolvedValue(NamedTuple):
    """The value in use of a flag, as text, and the reason for it."""

    flag: str
    value: str
    reason: str


@dataclass(frozen=True)
class Resolved:
    """The settings of a model without automatic values, and everything that follows from them.

    Attributes:
        model: The model's settings. Context and layers are automatic until there is a ``plan``.
        drafts: The draft settings. Automatic drafts are chosen with the ``plan``.
        gpus: The cards in use: even without layers they may compute large batches.
        n_cores: The number of physical cores.
        plan: The memory of the model, None until the settings are fitted into memory.
        n_layer_bytes: The average bytes of the weights of a layer, None if unknown.
        is_draft: Whether the settings belong to a draft model or head.
        reasons: The reason for each value that was chosen, by flag.
    """

    model: ModelSettings
    drafts: DraftSettings = NO_DRAFTS
    gpus: tuple[Device, ...] = ()
    n_cores: int = 1
    plan: MemoryPlan | None = None
    n_layer_bytes: int | None = None
    is_draft: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_settings(
        cls,
        model: ModelSettings,
        drafts: DraftSettings = NO_DRAFTS,
        machine_devices: Sequence[Device] | None = None,
        n_cores: int | None = None,
    ) -> Resolved:
        """Return the settings with the values that follow from the machine: its devices and its
        cores, by default this machine's. No file is read.
        """
        resolved = cls(model, drafts, gpus(model, machine_devices), n_cores or physical_cores())
        return resolved._with_micro_batch()._without_amx()

    # -- choosing
    # ----------------------------------------------------------------------------------

    def chosen(self, flag: str, reason: str, **values: Any) -> Resolved:
        """Return the settings with ``values`` of the model, and the reason for ``flag``."""
        model = replace(self.model, **values)
        return replace(self, model=model, reasons={**self.reasons, flag: reason})

    def with_drafts(self, drafts: DraftSettings, reason: str) -> Resolved:
        """Return the settings with ``drafts`` in place of the user's."""
        reasons = {**self.reasons, "--spec-type": reason}
        if self.drafts.is_automatic or drafts.n_draft != self.drafts.n_draft:
            reasons["--spec-draft-n-max"] = reason
        return replace(self, drafts=drafts, reasons=reasons)

    def fitted(self, model: ModelSettings, plan: MemoryPlan) -> Resolved:
        """Return the settings ``model``, which fitting into memory has changed, with their plan."""
        if not model.tensor_split:
            # llama.cpp's default depends on the free memory, and would change the fingerprint at
            # each start.
            model = replace(model, tensor_split=self._layer_shares(model, plan.layers))
        reasons = {**self.reasons, "--ctx-size": _why_context(self.model, plan)}
        if model.placements != self.model.placements:
            reasons["--override-tensor"] = REDUCED
        if model.n_gpu_layers != self.model.n_gpu_layers:
            reasons["--gpu-layers"] = REDUCED
        if model.tensor_split != self.model.tensor_split:
            reasons["--tensor-split"] = "the layers of each GPU, as llama.cpp placed them"
        return replace(
            self,
            model=replace(model, n_ctx=plan.n_ctx),
            plan=plan,
            n_layer_bytes=plan.n_layer_bytes,
            reasons=reasons,
        )

    def _with_micro_batch(self) -> Resolved:
        if self.model.n_ubatch:
            return self
        if self.gpus:
            default = GPU_UBATCH
            reason = ON_GPU
        else:
            default = CPU_UBATCH
            reason = "the default without a GPU"
        n_ubatch = min(default, self.model.n_batch)
        if n_ubatch < default:
            reason = "as many as --batch-size allows"
        return self.chosen("--ubatch-size", reason, n_ubatch=n_ubatch)

    def with_expert_batches(self) -> Resolved:
        """Return the settings with larger automatic batches if the model is a mixture of experts.

        Raises ModelError if the model's file cannot be read.
        """
        if self.reasons.get("--ubatch-size") != ON_GPU:
            return self
        n_experts = max(self.file_head.numbers.get("expert_count", ()), default=0)
        if n_experts < 2:
            return self
        n_ubatch = min(EXPERTS_UBATCH, self.model.n_batch)
        reason = "the default of a mixture of experts on a GPU"
        return self.chosen("--ubatch-size", reason, n_ubatch=n_ubatch)

    def _without_amx(self) -> Resolved:
        """Return the settings without repacked weights where llama.cpp would multiply them with
        AMX.
        """
        # In the pinned release, ggml_backend_amx_mul_mat adds byte offsets to float pointers: with
        # several sequences in one batch of a hybrid model, all but the first get wrong results.
        # Small quantised weights crash it.
        has_amx = b"AMX_INT8 = 1" in (api.llama_print_system_info() or b"")
        if not (self.model.repack and has_amx):
            return self
        return self.chosen("--repack", "llama.cpp's AMX kernels give wrong results", repack=False)

    def _layer_shares(self, model: ModelSettings, layers: Sequence[str]) -> tuple[float, ...]:
        """Return the shares that place ``layers`` on their devices again; empty without a split by
        layers.
        """
        if model.split_mode != "layer":
            return ()
        names = model.devices or tuple(gpu.name for gpu in self.gpus)
        counts = tuple(float(sum(layer == name for layer in layers)) for name in names)
        return counts if len(counts) > 1 and all(counts) else ()

    # -- values that follow from others
    # ----------------------------------------------------------------------------------

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan of settings that are fitted."""
        assert self.plan is not None, "the settings are not fitted yet"
        return self.plan

    @property
    def path(self) -> Path:
        """The model's file, or the first of its parts."""
        return Path(self.model.path)

    @property
    def file_head(self) -> FileHead:
        """The metadata of the model's first file. Raises ModelError if it cannot be read."""
        return file_head(model_files(self.path)[0])

    @property
    def tensors(self) -> Mapping[str, int]:
        """The bytes of the tensors in the model's files by name. Raises ModelError if one cannot be
        read.
        """
        return tensor_bytes(self.path)

    @property
    def batch_cost(self) -> int:
        """The preferred average tokens of a batch, see `batch_ends`: half a full one on a GPU,
        which evaluates it as fast per token (bench/results/gpu-batches.md of 1323d1c8); 0 without a
        GPU, where batches cost little.
        """
        return self.model.n_ubatch // 2 if self.gpus else 0

    @property
    def n_threads(self) -> int:
        """Threads of the CPU for single tokens."""
        if self.model.n_threads > 0:
            return self.model.n_threads
        if self.n_layer_bytes is None:
            return self.n_cores
        return min(self.n_cores, max(self.n_layer_bytes // BYTES_PER_THREAD, 1))

    @property
    def n_threads_batch(self) -> int:
        """Threads of the CPU for prompts."""
        if self.model.n_threads_batch > 0:
            return self.model.n_threads_batch
        if self.model.n_threads > 0:
            return self.model.n_threads
        return self.n_cores

    @property
    def n_state_history(self) -> int:
        """The number of earlier states that a recurrent cell keeps for rollback of drafts."""
        if self.is_draft or not self.drafts.has(*MODEL_TYPES):
            return 0
        # llama.cpp requires the tokens of these states in one batch, and aborts if they exceed it.
        return max(min(self.drafts.n_draft, self.model.n_ubatch - 2), 0)

    @property
    def n_outputs(self) -> int:
        """The maximum number of outputs of one evaluation. The outputs of a whole batch would take
        0.5 GB with a large vocabulary.
        """
        n_seqs = self.model.n_seqs
        if self.is_draft:
            return n_seqs
        longest = LONG_DRAFT if self.drafts.drafts_from_text else PREDICTED_DRAFT
        if self.drafts.has("cache"):
            longest = LONGEST
        return max(n_seqs * (1 + self.n_state_history), 1 + longest)

    @property
    def n_cells(self) -> int:
        """The cells of the context: all tokens, or with a pool the cells for one batch."""
        return self.n_pool_cells if self.memory.pool is not None else self.model.n_ctx

    @property
    def n_pool_cells(self) -> int:
        """The cells of a context with a pool."""
        return max(padded(self.model.n_ubatch + TRIAL_CELLS), MIN_POOL_CELLS)

    def max_tokens(self, n_cells: int) -> int:
        """Return the limit of one sequence in a context of ``n_cells``."""
        share = n_cells if self.model.kv_unified else n_cells // self.model.n_seqs
        limit = self.model.n_ctx_per_seq
        return min(share, limit) if limit else share

    # -- other contexts
    # ----------------------------------------------------------------------------------

    @property
    def embedder(self) -> Resolved:
        """The settings of a context that evaluates one text at a time, with every core."""
        alone = replace(self.model, n_seqs=1, n_batch=self.model.n_ubatch)
        return replace(self, model=alone, drafts=NO_DRAFTS, n_layer_bytes=None)

    @property
    def head(self) -> Resolved:
        """The settings of the context of a head in the model's own file."""
        return replace(self, model=self.drafts.for_context(self.model), is_draft=True)

    @property
    def draft_file(self) -> Resolved:
        """The settings of the draft model or head in another file."""
        n_layer_bytes = self.plan.n_draft_layer_bytes if self.plan is not None else None
        return replace(
            self,
            model=self.drafts.for_file(self.model),
            plan=None,
            n_layer_bytes=n_layer_bytes,
            is_draft=True,
        )

    # -- showing
    # ----------------------------------------------------------------------------------

    @property
    def values(self) -> tuple[ResolvedValue, ...]:
        """The value of each flag that can be automatic, and the reason for it."""
        return tuple(self._rows())

    def _rows(self) -> Iterator[ResolvedValue]:
        """Yield a value per flag: placement and context of the model, threads, then drafts."""
        model = self.model
        drafts = self.drafts
        cards = ",".join(gpu.name for gpu in self.gpus) or "none"
        yield self._row("--device", cards, "devices", "every GPU" if self.gpus else "no GPU")
        yield self._row("--gpu-layers", self._layers, "n_gpu_layers", "as llama.cpp places them")
        yield self._row("--split-mode", model.split_mode, "split_mode")
        split = ",".join(f"{share:g}" for share in model.tensor_split) or "none"
        yield self._row("--tensor-split", split, "tensor_split")
        yield self._row("--override-tensor", f"{len(model.placements)} rules", "placements")
        yield self._row("--ctx-size", f"{model.n_ctx}", "n_ctx", "the model's own")
        yield self._row("--parallel", f"{model.n_seqs}", "n_seqs")
        yield self._row("--ubatch-size", f"{model.n_ubatch}", "n_ubatch")
        yield self._row("--threads", f"{self.n_threads}", "n_threads", self._why_threads)
        yield self._row(
            "--threads-batch",
            f"{self.n_threads_batch}",
            "n_threads_batch",
            "as --threads" if model.n_threads > 0 else "one per core",
        )
        yield self._row("--repack", "on" if model.repack else "off", "repack")
        types = ",".join(drafts.ordered_types) or "none"
        given = GIVEN if drafts.draft_types else DEFAULT
        yield ResolvedValue("--spec-type", types, self.reasons.get("--spec-type", given))
        if drafts.ordered_types:
            given = GIVEN if drafts.n_draft != DraftSettings.n_draft else DEFAULT
            reason = self.reasons.get("--spec-draft-n-max", given)
            yield ResolvedValue("--spec-draft-n-max", f"{drafts.n_draft}", reason)

    def _row(self, flag: str, value: str, name: str, automatic: str = DEFAULT) -> ResolvedValue:
        """Return the row of ``flag``, which sets the field ``name`` of the model's settings."""
        is_given = getattr(self.model, name) != getattr(ModelSettings, name)
        return ResolvedValue(flag, value, self.reasons.get(flag, GIVEN if is_given else automatic))

    @property
    def _layers(self) -> str:
        if self.plan is not None and self.plan.layers:
            return f"{self.plan.n_gpu_layers} of {len(self.plan.layers)}"
        return {-1: "auto", -2: "all"}.get(self.model.n_gpu_layers, f"{self.model.n_gpu_layers}")

    @property
    def _why_threads(self) -> str:
        if self.n_threads == self.n_cores:
            return "one per core"
        return f"the weights of a layer occupy no more: {(self.n_layer_bytes or 0) / MIB:.1f} MiB"


def _why_context(given: ModelSettings, plan: MemoryPlan) -> str:
    if given.n_ctx:
        return GIVEN
    return "the model's own" if plan.n_ctx >= plan.n_ctx_train else REDUCED


def gpus(
    settings: ModelSettings, machine_devices: Sequence[Device] | None = None
) -> tuple[Device, ...]:
    """Return the GPUs in use, of this machine's devices or of others. Even without layers they may
    compute large batches.
    """
    all_devices = devices() if machine_devices is None else machine_devices
    gpus = (device for device in all_devices if device.is_gpu)
    return tuple(gpu for gpu in gpus if not settings.devices or gpu.name in settings.devices)


def padded(n: int) -> int:
    """Return the cells that llama.cpp makes of ``n``."""
    return max(-(-n // CELL_STEP), 1) * CELL_STEP


def physical_cores() -> int:
    """Return the cores that this process may use; two threads of one core count once, since they
    share its arithmetic units.
    """
    siblings = {
        cpu: Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        for cpu in os.sched_getaffinity(0)
    }
    return max(len({read_text(path) or cpu for cpu, path in siblings.items()}), 1)

"""The memory that a model needs, and the check whether it has room next to loaded models."""

from __future__ import annotations

from dataclasses import replace

from pyctl.llama.draft.draft_file import with_inferred_type
from pyctl.llama.fit.context_fit import ContextRange, known_sum, whole_context
from pyctl.llama.fit.dry_runs import dry_run
from pyctl.llama.images.make_encoder import make_encoder
from pyctl.llama.library.devices import devices, host_available
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.memory_plan import MemoryPlan
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.resolved import Resolved
from pyctl.llama.settings.vision_settings import VisionSettings

__all__ = ["has_room", "required_memory"]


def required_memory(
    settings: ModelSettings, drafts: DraftSettings, vision: VisionSettings
) -> MemoryPlan:
    """Return the memory of a model with all its layers where they belong and the whole context that
    it requests.

    Loads nothing. Raises ModelError for a file that cannot be loaded, and for a context that no
    memory of the machine could hold.
    """
    inferred = with_inferred_type(drafts)
    resolved = Resolved.from_settings(settings, inferred).with_expert_batches()
    usage = None
    if vision.mmproj_path and not vision.is_optional:
        usage = make_encoder(resolved, vision).usage
    with dry_run(resolved, usage) as run:
        contexts = ContextRange(
            given=settings.n_ctx,
            n_ctx_train=run.n_ctx_train,
            least=settings.fit_ctx,
            can_reduce=False,
            memory_bytes=known_sum(device.total for device in devices()),
        )
        return whole_context(run.plan, contexts)


def has_room(plan: MemoryPlan, *, is_known: bool) -> bool:
    """Return whether ``plan`` fits into the memory that is free now; with the margins of
    --fit-target unless it ``is_known`` from an earlier load.
    """
    free = {device.name: device.free for device in devices() if device.is_gpu}
    gpus = [replace(place, free=free.get(place.name)) for place in plan.gpus]
    host = replace(plan.host, free=host_available())
    gpus_missing = [place.shortage() if is_known else place.missing for place in gpus]
    return not (any(gpus_missing) or host.missing)

"""Whether a model has room next to those that are loaded."""

from __future__ import annotations

from dataclasses import replace

from pyctl.engine.draft.draft_settings import DraftSettings
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.vision_settings import VisionSettings
from pyctl.llama.devices import devices, host_available
from pyctl.llama.draft.draft_file import with_inferred_type
from pyctl.llama.dry_runs import dry_run
from pyctl.llama.fit import plan_whole, shortage
from pyctl.llama.make_encoder import make_encoder
from pyctl.llama.memory_plan import MemoryPlan
from pyctl.llama.params import with_ubatch, without_amx

__all__ = ["has_room", "wanted_memory"]


def wanted_memory(
    settings: ModelSettings, drafts: DraftSettings, vision: VisionSettings
) -> MemoryPlan:
    """Return the memory of a model with all its layers where they belong and the whole context that
    it requests.

    Loads nothing. Raises ModelError for a file that cannot be loaded, and for a context that no
    memory of the machine could hold.
    """
    settings = without_amx(with_ubatch(settings))
    encoder = (
        make_encoder(settings, vision) if vision.mmproj_path and not vision.is_optional else None
    )
    with dry_run(
        settings, with_inferred_type(drafts), encoder.usage if encoder is not None else None
    ) as run:
        return plan_whole(run, settings, [device.total for device in devices()])


def has_room(settings: ModelSettings, plan: MemoryPlan, *, is_known: bool) -> bool:
    """Whether ``plan`` fits into the memory that is free now; with the margins of --fit-target
    unless it ``is_known`` from an earlier load.
    """
    free = {device.name: device.free for device in devices() if device.is_gpu}
    gpus = [replace(place, free=free.get(place.name)) for place in plan.gpus]
    host = replace(plan.host, free=host_available())
    missing = [
        place.shortage() if is_known else shortage(settings, place, i)
        for i, place in enumerate(gpus)
    ]
    return not (any(missing) or shortage(settings, host))

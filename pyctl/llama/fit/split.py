"""The split of a model over several GPUs: layers for each or, with --split-mode tensor, a part of
each tensor, if that works.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pyctl.llama.library.devices import Device
from pyctl.llama.library.extension import build_version
from pyctl.llama.library.module_trial import TRY_AGAIN, reason_of_trial, remembered
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.settings.limit import limit

__all__ = ["IN_TRIAL", "try_split", "with_split"]

log = logging.getLogger(__name__)

SPLIT_SECONDS = limit(
    600.0, "trial of --split-mode tensor", "the GPUs share the model by layers", "process", "s"
)

IN_TRIAL = "PYCTL_SPLIT_TRIAL"
"""The variable of a process that tries settings."""


def with_split(
    settings: ModelSettings,
    drafts: DraftSettings,
    found: Sequence[Device],
    attempt: Callable[[ModelSettings, DraftSettings], str] | None = None,
) -> ModelSettings:
    """Return ``settings``, by layers if llama.cpp would end the process with a part of each tensor
    on each GPU.

    That is known from an earlier start, or tried. ``found`` are the GPUs in use. ``attempt``
    returns the reason against settings, empty if they can be used.
    """
    if len(found) < 2 or settings.split_mode not in ("layer", "tensor") or IN_TRIAL in os.environ:
        return settings
    if settings.split_mode == "tensor":
        status = Path(settings.path).stat()
        facts = (
            status.st_size,
            status.st_mtime_ns,
            build_version(),
            [gpu.description for gpu in found],
        )
        key = hashlib.blake2b(repr((settings, drafts, facts)).encode(), digest_size=16).hexdigest()
        try:
            kept = remembered(
                "splits.json", key, lambda: {"tensor": (attempt or try_split)(settings, drafts)}
            )
            reason = kept.explain(kept.results["tensor"])
        except OSError as error:  # such as a card that another program has filled
            reason = f"it cannot be tried: {error}; {TRY_AGAIN}"
        if reason:
            log.warning("--split-mode layer instead of tensor: %s", reason)
            settings = replace(settings, split_mode="layer")
    log.info("%d GPUs share the model: --split-mode %s", len(found), settings.split_mode)
    return settings


def try_split(settings: ModelSettings, drafts: DraftSettings) -> str:
    """Return the reason against these settings from a separate process, which llama.cpp may end."""
    log.info("trying --split-mode tensor once with this model")
    reason = reason_of_trial((settings, drafts), {IN_TRIAL: "1"}, SPLIT_SECONDS)
    first, blank, rest = reason.partition(" ")
    return (
        first.rpartition("/")[2] + blank + rest
    )  # llama.cpp's errors start with the path of a source file

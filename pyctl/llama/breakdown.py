"""Memory of a context by device: counted by the extension, else estimated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyctl.llama.estimate import Estimate, Parts
from pyctl.llama.extension import core
from pyctl.llama.settings.resolved import Resolved

__all__ = ["core", "parts_of"]


def parts_of(ctx: Any, resolved: Resolved, tensors: Mapping[str, int]) -> Mapping[str, Parts]:
    """Return the memory of ``ctx`` by device, "" for the host. ``tensors`` are the bytes of those
    in use by name.
    """
    if core is None:
        return Estimate(ctx, resolved, tensors).parts()
    counted: Mapping[str, Parts] = core.breakdown(ctx)
    return counted

"""How much memory of the device attention may have, where that is less than the context needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyctl.convert import integer
from pyctl.engine.pool.selection import SelectSettings
from pyctl.setting import CONTEXT

__all__ = ["PoolSettings"]


@dataclass(frozen=True)
class PoolSettings:
    """``n_pooled`` rows of all layers may lie on the device; -1 as many as fit, if not all do, and 0 is no pool.

    To ``select`` among rows takes a pool, of all that fit unless ``n_pooled`` says how many.
    """

    n_pooled: int = CONTEXT.flag(
        0,
        "--kv-pool",
        "tokens whose K and V may lie on the device, off = all of the context, auto = what fits; the rest is read from "
        "RAM whenever it is needed, and no reply depends on it",
        integer(1, auto=-1, off=0),
        "PYCTL_KV_POOL",
        "off|auto|TOKENS",
        shown="off",
    )
    select: SelectSettings = field(default_factory=SelectSettings)

    @property
    def is_wanted(self) -> bool:
        """Whether there is to be a pool."""
        return bool(self.n_pooled or self.select.n_selected)

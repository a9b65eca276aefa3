"""Settings of the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.settings.convert import tokens
from pyctl.settings.setting import CONTEXT

__all__ = ["PoolSettings"]


@dataclass(frozen=True)
class PoolSettings:
    """Settings of the pool: ``n_pooled`` rows of all layers on the device, -1 as many as fit, 0 for
    no pool.
    """

    n_pooled: int = CONTEXT.flag(
        0,
        "--kv-pool",
        "tokens of K and V on the device, off = the whole context, auto = as many as fit; "
        "attention "
        "reads the others from RAM; replies do not change",
        tokens(1, auto=-1, off=0),
        "PYCTL_KV_POOL",
        "off|auto|TOKENS",
        shown="off",
    )

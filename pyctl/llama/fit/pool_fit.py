"""Fitting of a KV pool: the number of resident layers, and the total memory."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

from pyctl.engine.pool_plan import PoolPlan
from pyctl.errors import ModelError
from pyctl.llama.fit.breakdown import FLOAT_BYTES
from pyctl.llama.fit.dry_runs import CTX_STEP, DryRun, dry_run, refusal
from pyctl.llama.fit.fitting import fit_drafts, fit_settings
from pyctl.llama.library.devices import element_bytes
from pyctl.llama.settings.memory_plan import MemoryPlan, Place, Usage
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.llama.settings.resolved import Resolved, padded

__all__ = ["fit_all", "fit_pool"]

log = logging.getLogger(__name__)

MASK_BYTES = 2
"""Bytes of a number in the mask of attention, and in rows that attention converts: f16."""

MASK_STEP = 64
"""llama.cpp pads the tokens of a mask up to a multiple of this."""


def fit_all(
    resolved: Resolved, vision: tuple[str, int] | None, pool: PoolSettings | None
) -> Resolved:
    """Return the settings that fit into memory: with a ``pool`` if one is possible, else with
    automatic drafts and as many layers on GPUs as fit.

    ``vision`` is the device of the vision encoder, empty for the CPU, and its bytes. Raises
    ModelError if the context cannot fit, or if ``pool`` excludes another setting.
    """
    pooled = fit_pool(resolved, pool) if pool is not None else None
    if pooled is None:
        return fit_settings(fit_drafts(resolved, vision), vision)
    if vision is not None:
        raise ModelError("--kv-pool excludes --mmproj: a pool holds no rows of images")
    return pooled


def fit_pool(resolved: Resolved, pooled: PoolSettings) -> Resolved | None:
    """Fit as `fit_settings`, with a pool as in ``pooled``; None for no pool.

    Without a pool, the log has the reason: it cannot hold this model's rows, or all rows fit.
    ModelError if --kv-pool is too small, the host has no room for the streamed layers, or workers
    hold layers.
    """
    settings = resolved.model
    if settings.workers:
        # They compute graphs as they were sent, while a pool changes them for each evaluation.
        raise ModelError("--kv-pool excludes --rpc")
    n_tokens = pooled.n_pooled
    with dry_run(resolved) as run:
        try:
            rows = _PooledRows(run, resolved)
        except ModelError as error:
            log.warning("--kv-pool disabled: %s", error)
            return None
        maximum = padded(settings.n_ctx or run.n_ctx_train)
        if n_tokens < 0 and rows.need_no_pool(maximum):
            reason = "all of K and V fit" if rows.is_on_gpu else "no GPU"
            log.info("--kv-pool disabled: %s", reason)
            return None
        plan = rows.plan(maximum, n_tokens)
        can_reduce = settings.fit and not settings.n_ctx
        if can_reduce and plan.host.missing:
            plan = rows.plan(rows.n_fitting(padded(settings.fit_ctx), maximum, n_tokens), n_tokens)
            log.warning(
                "context reduced from %d to %d tokens to fit into memory (-c)", maximum, plan.n_ctx
            )
    if plan.host.missing:
        raise ModelError(refusal(plan.n_ctx, plan.host.usage.total, plan.host.free or 0))
    return resolved.fitted(settings, plan)


class _PooledRows:
    """Placements of the rows of ``run``. ModelError if a pool is not possible."""

    def __init__(self, run: DryRun, resolved: Resolved) -> None:
        self._run = run
        self._resolved = resolved
        places, row_bytes = run.pooled_layers()
        self._place = places[0]
        self._n_layers = len(places)
        self._layer_row = round(row_bytes / self._n_layers)

    @property
    def is_on_gpu(self) -> bool:
        """True if attention runs on a GPU."""
        return self._place != self._run.plan(CTX_STEP).host.name

    def need_no_pool(self, n_rows: int) -> bool:
        """Return whether a pool of ``n_rows`` would gain nothing: all rows fit, or attention runs
        on the host.
        """
        if not self.is_on_gpu:
            return True
        base = self._run.plan(CTX_STEP)
        free = sum(place.free or 0 for place in base.places)
        if n_rows * self._layer_row * self._n_layers > free:
            return False  # a dry run this large could fail
        return not self._run.plan(n_rows).gpus_missing

    def n_fitting(self, minimum: int, maximum: int, n_tokens: int) -> int:
        """Return the largest context from ``minimum`` to ``maximum`` whose streamed layers fit into
        the host, by bisection.
        """
        while maximum - minimum > CTX_STEP:
            middle = (minimum + maximum) // 2 // CTX_STEP * CTX_STEP
            if self.plan(middle, n_tokens).host.missing:
                maximum = middle
            else:
                minimum = middle
        return minimum

    def plan(self, n_rows: int, n_tokens: int) -> MemoryPlan:
        """Return the memory for ``n_rows`` with ``n_tokens`` worth of layers on the device; -1 as
        many as fit.
        """
        n_layers = self._n_layers
        layer_bytes = n_rows * self._layer_row
        if 0 <= n_tokens * n_layers < n_rows:
            minimum = -(-n_rows // n_layers)
            raise ModelError(
                f"--kv-pool {n_tokens} is too small for {n_rows} tokens of context: it must be at "
                f"least {minimum}"
            )
        base = self._run.plan(self._resolved.n_pool_cells, n_rows)
        names = [place.name for place in base.places]
        index = names.index(self._place)
        place = base.places[index]
        place = _with_usage(place, compute=self._compute(n_rows, is_gpu=place.is_gpu))
        if n_tokens < 0:
            whole = _with_usage(place, kv=layer_bytes * n_layers)
            n_resident = n_layers - -(-whole.missing // layer_bytes)
        else:
            n_resident = n_tokens * n_layers // n_rows
        pool = PoolPlan.of(n_resident, n_rows, n_layers, layer_bytes)
        places = [*base.places]
        places[index] = _with_usage(place, kv=pool.device_bytes)
        places[-1] = _with_usage(places[-1], kv=pool.host_bytes)
        row_bytes = float(self._layer_row * n_layers)
        return replace(base, n_ctx=n_rows, row_bytes=row_bytes, places=tuple(places), pool=pool)

    def _compute(self, n_rows: int, *, is_gpu: bool) -> int:
        """Return the bytes of attention for ``n_rows`` missing in llama.cpp's estimate: a mask, and
        on a GPU with quantised rows one layer in f16 and attention's output.
        """
        n_ubatch = self._resolved.model.n_ubatch
        n_masked = -(-n_ubatch // MASK_STEP) * MASK_STEP
        mask = MASK_BYTES * n_masked * n_rows
        n_elements = self._layer_row / sum(self._widths)  # of K, or of V, of a token in a layer
        converted = sum(MASK_BYTES * n_elements for width in self._widths if width < MASK_BYTES)
        if not (is_gpu and converted):
            return mask
        n_heads, width = self._heads
        output = FLOAT_BYTES * n_heads * width * n_ubatch
        return mask + int(converted) * n_rows + output

    @property
    def _heads(self) -> tuple[int, int]:
        """The most query heads of any layer, and the width of values."""
        arch = self._run.metadata("general.architecture")
        counts = re.findall(r"\d+", self._run.metadata(f"{arch}.attention.head_count"))
        n_heads = max(map(int, counts), default=1)
        width = self._run.metadata(f"{arch}.attention.value_length")
        return n_heads, int(width or int(self._run.metadata(f"{arch}.embedding_length")) // n_heads)

    @property
    def _widths(self) -> tuple[float, float]:
        """Bytes per element of K and of V."""
        settings = self._resolved.model
        return element_bytes(settings.type_k), element_bytes(settings.type_v)


def _with_usage(place: Place, **more: int) -> Place:
    """Return ``place`` with ``more`` bytes by the names of `Usage`."""
    return replace(place, usage=place.usage + Usage(**more))

"""Fitting of a KV pool: the number of resident layers, and the total memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from pyctl.engine.pool_plan import PoolPlan
from pyctl.errors import ModelError
from pyctl.llama.fit.breakdown import FLOAT_BYTES
from pyctl.llama.fit.context_fit import CTX_STEP, check_host
from pyctl.llama.fit.dry_runs import DryRun, MemoryMeter, PooledLayers
from pyctl.llama.library.devices import element_bytes
from pyctl.llama.settings.memory_plan import MemoryPlan, Place, Usage
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.llama.settings.resolved import padded

__all__ = ["AttentionBuffers", "PooledRows", "pool_plan"]

log = logging.getLogger(__name__)

MASK_BYTES = 2
"""Bytes of a number in the mask of attention, and in rows that attention converts: f16."""

MASK_STEP = 64
"""llama.cpp pads the tokens of a mask up to a multiple of this."""


def pool_plan(meter: MemoryMeter, pooled: PoolSettings) -> MemoryPlan | None:
    """Return the memory with the largest context that fits, and with a pool as in ``pooled``; None
    for no pool.

    Without a pool, the log has the reason: it cannot hold this model's rows, or all rows fit.
    ModelError if --kv-pool is too small, the host has no room for the streamed layers, workers hold
    layers, or there is a vision encoder.
    """
    settings = meter.resolved.model
    if settings.workers:
        # They compute graphs as they were sent, while a pool changes them for each evaluation.
        raise ModelError("--kv-pool excludes --rpc")
    n_tokens = pooled.n_pooled
    with meter.dry_run() as run:
        try:
            layers = run.pooled_layers()
        except ModelError as error:
            log.warning("--kv-pool disabled: %s", error)
            return None
        minimum = padded(settings.fit_ctx)
        maximum = padded(settings.n_ctx or run.n_ctx_train)
        buffers = _attention_buffers(run, settings)
        rows = PooledRows(run.plan, layers, meter.resolved.n_pool_cells, buffers)
        if n_tokens < 0 and rows.need_no_pool(maximum):
            reason = "all of K and V fit" if rows.is_on_gpu else "no GPU"
            log.info("--kv-pool disabled: %s", reason)
            return None
        if meter.vision is not None:
            raise ModelError("--kv-pool excludes --mmproj: a pool holds no rows of images")
        plan = rows.plan(maximum, n_tokens)
        can_reduce = settings.fit and not settings.n_ctx
        if can_reduce and plan.host.missing:
            plan = rows.plan(rows.n_fitting(minimum, maximum, n_tokens), n_tokens)
            log.warning(
                "context reduced from %d to %d tokens to fit into memory (-c)", maximum, plan.n_ctx
            )
    check_host(plan)
    return plan


def _attention_buffers(run: DryRun, settings: ModelSettings) -> AttentionBuffers:
    """Return the numbers that determine the buffers of attention, from the file and settings."""
    architecture = run.metadata("general.architecture")
    counts = re.findall(r"\d+", run.metadata(f"{architecture}.attention.head_count"))
    n_heads = max(map(int, counts), default=1)
    value_length = run.metadata(f"{architecture}.attention.value_length")
    width = run.metadata(f"{architecture}.embedding_length")
    return AttentionBuffers(
        n_ubatch=settings.n_ubatch,
        n_heads=n_heads,
        value_length=int(value_length or int(width) // n_heads),
        element_bytes=(element_bytes(settings.type_k), element_bytes(settings.type_v)),
    )


@dataclass(frozen=True)
class AttentionBuffers:
    """The buffers of attention over pooled rows that llama.cpp's count lacks.

    Attributes:
        n_ubatch: The most tokens of an evaluation.
        n_heads: The most query heads of any layer.
        value_length: The length of V of one head.
        element_bytes: The bytes of an element of K and of V.
    """

    n_ubatch: int
    n_heads: int
    value_length: int
    element_bytes: tuple[float, float]

    def n_bytes(self, n_rows: int, layer_row: int, *, is_gpu: bool) -> int:
        """Return the bytes for ``n_rows`` rows of ``layer_row`` bytes: a mask, and on a GPU with
        quantised rows one layer in f16 and attention's output.
        """
        n_masked = -(-self.n_ubatch // MASK_STEP) * MASK_STEP
        mask = MASK_BYTES * n_masked * n_rows
        n_elements = layer_row / sum(self.element_bytes)  # of K, or of V, of a token in a layer
        quantised = [size for size in self.element_bytes if size < MASK_BYTES]
        converted = sum(MASK_BYTES * n_elements for _ in quantised)
        if not (is_gpu and converted):
            return mask
        output = FLOAT_BYTES * self.n_heads * self.value_length * self.n_ubatch
        return mask + int(converted) * n_rows + output


class PooledRows:
    """The memory of a model whose rows lie in a pool, as a function of the number of rows."""

    def __init__(
        self,
        plan_of: Callable[[int, int], MemoryPlan],
        layers: PooledLayers,
        n_cells: int,
        buffers: AttentionBuffers,
    ) -> None:
        """Plan the rows of ``layers``.

        ``plan_of`` returns the memory for the cells of a context and the rows of a draft model, 0
        for as many. ``n_cells`` are the cells of a context with a pool.
        """
        self._plan_of = plan_of
        self._place = layers.place
        self._n_layers = layers.n_layers
        self._layer_row = round(layers.row_bytes / layers.n_layers)
        self._n_cells = n_cells
        self._buffers = buffers

    @property
    def is_on_gpu(self) -> bool:
        """True if attention runs on a GPU."""
        return self._place != self._plan_of(CTX_STEP, 0).host.name

    def need_no_pool(self, n_rows: int) -> bool:
        """Return whether a pool of ``n_rows`` would gain nothing: all rows fit, or attention runs
        on the host.
        """
        if not self.is_on_gpu:
            return True
        base = self._plan_of(CTX_STEP, 0)
        free = sum(place.free or 0 for place in base.places)
        if n_rows * self._layer_row * self._n_layers > free:
            return False  # a dry run this large could fail
        return not self._plan_of(n_rows, 0).gpus_missing

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

        Raises ModelError if ``n_tokens`` are too few for one layer.
        """
        n_layers = self._n_layers
        layer_bytes = n_rows * self._layer_row
        if 0 <= n_tokens * n_layers < n_rows:
            minimum = -(-n_rows // n_layers)
            raise ModelError(
                f"--kv-pool {n_tokens} is too small for {n_rows} tokens of context: it must be at "
                f"least {minimum}"
            )
        base = self._plan_of(self._n_cells, n_rows)
        names = [place.name for place in base.places]
        index = names.index(self._place)
        place = base.places[index]
        compute = self._buffers.n_bytes(n_rows, self._layer_row, is_gpu=place.is_gpu)
        place = _with_usage(place, compute=compute)
        if n_tokens < 0:
            whole = _with_usage(place, kv=layer_bytes * n_layers)
            n_resident = n_layers - -(-whole.missing // layer_bytes)
        else:
            n_resident = n_tokens * n_layers // n_rows
        pool = PoolPlan.for_layers(n_resident, n_rows, n_layers, layer_bytes)
        places = [*base.places]
        places[index] = _with_usage(place, kv=pool.device_bytes)
        places[-1] = _with_usage(places[-1], kv=pool.host_bytes)
        row_bytes = float(self._layer_row * n_layers)
        return replace(base, n_ctx=n_rows, row_bytes=row_bytes, places=tuple(places), pool=pool)


def _with_usage(place: Place, **more: int) -> Place:
    """Return ``place`` with ``more`` bytes by the names of `Usage`."""
    return replace(place, usage=place.usage + Usage(**more))

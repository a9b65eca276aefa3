"""Fitting of a KV pool: the number of resident layers, and the total memory."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

from pyctl.engine.draft.draft_settings import DraftSettings
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.pool_settings import PoolPlan, PoolSettings
from pyctl.errors import ModelError
from pyctl.llama.dry_runs import DryRun, dry_run
from pyctl.llama.fit import CTX_STEP, gpu_shortage, refusal, shortage
from pyctl.llama.memory_plan import MemoryPlan, Place, Usage
from pyctl.llama.params import element_bytes, padded, pool_cells, with_ubatch

__all__ = ["fit_pool"]

log = logging.getLogger(__name__)


def fit_pool(
    settings: ModelSettings, drafts: DraftSettings, pooled: PoolSettings
) -> tuple[ModelSettings, MemoryPlan] | None:
    """Fit as `fit_settings`, with a pool as in ``pooled``; None for no pool.

    Without a pool, the log has the reason: it cannot hold this model's rows, or all rows fit.
    ModelError if --kv-pool is too small, the host has no room for the streamed layers, or workers
    hold layers.
    """
    if (
        settings.workers
    ):  # which compute graphs as they were sent, while a pool changes them for each evaluation
        raise ModelError("--kv-pool excludes --rpc")
    n_tokens = pooled.n_pooled
    with dry_run(settings, drafts) as run:
        try:
            rows = _PooledRows(run, settings)
        except ModelError as error:
            log.warning("--kv-pool disabled: %s", error)
            return None
        maximum = padded(settings.n_ctx or run.n_ctx_train)
        if n_tokens < 0 and rows.need_no_pool(maximum):
            log.info("--kv-pool disabled: %s", "all of K and V fit" if rows.is_on_gpu else "no GPU")
            return None
        plan = rows.plan(maximum, n_tokens)
        if shortage(settings, plan.host) and not settings.n_ctx and settings.fit:
            minimum = padded(settings.fit_ctx)
            first = maximum
            while maximum - minimum > CTX_STEP:
                middle = (minimum + maximum) // 2 // CTX_STEP * CTX_STEP
                fits = not shortage(settings, rows.plan(middle, n_tokens).host)
                minimum, maximum = (middle, maximum) if fits else (minimum, middle)
            plan = rows.plan(minimum, n_tokens)
            log.warning(
                "context reduced from %d to %d tokens to fit into memory (-c)", first, plan.n_ctx
            )
    if shortage(settings, plan.host):
        raise ModelError(refusal(plan.n_ctx, plan.host.usage.total, plan.host.free or 0))
    return replace(settings, n_ctx=plan.n_ctx), plan


class _PooledRows:
    """Placements of the rows of ``run``. ModelError if a pool is not possible."""

    def __init__(self, run: DryRun, settings: ModelSettings) -> None:
        self._run = run
        self._settings = settings
        places, row_bytes = run.pooled_layers()
        self._place = places[0]
        self._n_layers = len(places)
        self._layer_row = round(row_bytes / self._n_layers)

    @property
    def is_on_gpu(self) -> bool:
        """Whether attention runs on a GPU."""
        return self._place != self._run.plan(CTX_STEP).host.name

    def need_no_pool(self, n_rows: int) -> bool:
        """Whether a pool gains nothing: all rows fit, or attention runs on the host."""
        if not self.is_on_gpu:
            return True
        base = self._run.plan(CTX_STEP)
        free = sum(place.free or 0 for place in base.places)
        if n_rows * self._layer_row * self._n_layers > free:
            return False  # a dry run this large could fail
        return not gpu_shortage(self._settings, self._run.plan(n_rows))

    def plan(self, n_rows: int, n_tokens: int) -> MemoryPlan:
        """Return the memory for ``n_rows`` with ``n_tokens`` worth of layers on the device; -1 as
        many as fit.
        """
        settings = self._settings
        n_layers = self._n_layers
        layer_bytes = n_rows * self._layer_row
        if 0 <= n_tokens * n_layers < n_rows:
            minimum = -(-n_rows // n_layers)
            raise ModelError(
                f"--kv-pool {n_tokens} is too small for {n_rows} tokens of context: it must be at "
                f"least {minimum}"
            )
        base = self._run.plan(pool_cells(settings), n_rows)
        index, place = next(
            (i, each) for i, each in enumerate(base.places) if each.name == self._place
        )
        place = _with(place, compute=self._compute(n_rows, is_gpu=place.is_gpu))
        n_fitting = n_tokens * n_layers // n_rows
        if n_tokens < 0:
            missing = shortage(settings, _with(place, kv=layer_bytes * n_layers), index)
            n_fitting = n_layers - -(-missing // layer_bytes)
        pool = PoolPlan.of(n_fitting, n_rows, n_layers, layer_bytes)
        places = [*base.places]
        places[index] = _with(place, kv=pool.device_bytes)
        places[-1] = _with(places[-1], kv=pool.host_bytes)
        row_bytes = float(self._layer_row * n_layers)
        return replace(base, n_ctx=n_rows, row_bytes=row_bytes, places=tuple(places), pool=pool)

    def _compute(self, n_rows: int, *, is_gpu: bool) -> int:
        """Return the bytes of attention for ``n_rows`` missing in llama.cpp's estimate: a mask, and
        on a GPU with quantised rows one layer in f16 and attention's output.
        """
        n_ubatch = -(-with_ubatch(self._settings).n_ubatch // 64) * 64
        n_bytes = 2 * n_ubatch * n_rows
        of_token = self._layer_row / sum(self._widths)  # elements of K, or of V, in a layer
        converted = sum(2 * of_token for width in self._widths if width < 2)
        if is_gpu and converted:
            n_heads, width = self._heads
            n_bytes += (
                int(converted) * n_rows + 4 * n_heads * width * with_ubatch(self._settings).n_ubatch
            )
        return n_bytes

    @property
    def _heads(self) -> tuple[int, int]:
        """The most query heads of any layer, and the width of values."""
        arch = self._run.metadata("general.architecture")
        n_heads = max(
            map(int, re.findall(r"\d+", self._run.metadata(f"{arch}.attention.head_count"))),
            default=1,
        )
        width = self._run.metadata(f"{arch}.attention.value_length")
        return n_heads, int(width or int(self._run.metadata(f"{arch}.embedding_length")) // n_heads)

    @property
    def _widths(self) -> tuple[float, float]:
        """Bytes per element of K and of V."""
        return element_bytes(self._settings.type_k), element_bytes(self._settings.type_v)


def _with(place: Place, **more: int) -> Place:
    return replace(place, usage=place.usage + Usage(**more))

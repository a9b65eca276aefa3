"""A pool as its plan says, in the extension."""

from __future__ import annotations

from pyctl.engine.pool.pool_plan import PoolPlan, StreamCounts
from pyctl.engine.pool.selection import BLOCK
from pyctl.llama.library import RowStore

__all__ = ["counts_of", "open_pool"]


def open_pool(address: int, plan: PoolPlan, *, marks: bool) -> RowStore:
    """The pool of the context at ``address``; RuntimeError where there can be none."""
    chosen: dict[str, int] = {}
    if (select := plan.select) is not None:
        chosen = {"select_rows": select.n_chosen, "sinks": select.n_sinks, "tail": select.n_tail, "block": BLOCK}
        chosen["select_batch"] = plan.n_selecting
    resident, n_stages = list(plan.resident), max(plan.n_stages, 1)
    return RowStore(address, plan.n_rows, resident, marks=marks, stages=n_stages, **chosen)


def counts_of(rows: RowStore) -> StreamCounts:
    """What attention has read and chosen since it was opened."""
    return StreamCounts(rows.streamed_bytes, rows.wait_ms, rows.selected_chunks, rows.fetched_chunks)

"""Requests of several sequences in one pool of cells, and checks of what they leave."""

from __future__ import annotations

import numpy as np

from pyctl.engine.engine import Engine
from pyctl.engine.handle import RequestHandle
from pyctl.engine.sampling import Sampling
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import Reply, cold, request

__all__ = [
    "ENDLESS",
    "KINDS",
    "alone",
    "check_at_rest",
    "check_held",
    "prompt_of",
    "submit",
]

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)
KINDS = ("hybrid", "attention", "opaque")


def prompt_of(seed: int, n: int, head: int = 0) -> Prompt:
    """Return ``n`` tokens, of which the first ``head`` are those of every other prompt."""
    parts = [
        np.random.default_rng(100).integers(1, 60, head),
        np.random.default_rng(seed).integers(1, 60, n - head),
    ]
    tokens = np.concatenate(parts)
    return Prompt.from_ids(tokens, [end for end in (head, n // 2, n - 4) if 0 < end < n])


def submit(engine: Engine, prompt: Prompt, n: int = 8, **fields: object) -> RequestHandle:
    handle = RequestHandle(request(prompt, n, **fields))
    engine.submit(handle)
    return handle


def check_at_rest(engine: Engine, backend: FakeBackend) -> None:
    """Check that no request is left, and no bytes of one."""
    cache = engine.prefix_cache.cache
    assert not engine.running
    assert not engine.waiting
    assert cache.index.retained == []
    assert [seq.id for seq in engine.sequences] == list(range(backend.facts.n_seqs))
    assert [len(held.rows) for held in backend.seqs] == [seq.n for seq in engine.sequences]
    check_held(engine, backend)


def check_held(engine: Engine, backend: FakeBackend) -> None:
    """Check that the cache's bytes and rows are counted, and that the device holds what the cache
    has.
    """
    cache = engine.prefix_cache.cache
    check_invariants(cache)
    held = [segment.held for segment in cache.segments() if segment.held is not None]
    cells = {cell for each in held for cell in each.cells} - {
        cell for seq in backend.seqs for cell in seq.cells
    }
    assert len(cells) == backend.n_held_cells, "rows are held for the cache alone"
    for segment in cache.segments():
        assert segment.held is not None or segment.rows.size or backend.kind == "opaque", (
            "rows that are nowhere"
        )
        assert segment.held is None or segment.held.n_cells == segment.tokens.size
    assert engine.cells.n_used + backend.memory.cells.n_held_cells <= backend.facts.n_cells


def alone(
    prompt: Prompt, n: int, kind: str = "hybrid", n_ctx: int = 1024, **fields: object
) -> Reply:
    return cold(FakeBackend(kind, n_ctx=n_ctx), prompt, n, **fields)

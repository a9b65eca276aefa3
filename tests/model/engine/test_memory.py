"""RAM that the cache takes: shared rows count once for all snapshots and branches, and each
snapshot has a state.
"""

from __future__ import annotations

from collections.abc import Callable

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.llama.loader import Loaded
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ask, chat


def test_fifty_turns_in_four_branches(open_model: Callable[..., Loaded]) -> None:
    """Each row that branches share is kept once: RAM is within 5 % of one row for each distinct
    position and one state for each snapshot. Copies of shared rows would multiply it by the turns.
    """
    backend = open_model("tiny-hybrid", n_ctx=16384).backend
    backend.memory.clear(0)
    engine = Engine(backend, RamCache(256, None), EngineSettings(exact=True))
    branches = [[(1, 700)]]
    for turn in range(50):
        if turn in (10, 20, 30):  # edit an earlier message and go on from there
            stem = branches[0][: turn + 1]
            branches.append([*stem, (9000 + turn, 110)])
        conversation = branches[turn % len(branches)]
        conversation += [(100 + turn, 130 + turn % 7), (500 + turn, 90 + turn % 11)]
        ask(engine, chat(*conversation), 2)
    while engine.prefix_cache.device.copies.copy_one():
        pass
    check_invariants(engine.prefix_cache.cache)
    engine.prefix_cache.cache.prompt_ends.clear()
    check_invariants(engine.prefix_cache.cache)

    positions = set()
    for snapshot in engine.prefix_cache.cache.snapshots():
        tokens = snapshot.last_tokens(snapshot.n)
        digest = 0
        for token in tokens.tolist():
            digest = hash((digest, token))
            positions.add(digest)
    n_snapshots = len(engine.prefix_cache.cache.snapshots())
    row_bytes = backend.memory.shape.sizes.rows(0, 2) - backend.memory.shape.sizes.rows(0, 1)
    state_bytes = backend.memory.state_size(0)
    assert n_snapshots > 50
    theoretical = len(positions) * row_bytes + n_snapshots * state_bytes
    assert engine.prefix_cache.cache.n_bytes <= 1.05 * theoretical
    assert engine.prefix_cache.cache.n_bytes >= theoretical
    rows_only = engine.prefix_cache.cache.n_bytes - n_snapshots * state_bytes
    assert rows_only <= 1.05 * len(positions) * row_bytes, (
        "also without the states, which are most of it here"
    )
    backend.memory.clear(0)

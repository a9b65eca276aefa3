"""python -m tests.model.in_parts LIBRARY MODEL TYPE: rows and states in parts on the two devices of
LIBRARY.

A process of its own, since devices stay for as long as it lives. ``TYPE`` is that of K and V.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace

import numpy as np
from llama_cpp import llama_cpp as api

from pyctl.cache.snapshot import Rows, State
from pyctl.engine.backend import SequenceTokens
from pyctl.llama.fit.dry_runs import dry_run
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.resolved import Resolved
from pyctl.prompt import as_tokens

N = 200
UBATCH = 64
CUTS = (UBATCH, 2 * UBATCH)
TOKENS = as_tokens(np.random.default_rng(1).integers(5, 250, N))


def read(backend: LlamaBackend, start: int = 0, end: int = N) -> np.ndarray:
    """Evaluate the text from ``start`` on; return the logits at ``end``."""
    for first in range(start, end, UBATCH):
        backend.evaluate(0, TOKENS[first : min(first + UBATCH, end)], first)
    return backend.logits(0).copy()


def saved(backend: LlamaBackend, n: int) -> tuple[Rows, State]:
    found = backend.memory.save_rows(0, 0, n), backend.memory.save_state(0, n)
    backend.memory.synchronize()
    return found


def bytes_of(snapshot: tuple[Rows, State]) -> list[bytes]:
    rows, state = snapshot
    return [rows.block.tobytes(), rows.draft.tobytes(), state.recurrent.tobytes()]


def put(backend: LlamaBackend, n: int, rows: Rows, state: State) -> None:
    backend.memory.clear(0)
    backend.memory.restore(0, 0, [(rows, 0, n)], state)


def check_returns(backend: LlamaBackend) -> None:
    """Check that the backend goes on from every cut as in a cold run, however the cut's rows were
    kept.
    """
    kept = {}
    for n in CUTS:
        read(backend, n - UBATCH, n)
        rows, state = saved(backend, n)
        kept[n] = [(rows, state)]
        if backend.memory.shape.can_hold:
            kept[n].append((backend.memory.save_rows(0, 0, n, hold=True), state))
    cold = read(backend, CUTS[-1])
    for n, ways in kept.items():
        for rows, state in ways:
            backend.memory.clear(0)
            backend.evaluate(0, TOKENS[N - 50 :], 0)  # takes the cells of what is held
            put(backend, n, rows, state)
            assert np.array_equal(read(backend, n), cold)
    if backend.memory.kv.has_marks:
        put(backend, n, *kept[n][0])
        backend.memory.kv.mark(0, n)
        backend.evaluate(0, TOKENS[:3], n)
        assert backend.memory.kv.reset(0) == n
        assert np.array_equal(read(backend, n), cold)


def check_bytes(backend: LlamaBackend, whole: LlamaBackend) -> None:
    """Check that blocks are those of ``whole``, where the library put together what it wrote
    itself.
    """
    n = CUTS[-1]
    put(backend, n, *saved_at(backend, n))
    backend.memory.kv.reserve(0)
    data = np.empty(api.llama_state_seq_get_size(backend.ctx, 0), np.uint8)
    pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    assert api.llama_state_seq_get_data(backend.ctx, pointer, data.size, 0) == data.size
    whole.memory.kv.reserve(0)
    assert api.llama_state_seq_set_data(whole.ctx, pointer, data.size, 0) == data.size
    rows, _, state = bytes_of(saved(backend, n))
    assert [rows, b"", state] == bytes_of(saved(whole, n))


def saved_at(backend: LlamaBackend, n: int) -> tuple[Rows, State]:
    backend.memory.clear(0)
    read(backend, 0, n)
    return saved(backend, n)


def main(library: str, path: str, kind: str) -> None:
    """Compare a model split by tensors over two devices with one split by layers and one on the
    host: plans, restores, bytes of blocks, and blocks of one split restored in the other.
    """
    api.llama_backend_init()
    ctypes.CDLL(library).add_devices()
    drafts = DraftSettings(draft_types=("draft-mtp",) if "nextn" in path else ("ngram-mod",))
    chosen = ModelSettings(
        path=path, type_k=kind, type_v=kind, flash_attn="on", n_ctx=1024, n_ubatch=UBATCH, n_seqs=1
    )
    tensor, layer = (replace(chosen, split_mode=mode) for mode in ("tensor", "layer"))
    plans = []
    for settings in (tensor, layer):
        with dry_run(Resolved.from_settings(settings)) as run:
            plans.append(run.plan(1024))
    assert plans[0].row_bytes == plans[1].row_bytes
    assert len(plans[0].gpus) == 2
    assert plans[1].state_bytes <= plans[0].state_bytes <= 2 * plans[1].state_bytes

    parts = load(tensor, drafts=drafts)
    layers = load(layer, drafts=drafts)
    whole = load(replace(chosen, n_gpu_layers=0, devices=("none",))).backend
    assert parts.backend.memory.kv.is_async
    assert parts.info.fingerprint == layers.info.fingerprint
    assert parts.split_mode != layers.split_mode
    check_returns(parts.backend)
    check_bytes(parts.backend, whole)
    for one, other in ((parts.backend, layers.backend), (layers.backend, parts.backend)):
        snapshot = saved_at(one, CUTS[-1])
        put(other, CUTS[-1], *snapshot)
        assert bytes_of(saved(other, CUTS[-1])) == bytes_of(snapshot)
        if drafts.has("draft-mtp"):
            assert other.draft([SequenceTokens(0, (7,), CUTS[-1])], 2)[0]


if __name__ == "__main__":
    main(*sys.argv[1:])

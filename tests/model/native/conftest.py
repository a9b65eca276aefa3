"""Contexts whose rows lie outside of llama.cpp's cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

from pyctl.llama.library.bindings import api
from pyctl.llama.library.native import KVState, RowStore
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import as_tokens
from tests.model.native.stores import UBATCH, Store


@pytest.fixture(scope="module")
def full(open_model: Callable[..., Loaded]) -> Callable[[str, str], LlamaBackend]:
    """full("tiny-hybrid", "q8_0") -> an empty backend with all cells in llama.cpp."""

    def get(name: str, kv: str) -> LlamaBackend:
        return open_model(
            name, type_k=kv, type_v=kv, flash_attn="on", n_ctx=2048, n_ubatch=UBATCH
        ).backend

    return get


@pytest.fixture
def store(model_path: Callable[[str], object]) -> Iterator[Callable[..., Store]]:
    """store("tiny-hybrid", "q8_0", resident=[0]) -> an empty store, its context with just enough
    cells.

    ``select`` is what is to be said of chosen rows.
    """
    opened: list[LlamaBackend] = []

    def get(
        name: str,
        kv: str = "f16",
        *,
        resident: list[int],
        n_ctx: int = 1000,
        stages: int = 2,
        marks: bool = False,
        lag: int = 0,
        **fields: object,
    ) -> Store:
        """Return an empty store of ``n_ctx`` rows beside a context with few cells."""
        chosen = {"flash_attn": "on", "n_ctx": 256, "n_ubatch": UBATCH, "n_threads": 1, **fields}
        path = str(chosen.pop("path", None) or model_path(name))
        backend = load(ModelSettings(path=path, type_k=kv, type_v=kv, **chosen)).backend
        opened.append(backend)
        backend.evaluate(0, as_tokens([1]), 0)
        address = ctypes.cast(backend.ctx, ctypes.c_void_p).value or 0
        kv_state = KVState(address, marks=marks, lag=lag)
        backend.memory.attach(kv_state, backend.facts, int(api.llama_n_rs_seq(backend.ctx)))
        del kv_state
        backend.memory.store = RowStore(backend.memory.kv, n_ctx, resident, stages)
        backend.memory.kv.clear(0)
        return Store(backend)

    yield get
    for backend in opened:
        backend.unload()

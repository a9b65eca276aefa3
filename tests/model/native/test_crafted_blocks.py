"""Loading a crafted block succeeds or raises an error; nothing crashes, and the sequence stays
usable.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_cpp import llama_cpp as api

from pyctl.cache.snapshot import Block, Rows, State
from pyctl.errors import OutOfCellsError, StateError
from pyctl.llama.library.native import checked
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.prompt import as_tokens
from tests.effort import examples
from tests.model.given_model import GivenModel

N = 48
POSITIONS = struct.Struct("<qq")
P0 = 16
"""The place of the positions in a block's header."""

ODD = (
    *(
        0,
        1,
        -1,
        N,
        N - 1,
        2**15,
        2**16,
        2**20,
        2**24,
        2**31 - 1,
        2**31,
        2**32,
        2**32 - 1,
        2**33 + 5,
        2**40,
    ),
    *(2**56, 2**60, 2**61, 2**62, 2**63 - 1, -(2**63), -(2**31)),
)
"""Numbers at which arithmetic breaks."""

fuzzed = settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def hybrid(open_model: Callable[..., Loaded]) -> LlamaBackend:
    return open_model("tiny-hybrid", n_ctx=256).backend


@pytest.fixture
def recurrent(open_model: Callable[..., Loaded]) -> LlamaBackend:
    """Return a backend whose memory has no rows."""
    return open_model("tiny-mamba2", n_ctx=256).backend


@pytest.fixture
def windowed(open_model: Callable[..., Loaded]) -> LlamaBackend:
    return open_model("tiny-gemma3", n_ctx=256).backend


@pytest.fixture
def pooled(open_model: Callable[..., Loaded]) -> LlamaBackend:
    """Return a backend whose rows lie outside of the context, those of one of the layers on the
    host.
    """
    return open_model("tiny-hybrid", n_ctx=512, pool=PoolSettings(256)).backend


@pytest.fixture(scope="module")
def opaque(model_path: Callable[[str], Path]) -> Iterator[LlamaBackend]:
    """Yield a backend with a stream of cells for each sequence: every state is llama.cpp's own."""
    model = api.llama_model_load_from_file(
        str(model_path("tiny-hybrid")).encode(), api.llama_model_default_params()
    )
    params = api.llama_context_default_params()
    params.n_ctx = 512
    params.n_seq_max = 2
    params.n_ubatch = 64
    params.n_threads = 1
    params.kv_unified = False
    backend = LlamaBackend(GivenModel(model, api.llama_init_from_model(model, params)))
    assert backend.memory.kind == "opaque"
    yield backend
    backend.unload()


def filled(backend: LlamaBackend) -> None:
    backend.memory.clear(0)
    backend.evaluate(0, as_tokens(range(N)), 0)


def saved_rows(backend: LlamaBackend) -> Block:
    rows = backend.memory.save_rows(0, 0, N).block
    backend.memory.synchronize()
    return rows


def saved_state(backend: LlamaBackend) -> Block:
    state = backend.memory.save_state(0, N)
    backend.memory.synchronize()
    return state.recurrent


def goes_on(backend: LlamaBackend) -> None:
    """Check that the sequence can be emptied and used as if nothing had been."""
    filled(backend)
    assert np.isfinite(backend.logits(0)).all()


def claiming(block: Block, p0: int, p1: int) -> Block:
    crafted = block.copy()
    crafted[P0 : P0 + POSITIONS.size] = np.frombuffer(POSITIONS.pack(p0, p1), np.uint8)
    return crafted


def mutated(block: Block, data: st.DataObject) -> Block:
    """Return ``block`` with some bytes changed, odd numbers put in, or another end."""
    crafted = block.copy()
    # Sizes are not drawn from: a cell that a crafted state left behind makes the next one larger.
    places = st.one_of(
        st.integers(0, 80), st.integers(0, 2**30).map(lambda at: at % (block.size - 8))
    )
    for at in data.draw(st.lists(places, max_size=4), label="bytes"):
        crafted[at] = data.draw(st.integers(0, 255))
    for at in data.draw(st.lists(places, max_size=3), label="numbers"):
        value = data.draw(st.sampled_from(ODD))
        packed = (
            struct.pack("<Q", value % 2**64)
            if data.draw(st.booleans())
            else struct.pack("<I", value % 2**32)
        )
        crafted[at : at + len(packed)] = np.frombuffer(packed, np.uint8)
    size = data.draw(st.one_of(st.none(), st.integers(0, 2**30)), label="size")
    longer = np.concatenate([crafted, np.zeros(100, np.uint8)])
    return crafted if size is None else longer[: size % longer.size].copy()


def test_a_claim_whose_size_wraps_around_is_refused(hybrid: LlamaBackend) -> None:
    filled(hybrid)
    rows = saved_rows(hybrid)
    row_bytes = (rows.size - 64) // N
    step = 2**64 // (row_bytes & -row_bytes)  # so many rows more have the same size in 64 bits
    assert (N + step) * row_bytes % 2**64 == N * row_bytes
    hybrid.memory.clear(0)
    with pytest.raises(StateError, match="claims positions"):
        hybrid.memory.restore(0, 0, [(Rows(claiming(rows, 0, N + step)), 0, N)])
    goes_on(hybrid)


def test_sizes_are_told_of_ranges_that_can_be(hybrid: LlamaBackend) -> None:
    row_bytes = hybrid.memory.shape.sizes.rows(0, 2) - hybrid.memory.shape.sizes.rows(0, 1)
    assert hybrid.memory.shape.sizes.rows(5, 2**31 - 1) == 64 + (2**31 - 6) * row_bytes
    assert hybrid.memory.kv.rows_size(5, 2**31 - 1) == 64 + (2**31 - 6) * row_bytes
    for first, last in ((0, 2**31), (0, 2**62), (-1, 5), (2**62, 2**63 - 1)):
        with pytest.raises(StateError, match="not a range"):
            checked(hybrid.memory.kv.rows_size, first, last)


@pytest.mark.parametrize("where", ["hybrid", "pooled"])
@fuzzed
@given(data=st.data())
def test_crafted_rows_are_refused_or_loaded(
    where: str, request: pytest.FixtureRequest, data: st.DataObject
) -> None:
    """Blocks of rows with any bytes and any claimed range are refused or loaded, and the sequence
    works afterwards: files of a shared cache must not crash the server.
    """
    backend: LlamaBackend = request.getfixturevalue(where)
    filled(backend)
    rows = saved_rows(backend)
    backend.memory.clear(0)
    numbers = st.one_of(st.integers(-2, N + 2), st.sampled_from(ODD))
    spans = []
    for _ in range(data.draw(st.integers(1, 3))):
        crafted = mutated(rows, data)
        if crafted.size >= 64 and data.draw(st.booleans()):
            crafted = claiming(crafted, data.draw(numbers), data.draw(numbers))
        first, last = data.draw(st.one_of(st.just((0, N)), st.tuples(numbers, numbers)))
        spans.append((Rows(crafted), first, last))
    with suppress(StateError, OutOfCellsError):
        backend.memory.restore(0, 0, spans)
    goes_on(backend)


@pytest.mark.parametrize("kind", ["hybrid", "recurrent", "windowed"])
@fuzzed
@given(data=st.data())
def test_a_crafted_state_is_refused_or_loaded(
    kind: str, request: pytest.FixtureRequest, data: st.DataObject
) -> None:
    backend: LlamaBackend = request.getfixturevalue(kind)
    filled(backend)
    state = mutated(saved_state(backend), data)
    n = data.draw(st.one_of(st.just(N), st.sampled_from(ODD)))
    with suppress(StateError, OutOfCellsError, OverflowError):
        backend.memory.restore(0, n, (), State.from_parts(state))
    goes_on(backend)


@fuzzed
@given(data=st.data())
def test_a_crafted_window_is_refused_or_loaded(windowed: LlamaBackend, data: st.DataObject) -> None:
    filled(windowed)
    state = windowed.memory.save_state(0, N)
    windowed.memory.synchronize()
    numbers = st.one_of(st.integers(-2, N + 2), st.sampled_from(ODD))
    pieces: list[tuple[Block, int, int]] = []
    for _ in range(data.draw(st.integers(1, 3))):
        end = pieces[-1][2] if pieces else 0
        first, last = data.draw(
            st.one_of(
                st.just((end, N)), st.tuples(st.just(end), numbers), st.tuples(numbers, numbers)
            )
        )
        pieces.append((mutated(state.shared[0], data), first, last))
    with suppress(StateError, OverflowError):
        checked(windowed.memory.kv.load, 0, N, [], state.head, pieces)
    goes_on(windowed)


@fuzzed
@given(data=st.data())
def test_a_crafted_state_of_the_library_itself_is_refused_or_loaded(
    opaque: LlamaBackend, data: st.DataObject
) -> None:
    filled(opaque)
    state = mutated(saved_state(opaque), data)
    opaque.memory.clear(0)
    with suppress(StateError, OutOfCellsError):
        opaque.memory.restore(0, N, (), State.from_parts(state))
    goes_on(opaque)


@pytest.mark.xfail(
    api.llama_supports_gpu_offload(),
    reason="rows that are no numbers in free cells reach everybody's sums on CUDA",
)
@pytest.mark.parametrize("kind", ["hybrid", "recurrent", "opaque"])
def test_a_state_that_is_no_number_does_not_outlive_its_sequence(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """NaN in a loaded state spoils its own sequence only; after a clear the logits are finite."""
    backend: LlamaBackend = request.getfixturevalue(kind)
    filled(backend)
    state = saved_state(backend).copy()
    floats = (
        state[64 + (state.size - 64) % 4 :].view("<f4")
        if kind != "opaque"
        else state[-4096:].view("<f4")
    )
    floats[:] = np.nan
    backend.memory.clear(0)
    if kind == "hybrid":
        backend.evaluate(0, as_tokens(range(N)), 0)
    backend.memory.restore(0, N, (), State.from_parts(state))
    backend.evaluate(0, as_tokens([5]), N)
    assert np.isnan(backend.logits(0)).any(), "the state was of no consequence"
    goes_on(backend)

"""The memory of a context: block sizes, room, saving as a whole, and its end with the context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as api

from pyctl.cache.ram import RamCache
from pyctl.cache.resume_points import NOWHERE
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.errors import (
    OutOfCellsError,
    StateError,
)
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import Prompt, as_tokens
from tests.model.given_model import GivenModel
from tests.unit.engine.drive import ask, cold


def test_no_room_has_an_error_of_its_own_and_changes_nothing(
    open_model: Callable[..., Loaded],
) -> None:
    """Running out of cells raises OutOfCellsError before anything changes; the same call succeeds
    as soon as there is room, which is how the scheduler suspends and resumes.
    """
    backend = open_model("tiny-hybrid", n_ctx=512, n_seqs=2).backend
    for seq in range(2):
        backend.memory.clear(seq)
    tokens = as_tokens(np.random.default_rng(4).integers(1, 250, 320))
    for seq, n in ((0, 320), (1, 128)):
        for start in range(0, n, 64):
            backend.evaluate(seq, tokens[start : start + 64], start)
    rows = backend.memory.save_rows(0, 0, 320)
    state = backend.memory.save_state(0, 320)
    backend.evaluate(1, tokens[128:192], 128)
    with pytest.raises(OutOfCellsError):
        backend.evaluate(1, tokens[192:256], 192)
    backend.memory.clear(0)
    backend.evaluate(1, tokens[192:256], 192)
    with pytest.raises(OutOfCellsError):
        backend.memory.restore(0, 0, [(rows, 0, 320)])
    backend.memory.restore(0, 0, [(rows, 0, 256)])
    backend.memory.clear(1)
    backend.memory.clear(0)
    backend.memory.restore(0, 0, [(rows, 0, 320)])
    backend.memory.restore(0, 320, (), state)
    backend.memory.clear(0)


def test_a_memory_without_movable_rows_is_saved_whole(model_path: Callable[[str], Path]) -> None:
    """A context with a stream of cells for each sequence has no movable rows, so whole sequences
    are saved, and resume at a saved end with the cold run's tokens.
    """
    model = api.llama_model_load_from_file(
        str(model_path("tiny-hybrid")).encode(), api.llama_model_default_params()
    )
    params = api.llama_context_default_params()
    params.n_ctx = 2048
    params.n_seq_max = 2
    params.n_ubatch = 64
    params.n_threads = 1
    params.kv_unified = (
        False  # one stream of cells per sequence, which the extension does not take apart
    )
    backend = LlamaBackend(GivenModel(model, api.llama_init_from_model(model, params)))
    assert backend.memory.kind == "opaque"
    assert backend.memory.shape.sizes.rows(0, 10) == 0
    with pytest.raises(ValueError, match="no rows that could be moved"):
        backend.memory.kv.rows_size(0, 10)
    rng = np.random.default_rng(0)
    first, second = (Prompt.from_ids(rng.integers(0, 250, 500), [200, 300, 480]) for _ in range(2))
    expected = [cold(backend, prompt, 12).tokens for prompt in (first, second)]
    engine = Engine(backend, RamCache(8, None), EngineSettings(exact=True))
    for _ in range(2):
        assert [ask(engine, prompt, 12).tokens for prompt in (first, second)] == expected
    assert ask(engine, first, 12).done.stats.n_cached == 500
    longer = Prompt.from_ids([*first.tokens, *rng.integers(0, 250, 100)], [200, 300, 480])
    reply = ask(engine, longer, 12)
    assert reply.done.stats.n_cached == 480
    assert reply.tokens == cold(backend, longer, 12).tokens
    backend.unload()


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-dense", "tiny-hybrid-nextn"])
def test_blocks_have_the_sizes_that_were_measured(
    open_model: Callable[..., Loaded], name: str
) -> None:
    """The cache makes room by these sizes before anything is saved, so they are exact for any range
    of rows and for the state, the draft model's part included.
    """
    drafts = DraftSettings(("draft-mtp",) if name.endswith("nextn") else ())
    memory = (backend := open_model(name, type_k="q8_0", drafts=drafts).backend).memory
    tokens = as_tokens(np.random.default_rng(5).integers(1, 200, 60))
    backend.evaluate(0, tokens, 0)
    sizes = memory.shape.sizes
    for first, last in ((0, 1), (0, 60), (17, 18), (17, 60)):
        rows = memory.save_rows(0, first, last)
        assert rows.block.nbytes == sizes.rows(first, last)
        assert rows.draft.nbytes == sizes.draft_rows(first, last)
    state = memory.save_state(0, 60)
    assert state.n_bytes == memory.state_size(0)
    memory.synchronize()


@pytest.mark.parametrize(
    ("name", "is_cut_anywhere"), [("tiny-dense", True), ("tiny-hybrid", False)]
)
def test_without_saving_a_sequence_is_still_cut(
    model_path: Callable[[str], Path], name: str, is_cut_anywhere: bool
) -> None:
    """A memory whose restores are inexact saves nothing, and the live sequence is continued all the
    same: rows alone are cut anywhere, a hybrid at its end.
    """
    backend = load(ModelSettings(path=str(model_path(name)), n_ctx=256, n_threads=1)).backend
    backend.memory.disable_saving()
    assert backend.memory.shape.resume_points == NOWHERE
    assert backend.memory.shape.cut_anywhere == is_cut_anywhere
    assert backend.memory.rollbacks.can_cut == is_cut_anywhere
    backend.unload()


def test_a_closed_memory_holds_nothing_and_opens_as_before(
    model_path: Callable[[str], Path],
) -> None:
    """A model that sleeps leaves no view of its freed context, and wakes with the same identity and
    sizes, by which the cache finds its snapshots.
    """
    path = str(model_path("tiny-hybrid"))
    backend = load(ModelSettings(path=path, n_ctx=256, n_ubatch=64, n_threads=1)).backend
    memory = backend.memory
    identity = memory.identity
    shape = memory.shape
    backend.evaluate(0, as_tokens(range(50)), 0)
    held = memory.cells.hold_rows(0, 0, 50)
    backend.unload()
    assert memory.kv is None
    assert memory.block_bytes().in_flight == 0
    memory.synchronize()  # nothing to wait for
    backend.load()
    assert memory.identity == identity
    assert memory.shape == shape
    assert memory.cells.n_free == backend.facts.n_cells
    with pytest.raises(StateError, match="no longer held"):
        memory.cells.fetch(held, 0, 50)
    backend.unload()

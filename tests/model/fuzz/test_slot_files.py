"""Damaged slot files of llama-server, which have no checksum, are refused or do not affect the next request."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.errors import StateError
from pyctl.llama import Loaded
from pyctl.llama.sequence_file import DIGEST_SIZE, END
from pyctl.prompt import Prompt, as_tokens
from tests.model.fuzz.cases import fuzzed
from tests.unit.engine.drive import ask

TOKENS = np.random.default_rng(3).integers(0, 250, 96)

ODD = st.sampled_from([0, 1, 2, 95, 96, 97, 255, 256, 4095, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])


@st.composite
def damage(draw: st.DrawFn) -> list[tuple[int, int, bytes | None]]:
    """Where (of the head, of the end, or anywhere), and what is written there; None cuts the file."""
    made: list[tuple[int, int, bytes | None]] = []
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.one_of(st.integers(0, 4000), st.integers(-(2**15), -1), st.integers(0, 2**31)))
        data = draw(st.one_of(ODD.map(lambda n: n.to_bytes(4, "little")), st.binary(min_size=1, max_size=4)))
        made.append((at, draw(st.sampled_from([1, 4])), None if draw(st.integers(0, 9)) == 0 else data))
    return made


@pytest.fixture(scope="module", params=["tiny-hybrid", "tiny-dense"])
def engine(request: pytest.FixtureRequest, open_model: Callable[..., Loaded]) -> Engine:
    loaded = open_model(request.param, n_ctx=256, n_ubatch=32)
    return Engine(loaded.backend, RamCache(0, 0), EngineSettings())


@dataclass(frozen=True)
class WholeFile:
    """Where files go, and what llama-server would have written."""

    path: Path
    content: bytes = field(repr=False)


@pytest.fixture(scope="module")
def whole(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> WholeFile:
    path = tmp_path_factory.mktemp("slots") / "slot.bin"
    ask(engine, Prompt(as_tokens(TOKENS)), 2)
    (seq,) = engine.sequences
    engine.backend.memory.save_file(seq.id, path, seq.tokens, seq.ends)
    n_ends = len(seq.ends)
    return WholeFile(path, path.read_bytes()[: -(END.size + DIGEST_SIZE + 4 * n_ends)])


@fuzzed
@given(harm=damage())
def test_the_next_request_is_served(
    engine: Engine, whole: WholeFile, harm: list[tuple[int, int, bytes | None]]
) -> None:
    path, good = whole.path, whole.content
    data = bytearray(good)
    for at, step, new in harm:
        place = at % max(len(data), 1) // step * step
        data[place : None if new is None else place + len(new)] = new or b""
    path.write_bytes(data)
    (seq,) = engine.sequences
    engine.prefix_cache.forget(seq)
    try:
        saved = engine.backend.memory.load_file(seq.id, path)
    except StateError:
        event("refused")
        engine.prefix_cache.forget(seq)
    else:
        event("loaded")
        seq.reset(saved.tokens, ends=saved.ends)
    for prompt in ([*seq.tokens.tolist(), 7, 8, 9], [*TOKENS[:50], 1, 2, 3], [5, 6, 7]):
        if len(prompt) < 250:
            reply = ask(engine, Prompt(as_tokens(prompt)), 3)
            assert reply.error is None
            assert reply.done is not None


def test_a_pipe_is_refused_and_not_waited_for(engine: Engine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StateError):
        engine.backend.memory.load_file(engine.sequences[0].id, tmp_path / "pipe")


def test_positions_that_are_not_the_tokens_are_refused(engine: Engine, whole: WholeFile) -> None:
    """Every place that holds the last position: that of a row, and that of the recurrent state."""
    path, good = whole.path, whole.content
    (seq,) = engine.sequences
    last = (TOKENS.size + 1).to_bytes(4, "little")
    is_hybrid, refused = engine.backend.memory.kind == "hybrid", 0
    for at in range(len(good) - 4):
        if good[at : at + 4] != last:
            continue
        for other in (TOKENS.size - 40, TOKENS.size + 40, 2**31 - 1):
            path.write_bytes(good[:at] + other.to_bytes(4, "little") + good[at + 4 :])
            engine.prefix_cache.forget(seq)
            try:
                engine.backend.memory.load_file(seq.id, path)
            except StateError:
                refused += 1
                engine.prefix_cache.forget(seq)
                assert ask(engine, Prompt(as_tokens([5, 6, 7])), 1).error is None
    engine.prefix_cache.forget(seq)
    assert refused >= (6 if is_hybrid else 3)

"""Costs are measured on the real backend before the first request, and nothing of it stays."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.engine.backend import SequenceTokens, TopTokens
from pyctl.engine.draft import calibration
from pyctl.engine.draft.draft_settings import DraftSettings
from pyctl.engine.draft.pace import Pace
from pyctl.engine.draft.speculation import ModelDrafts, Speculation
from pyctl.engine.model_settings import ModelSettings
from pyctl.errors import EngineError
from pyctl.llama import load
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.prompt import as_tokens


def loaded(path: Path) -> LlamaBackend:
    settings = ModelSettings(path=str(path), n_ctx=1024, n_seqs=2, n_threads=1)
    return load(settings, drafts=DraftSettings(draft_types=("draft-mtp",))).backend


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, all widths are measured."""
    monkeypatch.setattr(calibration, "SECONDS", 200.0)


def said(backend: LlamaBackend) -> list[object]:
    """What it says and drafts after a text."""
    backend.evaluate(0, as_tokens(range(5, 40)), 0)
    first = backend.top_tokens(0, 7, 5)
    drafts = backend.draft([SequenceTokens(0, (7,), 35)], 3)
    return [first, drafts]


def test_costs_are_known_and_sequences_empty(model_path: Callable[[str], Path]) -> None:
    backend = loaded(model_path("tiny-hybrid-nextn"))
    fresh = loaded(model_path("tiny-hybrid-nextn"))
    try:
        pace = Pace()
        Speculation(model=ModelDrafts(backend, 3), pace=pace, n_free=3).calibrate(backend, 3)
        for n_seqs in (1, 2):
            assert pace._costs[n_seqs].is_known
            assert all(pace._costs[n_seqs].wider.is_measured(n_seqs * (1 + n)) for n in range(4))
            assert 0 <= pace._costs[n_seqs].excess(1) <= pace._costs[n_seqs].excess(2)
        assert [pace._proposing["draft-mtp", n_seqs].of(n)[0] > 0 for n_seqs in (1, 2) for n in (1, 2, 3)] == [True] * 6
        assert said(backend) == said(fresh)
    finally:
        backend.unload()
        fresh.unload()


def test_what_holds_up_one_reading_is_no_part_of_a_step(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is followed by two readings of its output, the second of which says what the first one took."""
    backend, n_read = loaded(model_path("tiny-hybrid-nextn")), 0
    read = backend.top_tokens

    def held_up(*given: int) -> TopTokens:
        nonlocal n_read
        n_read += 1
        if n_read == 12:  # the last one of the plain steps
            time.sleep(0.5)
        return read(*given)

    monkeypatch.setattr(backend, "top_tokens", held_up)
    try:
        pace = Pace()
        Speculation(model=ModelDrafts(backend, 3), pace=pace, n_free=3).calibrate(backend, 3)
        assert n_read == 2 * 4 * 4 * 3
        assert pace._costs[1].plain_ms
        assert all(pace._costs[1].wider.is_measured(1 + n) for n in range(4))
    finally:
        backend.unload()


def test_with_fixed_widths_nothing_is_measured(model_path: Callable[[str], Path]) -> None:
    backend = loaded(model_path("tiny-hybrid-nextn"))
    try:
        pace = Pace(fixed=True)
        Speculation(model=ModelDrafts(backend, 3), pace=pace, n_free=3).calibrate(backend, 3)
        assert not pace._costs
    finally:
        backend.unload()


def test_what_cannot_be_measured_stops_nothing(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = loaded(model_path("tiny-hybrid-nextn"))

    def refuse(items: object) -> None:
        raise EngineError("no")

    try:
        expected = said(backend)
        backend.memory.clear(0)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "decode", refuse)
            Speculation(model=ModelDrafts(backend, 3), pace=Pace(), n_free=3).calibrate(backend, 3)
        assert "drafts could not be measured: no" in caplog.text
        assert said(backend) == expected
    finally:
        backend.unload()

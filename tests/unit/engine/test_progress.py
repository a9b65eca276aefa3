from __future__ import annotations

import logging

import pytest

from pyctl.cache.ram import RamCache
from pyctl.engine import engine_stats as progress
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.drive import ask


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    engine = Engine(FakeBackend(n_ubatch=64), RamCache(8, None), EngineSettings())
    with caplog.at_level(logging.INFO, logger=progress.__name__):
        ask(engine, Prompt.of([1 + i % 60 for i in range(200)]))
    return [record.getMessage() for record in caplog.records if record.name == progress.__name__]


def test_a_long_prefill_is_seen(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    lines = lines_of(caplog)
    assert [line.split()[:4] for line in lines] == [["prefill", str(n), "of", "200"] for n in (64, 128, 192)]
    assert " 32 %  " in lines[0]


def test_a_short_one_is_not(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 3600.0)
    assert lines_of(caplog) == []

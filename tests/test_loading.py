from __future__ import annotations

import logging

import pytest

from pyctl import loading
from pyctl.loading import LoadProgress


def test_without_a_terminal_a_line_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, expected in ((60.0, []), (0.0, ["loading big.gguf: 25 %", "loading big.gguf: 100 %"])):
        monkeypatch.setattr(loading, "LINE_SECONDS", seconds)
        caplog.clear()
        with caplog.at_level(logging.INFO), LoadProgress("/models/big.gguf") as progress:
            progress.show(0.25)
            progress.show(1.0)
        assert [record.getMessage() for record in caplog.records] == expected

"""The costs of drafts are measured in idle time; afterwards all sequences are empty."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyctl.engine.backend import SequenceTokens
from pyctl.engine.draft import draft_length
from pyctl.engine.draft.draft_length import DraftLengthController, calibrate
from pyctl.engine.draft.draft_settings import DraftSettings
from pyctl.llama import Loaded
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.prompt import as_tokens


def said(backend: LlamaBackend) -> list[object]:
    """Likely tokens and drafts after a text."""
    backend.evaluate(0, as_tokens(range(5, 40)), 0)
    first = backend.top_tokens(0, 7, 5)
    drafts = backend.draft([SequenceTokens(0, (7,), 35)], 3)
    backend.memory.clear(0)
    return [first, drafts]


def test_costs_are_known_and_sequences_empty(
    open_model: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_length, "CALIBRATION_S", 200.0)  # however busy the machine is
    drafts = DraftSettings(draft_types=("draft-mtp",))
    backend = open_model("tiny-hybrid-nextn", drafts=drafts, n_ctx=1024, n_seqs=2, n_threads=1).backend
    expected = said(backend)
    controller = DraftLengthController(backend.facts.n_rollback)
    assert len(list(calibrate(controller, backend, 3, 3))) == 2 * 4
    for n_seqs in (1, 2):
        assert controller.costs(n_seqs).plain_ms > 0
        assert len(controller.costs(n_seqs).of._tokens) == 1 + 3 + 1, "plain, three widths and what lies beyond"
        assert controller.proposing["draft-mtp", n_seqs](3) > 0
    assert said(backend) == expected

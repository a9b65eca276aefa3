"""Room for outputs: each takes a row of logits on the device, so only servers with long drafts have
much of it.
"""

from __future__ import annotations

import pytest

from pyctl.engine.draft.ngram_settings import LONGEST
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.resolved import LONG_DRAFT, PREDICTED_DRAFT, Resolved


@pytest.mark.parametrize(
    ("types", "n_seqs", "expected"),
    [
        ((), 4, 1 + PREDICTED_DRAFT),
        ((), 20, 20),
        (("draft-mtp",), 1, 1 + PREDICTED_DRAFT),
        (("draft-mtp",), 5, 20),
        (("ngram-mod",), 1, 1 + LONG_DRAFT),
        (("draft-mtp", "cache"), 1, 1 + LONGEST),
        (("ngram-mod", "cache"), 1, 1 + LONGEST),
        (("draft-mtp", "cache"), 64, 64 * 4),
    ],
)
def test_outputs_follow_the_longest_drafts(
    types: tuple[str, ...], n_seqs: int, expected: int
) -> None:
    settings, drafts = (
        ModelSettings(path="model.gguf", n_seqs=n_seqs),
        DraftSettings(draft_types=types),
    )
    assert Resolved.from_settings(settings, drafts).n_outputs == expected

"""DFlash and DSpark: a block of tokens in one evaluation, from rows of its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from gguf import GGUFWriter

from pyctl.engine.backend import SequenceTokens
from pyctl.llama.llama_backend import LlamaBackend
from tests.model.llama.draft.drafting import (
    KINDS,
    prefill,
    prompt,
)
from tools.generator import SHAPES, generate
from tools.generator.shapes import tensors


def test_block_is_not_drafted_from_rows_lost_in_a_rollback(
    open_reader: Callable[..., LlamaBackend],
) -> None:
    for kind in KINDS:
        backend = open_reader(kind)
        prefill(backend, prompt(50))
        drafts = backend.draft([SequenceTokens(0, (70, 71), 50, 2), SequenceTokens(1, (70,), 0)], 3)
        assert drafts[0] == () if kind != "eagle3" else len(drafts[0]) == 3
        assert len(drafts[1]) == 3


def test_a_block_that_does_not_fit_is_refused(check_refused: Callable[..., None]) -> None:
    check_refused(
        replace(SHAPES["tiny-hybrid-dflash"], block=99),
        "--ubatch-size 64 is below a block",
        n_draft=80,
    )


def test_a_block_is_drafted_up_to_its_end(open_reader: Callable[..., LlamaBackend]) -> None:
    for kind, maximum in (("dflash", 7), ("dflash2", 7), ("dspark", 8)):
        backend = open_reader(kind, n_draft=99)
        assert backend.facts.n_rollback == maximum
        prefill(backend, prompt(50))
        assert len(backend.draft([SequenceTokens(0, (70,), 50)], 99)[0]) == maximum


@pytest.mark.parametrize(
    ("kind", "lacks", "reason", "fields"),
    [
        ("dflash2", "mask", "names no mask token", {}),
        ("dspark", "block", "does not state the size of its block", {}),
        (
            "dspark",
            "confidence",
            "has no probabilities: it needs --spec-draft-p-min 0",
            {"draft_p_min": 0.5},
        ),
    ],
)
def test_a_file_that_lacks_what_drafting_needs_is_refused(
    check_refused: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    lacks: str,
    reason: str,
    fields: dict[str, Any],
) -> None:
    """Each missing part of a draft file is refused at the start by its name, before it could draft
    wrong tokens in silence.
    """
    shape = SHAPES[f"tiny-hybrid-{kind}"]
    if lacks == "block":
        add = GGUFWriter.add_uint32

        def add_others(self: GGUFWriter, key: str, value: int) -> None:
            if not key.endswith("block_size"):
                add(self, key, value)

        monkeypatch.setattr(GGUFWriter, "add_uint32", add_others)
    elif lacks == "mask":
        monkeypatch.setattr(GGUFWriter, "add_mask_token_id", lambda self, n: None)
    else:
        monkeypatch.setattr(
            generate, "tensors", lambda s: [each for each in tensors(s) if each.role != "conf_proj"]
        )
    check_refused(shape, reason, **fields)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "eagle3"])
def test_a_least_probability_ends_a_draft_and_changes_no_token(
    open_reader: Callable[..., LlamaBackend], kind: str
) -> None:
    """A draft with a least probability is the beginning of the one without: DSpark and the second
    kind of DFlash choose its tokens from other outputs then.
    """
    texts = [prompt(n, seed=n) for n in range(40, 60)]

    def drafts(p_min: float) -> list[tuple[int, ...]]:
        backend = open_reader(kind, draft_p_min=p_min)
        found = []
        for text in texts:
            backend.memory.clear(0)
            prefill(backend, text)
            last = len(text) * 5  # another one for each text
            found += backend.draft([SequenceTokens(0, (last,), len(text))], 3)
        return found

    whole = drafts(0.0)
    lengths = set[int]()
    for p_min in (0.5, 0.7, 0.99):
        for likely, every in zip(drafts(p_min), whole, strict=True):
            assert likely == every[: len(likely)]
            lengths.add(len(likely))
    assert len(lengths) > 1, "the limit ended no draft, or each one"

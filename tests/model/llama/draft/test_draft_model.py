"""The base of draft models: missed tokens, blocks of others, and interruptions cost drafts and
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyctl.cache.snapshot import NOTHING
from pyctl.llama.draft.draft_model import SIGNATURE_BYTES, is_signed
from pyctl.llama.draft.separate_model import SeparateModel
from tests.model.llama.draft.separate import (
    PROMPT,
    N,
    PlainModel,
    feed,
    guess,
    saved,
)


def test_blocks_of_another_draft_model_are_ignored(
    open_separate: Callable[..., SeparateModel], reference: PlainModel
) -> None:
    model = open_separate(identity="one")
    text = PROMPT[:100]
    feed(model, text)
    blocks = saved(model, len(text))
    foreign = open_separate(identity="another")
    for rows, state in (blocks, (NOTHING, NOTHING), (blocks[0][:70], blocks[1][:70])):
        foreign.clear(0)
        foreign.load_rows(0, 0, [(rows, 0, len(text))])
        foreign.load_state(0, len(text), state)
        # It drafts without them, and says that it has no rows.
        assert foreign.save_rows(0, 0, len(text)).size == foreign.save_state(0, len(text)).size == 0
        reference.check([80], guess(foreign, text, 80))


def test_what_was_missed_costs_guesses_and_nothing_else(
    open_separate: Callable[..., SeparateModel], reference: PlainModel
) -> None:
    model = open_separate()
    text = PROMPT[:100]
    feed(model, text[:40])
    feed(model, text, start=60)
    assert model.save_rows(0, 0, 100).size == model.save_state(0, 100).size == 0
    assert model.save_rows(0, 60, 100).size == model.rows_size(60, 100)
    assert len(guess(model, text, 80)) == N
    model.truncate(0, 50)
    assert len(guess(model, text[:50], 80)) == N
    model.clear(0)
    feed(model, text)
    reference.check([*text, 80], guess(model, text, 80))


def test_an_interruption_holds_up_no_saving(
    open_separate: Callable[..., SeparateModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends, and writes what it has: the trunk's parts are worth it without the draft
    model's.
    """
    model = open_separate()
    feed(model, PROMPT[:100])
    monkeypatch.setattr(model.greedy, "decode", lambda n: 2)
    assert model.save_rows(0, 0, 100).size == 0
    assert model.save_state(0, 100).size == 0
    model.synchronize()


def test_a_block_has_the_signature_of_its_model_and_its_size(
    open_separate: Callable[..., SeparateModel],
) -> None:
    """The signature covers type, file and layout, and every block has the announced size: a cache
    directory may hold blocks of several draft models.
    """
    model = open_separate(identity="one")
    feed(model, PROMPT[:60])
    rows, state = saved(model, 60)
    signature = rows[:SIGNATURE_BYTES].tobytes()
    for block in (rows, state):
        assert block.size == 0 or is_signed(block, signature)
        assert not is_signed(block[:SIGNATURE_BYTES], signature), "a signature of nothing"
    assert model.rows_size(60, 60) == 0
    assert model.save_rows(0, 60, 60).size == 0
    for identity, is_equal in (("one", True), ("another", False)):
        other = open_separate(identity=identity)
        feed(other, PROMPT[:60])
        assert is_signed(saved(other, 60)[0], signature) is is_equal


def test_tokens_that_were_followed_already_are_ignored(
    open_separate: Callable[..., SeparateModel], reference: PlainModel
) -> None:
    """The trunk evaluates tokens again after a rollback that was deferred; the draft model must not
    have them twice.
    """
    model = open_separate()
    text = PROMPT[:100]
    feed(model, text)
    model.follow(0, text[60:], 60, None)
    model.follow(0, text[90:], 90, None)
    reference.check([*text, 80], guess(model, text, 80))

"""A separate draft model drafts its own likeliest tokens, also after other tokens, rollbacks and
restores.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from llama_cpp import llama_cpp as api

from pyctl.engine.backend import SequenceTokens
from pyctl.errors import ModelError
from pyctl.llama.draft.separate_model import SeparateModel
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.params import ModelParams, context_params
from pyctl.llama.settings.resolved import Resolved
from tests.model.llama.draft.separate import (
    N_VOCAB,
    PROMPT,
    N,
    PlainModel,
    feed,
    guess,
    saved,
)


def test_drafts_are_what_the_model_would_say(
    open_separate: Callable[..., SeparateModel], reference: PlainModel
) -> None:
    model = open_separate()
    feed(model, PROMPT)
    text = PROMPT
    for n_sure in (1, 2, 5, 70):
        sure = PROMPT[:n_sure]
        draft = guess(model, text, *sure)
        reference.check([*text, *sure], draft)
        assert draft == guess(model, text, *sure), (
            "the same again, without anything evaluated in between"
        )
        n = len(text)
        text = [*text, *sure]
        feed(model, text, start=n)
    assert model.draft([], N) == []


@pytest.mark.parametrize("seed", range(4))
def test_whatever_stays_of_its_drafts_the_next_are_right(
    open_separate: Callable[..., SeparateModel], reference: PlainModel, seed: int
) -> None:
    """Always right, always wrong, partly right; steps without it, with drafts of others, and of all
    lengths.
    """
    model = open_separate()
    choice = random.Random(seed)
    text = PROMPT[:90]
    feed(model, text)
    sure = 80
    for step in range(25):
        kind = choice.choice(["own", "own", "own", "plain", "others", "prompt"])
        if kind == "plain":
            model.follow(0, [sure], len(text), None)
            text = [*text, sure]
            sure = choice.choice(PROMPT)
            continue
        if kind == "prompt" and step % 5 == 0:
            more = [sure, *PROMPT[: choice.randrange(1, 60)]]
            model.follow(0, more, len(text), None)
            text = [*text, *more]
            sure = choice.choice(PROMPT)
            continue
        draft = tuple(choice.choices(PROMPT, k=choice.randrange(1, 40)))
        if kind != "others":
            draft = guess(model, text, sure)
            reference.check([*text, sure], draft)
        # What is verified may be shorter than the draft, or longer: filled up with anything.
        verified = [
            sure,
            *draft[: choice.randrange(len(draft) + 1)],
            *choice.choice([(), (), (70, 70)]),
        ]
        model.follow(0, verified, len(text), None)
        n_kept = choice.choice([1, len(verified), choice.randrange(1, len(verified) + 1)])
        model.truncate(0, len(text) + n_kept)
        text = [*text, *verified[:n_kept]]
        sure = choice.choice(PROMPT)
    reference.check([*text, sure], guess(model, text, sure))


def test_sequences_of_one_batch_do_not_disturb_each_other(
    open_separate: Callable[..., SeparateModel], reference: PlainModel
) -> None:
    """Sequences that draft in one batch get the drafts that each would get alone, also after
    rollbacks of different lengths and a cleared neighbour.
    """
    model = open_separate(n_seqs=3)
    texts = [PROMPT[:70], PROMPT[5:50], PROMPT[9:]]
    for seq, text in enumerate(texts):
        feed(model, text, seq)
    for step in range(4):
        items = [
            SequenceTokens(seq, (80 + step,) * (seq + 1), len(text), 1)
            for seq, text in enumerate(texts)
        ]
        for seq, draft in enumerate(model.draft(items, N)):
            reference.check([*texts[seq], *items[seq].tokens], draft)
            verified = [*items[seq].tokens, *draft]
            model.follow(seq, verified, len(texts[seq]), None)
            n_kept = len(items[seq].tokens) + (seq + step) % (N + 1)
            texts[seq] = [*texts[seq], *verified[:n_kept]]
            model.truncate(seq, len(texts[seq]))
    model.clear(1)
    reference.check([*texts[2], 80], guess(model, texts[2], 80, seq=2))


@pytest.mark.parametrize("pending", ["nothing", "a token", "a draft", "half a draft"])
def test_a_restored_sequence_drafts_as_before(
    open_separate: Callable[..., SeparateModel], reference: PlainModel, pending: str
) -> None:
    """Saved rows and state restore into any sequence of the same or another instance, with a
    followed token, a draft or half of one pending, and the next draft is the same.
    """
    model = open_separate(n_seqs=2)
    text = PROMPT[:100]
    feed(model, text)
    if pending != "nothing":
        model.follow(0, [80], len(text), None)
        text = [*text, 80]
    if "draft" in pending:
        verified = [81, *guess(model, text, 81)]
        model.follow(0, verified, len(text), None)
        text = [*text, *verified[: 4 if pending == "a draft" else 2]]
        model.truncate(0, len(text))
    middle = 60
    rows, state = saved(model, len(text), first=middle)
    before = model.save_rows(0, 0, middle)
    expected = guess(model, text, 82)
    reference.check([*text, 82], expected)
    for seq in (1, 0):
        model.clear(seq)
        model.load_rows(seq, 0, [(before, 0, middle), (rows, middle, len(text))])
        model.load_state(seq, len(text), state)
        assert guess(model, text, 82, seq=seq) == expected
    other = open_separate(n_seqs=1)
    other.load_rows(0, 0, [(before, 0, middle)])
    other.load_rows(0, middle, [(rows, middle, len(text))])
    other.load_state(0, len(text), state)
    assert saved(other, len(text))[0].size > 0
    assert guess(other, text, 82) == expected


def test_going_back_and_on_another_way(
    open_separate: Callable[..., SeparateModel], reference: PlainModel
) -> None:
    """Rewound to a saved state and fed other tokens, the model has the bytes of one that never
    evaluated the first ones.
    """
    model = open_separate()
    text = PROMPT[:100]
    feed(model, text[:50])
    _, state = saved(model, 50)
    feed(model, text, start=50)
    guess(model, text, 80)
    model.rewind(0, 50)
    model.load_state(0, 50, state)
    other = [*text[:50], *reversed(text[50:])]
    feed(model, other, start=50)
    fresh = open_separate()
    feed(fresh, other)
    for mine, its in zip(saved(model, 100), saved(fresh, 100), strict=True):
        assert mine.tobytes() == its.tobytes()
    reference.check([*other, 80], guess(model, other, 80))


def test_what_it_drafted_from_may_turn_out_to_be_wrong(
    open_separate: Callable[..., SeparateModel], reference: PlainModel, shape: str
) -> None:
    """Then a hybrid has no state of before, and begins anew; nothing that is saved is of other
    tokens.
    """
    model = open_separate()
    text = PROMPT[:100]
    feed(model, text)
    guess(model, text, 80, 81)
    model.follow(0, [80, 90], 100, None)
    text = [*text, 80, 90]
    rows = model.save_rows(0, 0, 102)
    assert (rows.size == 0) == (shape == "tiny-hybrid-draft")
    draft = guess(model, text, 82)
    reference.check([*text, 82] if rows.size else [90, 82], draft)


def test_without_the_state_of_its_rows_a_hybrid_begins_anew(
    open_separate: Callable[..., SeparateModel], reference: PlainModel, shape: str
) -> None:
    model = open_separate()
    text = PROMPT[:100]
    feed(model, text)
    rows, _ = saved(model, 100)
    model.clear(0)
    model.load_rows(0, 0, [(rows, 0, 100)])
    draft = guess(model, text, 80)
    reference.check([*text, 80] if shape == "tiny-draft" else [80], draft)


def test_a_full_context_ends_drafts_and_loses_nothing(
    open_separate: Callable[..., SeparateModel], reference: PlainModel, shape: str
) -> None:
    model = open_separate(n_ctx=256)
    text = (PROMPT * 2)[:254]
    feed(model, text)
    assert len(guess(model, text, 80)) == 2, (
        "the last two cells: the sure token, and the first draft"
    )
    model.follow(0, [80], 254, None)
    model.follow(0, [81], 255, None)
    assert guess(model, [*text, 80, 81], 82) == ()
    model.truncate(0, 200)
    if shape == "tiny-draft":
        reference.check([*text[:200], 80], guess(model, text[:200], 80))


def test_an_evaluation_that_is_stopped_or_fails(
    open_separate: Callable[..., SeparateModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, at in [(2, 1), (2, 2), (-3, 1), (-3, 2)]:
        model = open_separate()
        feed(model, PROMPT[:100])
        codes = iter([0] * at + [code])
        monkeypatch.setattr(
            model.greedy,
            "decode",
            lambda n, codes=codes, decode=model.greedy.decode: next(codes) or decode(n),
        )
        assert len(guess(model, PROMPT[:100], 80)) == at - 1
        monkeypatch.undo()
        assert len(guess(model, [*PROMPT[:100], 80, 81], 82)) == N, "and then it goes on"


def test_a_model_whose_memory_cannot_be_cut_is_refused(model_path: Callable[[str], Path]) -> None:
    settings = ModelSettings(path=str(model_path("tiny-draft")), n_seqs=2, n_threads=1)
    params = ModelParams(settings)
    model = api.llama_model_load_from_file(settings.path.encode(), params.struct)
    given = context_params(Resolved.from_settings(settings), 512)
    given.kv_unified = False
    context = api.llama_init_from_model(model, given)
    with pytest.raises(ModelError, match="no rollback"):
        SeparateModel(model, context, N_VOCAB)
    api.llama_free(context)
    api.llama_model_free(model)

"""The draft source of predictions: what it drafts, for whom, and that it changes no reply."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.cache.ram import RamCache
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import PromptFacts
from pyctl.engine.draft.draft_length import DraftLengthController
from pyctl.engine.draft.prediction import N_ASSUMED, PredictionDrafts
from pyctl.engine.draft.source import NO_MATCH, DraftJob
from pyctl.engine.draft.speculation import Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.sampling import Sampling
from pyctl.prompt import as_tokens
from tests.effort import examples
from tests.unit.engine.draft.guesses import Guesses, RememberingBackend
from tests.unit.engine.drive import Reply, cold, collect, run_all
from tests.unit.engine.scheduling import prompt_of, submit

FILE = tuple(range(100, 400))
PROMPT = as_tokens(range(1, 20))
N_CTX = 512
ENDLESS = Sampling(temperature=0.0, ignore_eos=True)
KEY = 7


class Writing:
    """A request with a prediction whose reply is written token by token."""

    def __init__(self, prediction: tuple[int, ...] = FILE) -> None:
        self.source = PredictionDrafts()
        self.source.predict(KEY, prediction)
        self.seq = LiveSequence(0, 10_000, facts=PromptFacts())
        self.seq.reset(PROMPT)
        self._sure: int | None = None

    def write(self, *tokens: int) -> None:
        """Sample ``tokens``; the source is called for a draft after each."""
        for token in tokens:
            if self._sure is not None:
                self.seq.append_one(self._sure)
            self._sure = token
            self.draft()

    def job(self, key: int = KEY) -> DraftJob:
        assert self._sure is not None
        return DraftJob(key, self.seq, (self._sure,), 64)

    def draft(self, n: int = 64) -> tuple[int, ...]:
        return self.source.match(self.job()).read(n)


def test_a_file_is_drafted_from_its_first_token_on() -> None:
    writing = Writing()
    writing.write(FILE[0])
    assert writing.draft() == FILE[1:65]
    assert writing.draft(5) == FILE[1:6]
    assert writing.source.match(writing.job()).n == N_ASSUMED


def test_a_longer_match_counts_as_it_is() -> None:
    writing = Writing()
    writing.write(*FILE[:40])
    assert writing.source.match(writing.job()).n == 40


def test_words_before_the_file_are_skipped() -> None:
    writing = Writing()
    writing.write(1, 2, 3)
    assert writing.draft() == ()
    writing.write(FILE[0])
    assert writing.draft(8) == FILE[1:9]


def test_it_goes_on_after_an_edit_and_makes_it_again() -> None:
    text = (*FILE[:30], 5, *FILE[30:60], 5, *FILE[60:90], 5, *FILE[90:])
    edited = tuple(6 if token == 5 else token for token in text)
    writing = Writing(text)
    writing.write(*edited[:80])
    assert writing.draft() == edited[80:144]


def test_a_draft_of_another_source_is_continued() -> None:
    writing = Writing()
    writing.write(*FILE[:10])
    more = writing.source.match(writing.job(), FILE[10:12]).read(3)
    assert more == FILE[12:15]


def test_only_the_own_request_drafts_from_it() -> None:
    writing = Writing()
    writing.write(FILE[0])
    assert writing.source.match(writing.job(key=8)) is NO_MATCH


def test_a_request_leaves_nothing() -> None:
    source = PredictionDrafts()
    source.predict(KEY, ())
    assert not source, "an empty prediction is none"
    source.predict(KEY, FILE)
    assert source
    source.end(KEY)
    assert not source
    source.end(KEY)


def engine_of(backend: RememberingBackend, *, width: int = 0, others: list[Any]) -> Engine:
    """Return an engine that drafts predictions, beside ``others`` of its sources."""
    lengths = None if width else DraftLengthController(n_free=backend.facts.n_rollback)
    predictions = PredictionDrafts()
    speculation = Speculation(others, predictions=predictions, lengths=lengths, width=width)
    options = EngineSettings(exact=bool(width))
    return Engine(backend, RamCache(32, None), options, speculation=speculation)


def reply_without(number: int, n: int) -> Reply:
    return cold(RememberingBackend("attention", n_ctx=N_CTX), prompt_of(number, 60), n)


@settings(max_examples=examples(80))
@given(
    data=st.data(),
    width=st.sampled_from([0, 0, 3]),
    has_guesses=st.booleans(),
    n=st.sampled_from([1, 2, 20, 90]),
)
def test_a_reply_is_the_one_without_prediction(
    data: st.DataObject, width: int, has_guesses: bool, n: int
) -> None:
    """Predictions that are right, wrong in places, or of another reply change no token, alone or
    beside other requests and sources; the drafts of each are counted for its own request.
    """
    replies = [reply_without(number, n) for number in range(3)]
    prompts = [prompt_of(number, 60) for number in range(3)]
    others = []
    if has_guesses:
        known = {prompt: reply.tokens for prompt, reply in zip(prompts, replies, strict=True)}
        others = [Guesses(known, 6, wrong=0.3)]
    backend = RememberingBackend("attention", n_ctx=N_CTX, n_cells=3 * N_CTX, n_seqs=3)
    engine = engine_of(backend, width=width, others=others)
    handles = []
    for prompt in prompts:
        predicted = list(replies[data.draw(st.integers(0, 2))].tokens)
        for place in data.draw(st.lists(st.integers(0, len(predicted) - 1), max_size=4)):
            predicted[place] = 63
        prediction = tuple(predicted) if data.draw(st.booleans()) else ()
        handles.append(submit(engine, prompt, n, prediction=prediction))
    run_all(engine)
    for handle, expected in zip(handles, replies, strict=True):
        reply = collect(handle)
        counts = handle.drafts
        assert reply.error is None
        assert reply.tokens == expected.tokens
        assert counts.n_predicted_accepted <= counts.n_predicted <= counts.n_drafted
        assert counts.n_predicted_accepted <= counts.n_accepted
        if not handle.request.prediction:
            assert counts.n_predicted == 0


def test_a_right_prediction_is_accepted_and_a_wrong_one_rejected() -> None:
    expected = reply_without(1, 60)
    prompt = prompt_of(1, 60)
    backend = RememberingBackend("attention", n_ctx=N_CTX)
    engine = engine_of(backend, width=3, others=[])
    right = submit(engine, prompt, 60, prediction=tuple(expected.tokens))
    run_all(engine)
    assert collect(right).tokens == expected.tokens
    assert right.drafts.n_predicted == right.drafts.n_predicted_accepted > 20

    changed = tuple(token % 60 + 1 for token in expected.tokens[1:])
    wrong = submit(engine, prompt, 60, prediction=(expected.tokens[0], *changed))
    run_all(engine)
    assert collect(wrong).tokens == expected.tokens
    assert wrong.drafts.n_predicted > wrong.drafts.n_predicted_accepted


def test_an_engine_without_sources_drafts_predictions_and_nothing_else() -> None:
    backend = RememberingBackend("attention", n_ctx=N_CTX)
    speculation, reason = Speculation.from_facts(backend.facts, [], None, n_draft=3, exact=False)
    assert reason == ""
    assert speculation.drafts_predictions
    assert speculation.names == ()
    assert not speculation, "no request has a prediction"
    with speculation.following(1, PROMPT, prediction=FILE):
        assert speculation
    assert not speculation


def test_exact_replies_without_drafts_have_no_predictions_either() -> None:
    """Their batches have one token each, and a batch of several would compute other bits."""
    backend = RememberingBackend("attention", n_ctx=N_CTX)
    speculation, _ = Speculation.from_facts(backend.facts, [], None, n_draft=3, exact=True)
    assert not speculation.drafts_predictions


def test_a_backend_without_rollback_has_no_predictions() -> None:
    backend = RememberingBackend("hybrid", n_ctx=N_CTX, max_drafts=0, n_state_history=0)
    assert backend.facts.max_drafts == 0
    speculation, _ = Speculation.from_facts(backend.facts, [], None, n_draft=3, exact=False)
    assert not speculation.drafts_predictions

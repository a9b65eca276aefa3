"""Several tokens a step: with any draft, the reply equals that of single tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.cache.ram import RamCache
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.draft.source import NO_MATCH, DraftJob, Match
from pyctl.engine.draft.speculation import Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Piece
from pyctl.engine.sampling import Sampling
from pyctl.prompt import Prompt, Tokens
from tests.effort import examples
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import Reply, ask, cold, collect, request

PROMPT = Prompt.of(np.random.default_rng(5).integers(1, 60, 150), [100, 146])


class Foresight:
    """Drafts ``width`` tokens of the ``replies`` that it knows by their prompts, wrong ones where ``is_wrong``."""

    name = "foresight"

    def __init__(self, replies: dict[Prompt, list[int]], width: int, is_wrong: Callable[[int], bool]) -> None:
        self.known = {tuple(prompt.tokens.tolist()): reply for prompt, reply in replies.items()}
        self.width, self.is_wrong = width, is_wrong
        self.replies: dict[int, tuple[int, list[int]]] = {}
        self.learned: list[tuple[int, int]] = []

    def begin(self, key: int, prompt: Tokens) -> None:
        assert key not in self.replies
        if tuple(prompt.tolist()) in self.known:
            self.replies[key] = len(prompt), self.known[tuple(prompt.tolist())]

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        return Match(16, lambda n: self._draft(job)[:n]) if job.key in self.replies and not draft else NO_MATCH

    def _draft(self, job: DraftJob) -> tuple[int, ...]:
        n_prompt, reply = self.replies[job.key]
        at = job.seq.n + len(job.sure) - n_prompt
        assert [*job.seq.tokens[n_prompt:].tolist(), *job.sure] == reply[:at]
        right = enumerate(reply[at : at + min(self.width, job.most)], at)
        return tuple(token % 60 + 1 if self.is_wrong(i) else token for i, token in right)

    def learn(self, key: int, n_drafted: int, n_accepted: int) -> None:
        assert 0 <= n_accepted <= n_drafted <= self.width
        self.learned.append((n_drafted, n_accepted))

    def end(self, key: int) -> None:
        self.replies.pop(key, None)


def plain(kind: str, prompt: Prompt = PROMPT, n: int = 60, **fields: object) -> tuple[Reply, FakeBackend]:
    backend = FakeBackend(kind)
    return ask(Engine(backend, RamCache(8, None), EngineSettings()), prompt, n, **fields), backend


@settings(deadline=None, max_examples=examples(60))
@given(
    kind=st.sampled_from(["attention", "hybrid"]),
    width=st.integers(1, 6),
    wrong=st.sets(st.integers(0, 70)),
    n=st.integers(1, 70),
    stop=st.sampled_from([(), ("ab",), ("q",)]),
    ignore_eos=st.booleans(),
    n_probs=st.sampled_from([0, 2]),
)
def test_drafts_change_nothing_but_the_number_of_steps(
    kind: str, width: int, wrong: set[int], n: int, stop: tuple[str, ...], ignore_eos: bool, n_probs: int
) -> None:
    fields = {"sampling": Sampling(temperature=0.0, ignore_eos=ignore_eos), "stop": stop, "n_probs": n_probs}
    expected, one_by_one = plain(kind, n=n, **fields)
    known, _ = plain(kind, n=80, sampling=Sampling(temperature=0.0, ignore_eos=ignore_eos))
    backend = FakeBackend(kind)

    source = Foresight({PROMPT: [*known.tokens, 0]}, width, wrong.__contains__)
    engine = Engine(backend, RamCache(8, None), EngineSettings(exact=True), speculation=Speculation([source]))
    reply = ask(engine, PROMPT, n, **fields)
    assert reply.error is None
    assert expected.done is not None
    assert reply.done is not None
    assert (reply.text, reply.tokens) == (expected.text, expected.tokens)
    assert reply.done.stop_type == expected.done.stop_type
    assert reply.done.stopping_word == expected.done.stopping_word
    assert reply.done.timings.n_predicted == expected.done.timings.n_predicted
    (seq,) = engine.sequences
    assert len(backend.seqs[0].rows) == seq.n, "the engine knows what is left of the drafts"
    assert backend.seqs[0].rows == one_by_one.seqs[0].rows[: seq.n]
    assert not source.replies
    if kind == "attention" or width <= backend.facts.n_rollback:
        assert backend.digest(0) == one_by_one.digest(0)
    check_invariants(engine.prefix_cache.cache)

    engine.speculation = Speculation()
    follow = Prompt.of([*PROMPT.tokens, *reply.tokens, 7, 8, 9], [100, 146])
    assert ask(engine, follow).tokens == cold(FakeBackend(kind), follow).tokens


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("width", [1, 3])
def test_right_drafts_save_steps(kind: str, width: int) -> None:
    endless = Sampling(temperature=0.0, ignore_eos=True)
    known, _ = plain(kind, n=80, sampling=endless)
    backend = FakeBackend(kind)
    source = Foresight({PROMPT: known.tokens}, width, lambda _: False)
    engine = Engine(backend, RamCache(8, None), EngineSettings(), speculation=Speculation([source]))
    assert ask(engine, PROMPT, 61, sampling=endless).tokens == known.tokens[:61]
    n_prefill = 4  # batches: 64, then the boundaries at 100 and 146 and what is left
    assert engine.counters.n_calls - n_prefill == 60 // (width + 1)
    assert engine.counters.n_longest == len(PROMPT) + 60


def test_each_sequence_gets_its_own_outputs() -> None:
    """Two replies side by side, of which one hands over several tokens a step."""
    endless = Sampling(temperature=0.0, ignore_eos=True)
    other = Prompt.of(np.random.default_rng(6).integers(1, 60, 90))
    expected = [plain("attention", prompt, 40, sampling=endless)[0].tokens for prompt in (PROMPT, other)]
    known, _ = plain("attention", n=80, sampling=endless)
    backend = FakeBackend("attention", n_seqs=2)

    source = Foresight({PROMPT: known.tokens}, 3, lambda i: i % 5 == 0)
    engine = Engine(backend, RamCache(8, None), EngineSettings(), speculation=Speculation([source]))
    handles = [RequestHandle(request(prompt, 40, sampling=endless)) for prompt in (PROMPT, other)]
    for handle in handles:
        engine.submit(handle)
    while engine.step():
        pass
    assert [collect(handle).tokens for handle in handles] == expected


@pytest.mark.parametrize("steps", range(4, 16, 3))
def test_a_reply_that_is_cancelled_leaves_a_sequence_that_is_known(steps: int) -> None:
    endless = Sampling(temperature=0.0, ignore_eos=True)
    known, _ = plain("hybrid", n=80, sampling=endless)
    backend = FakeBackend("hybrid")
    source = Foresight({PROMPT: known.tokens}, 3, lambda i: i % 4 == 1)
    engine = Engine(backend, RamCache(8, None), EngineSettings(), speculation=Speculation([source]))
    handle = RequestHandle(request(PROMPT, 70, sampling=endless))
    engine.submit(handle)
    for _ in range(steps):
        engine.step()
    handle.cancel()
    assert not engine.step()
    sent = [token for event in handle.drain() if isinstance(event, Piece) for token in event.tokens]
    assert sent == known.tokens[: len(sent)]
    (seq,) = engine.sequences
    assert len(backend.seqs[0].rows) == backend.seqs[0].at == seq.n


def test_the_outputs_of_several_tokens_are_those_of_one_at_a_time() -> None:
    backends = [FakeBackend("hybrid", n_seqs=2) for _ in range(2)]
    first, second = (11, 12, 13), (21, 22)
    backends[0].decode([SequenceTokens(0, first, 0), SequenceTokens(1, second, 0, 2)])
    together = list(backends[0].outputs)
    apart = []
    for seq, tokens in enumerate((first, second)):
        for position, token in enumerate(tokens):
            backends[1].decode([SequenceTokens(seq, (token,), position)])
            apart += backends[1].outputs
    assert together == [*apart[:3], apart[4]], "none of a token behind which another is sure"


def test_control_tokens_are_text_where_the_request_says_so() -> None:
    reply, _ = plain("attention", n=8)
    hidden = reply.tokens[3]
    shown, backend = plain("attention", n=8, control_texts={hidden: b"<mark>"})
    assert shown.tokens == reply.tokens
    texts = [b"<mark>" if token == hidden else backend.vocabulary.piece(token) for token in reply.tokens]
    assert shown.text == b"".join(texts).decode("utf-8", "replace")


@pytest.mark.parametrize("is_async", [True, False])
def test_what_a_step_gave_is_told_at_once_while_the_next_is_evaluated(is_async: bool) -> None:
    """A device evaluates on its own from when decode returns; elsewhere, others run while decode does."""
    endless = Sampling(temperature=0.0, ignore_eos=True)
    known, _ = plain("hybrid", n=80, sampling=endless)
    backend = FakeBackend("hybrid")
    backend.facts = replace(backend.facts, is_async=is_async)
    source = Foresight({PROMPT: known.tokens}, 3, lambda _: False)
    engine = Engine(backend, RamCache(8, None), EngineSettings(), speculation=Speculation([source]))
    handle = RequestHandle(request(PROMPT, 41, sampling=endless))
    engine.submit(handle)
    seen: list[int] = []
    n_woken = 0
    decode = backend.decode

    def woken() -> None:
        nonlocal n_woken
        n_woken += 1

    def spied(items: Sequence[SequenceTokens]) -> None:
        seen.append(handle._events.qsize())
        handle._wake = woken
        decode(items)

    backend.decode = spied
    while engine.step():
        pass
    assert seen == [max(4 * i - 3, 0) if is_async else 4 * i + 1 for i in range(10)]
    assert n_woken == len(seen), "once for each step"
    reply = collect(handle)
    assert reply.tokens == known.tokens[:41]


def test_a_reply_that_is_cancelled_or_waits_tells_what_it_has() -> None:
    endless = Sampling(temperature=0.0, ignore_eos=True)
    backend = FakeBackend("hybrid", n_seqs=2)
    engine = Engine(backend, RamCache(8, None), EngineSettings())
    handles = [RequestHandle(request(PROMPT, 40, sampling=endless)) for _ in range(2)]
    for handle in handles:
        engine.submit(handle)
    for _ in range(12):
        engine.step()
    n_given = [engine.sequences[i].n - len(PROMPT) + 1 for i in range(2)]
    assert min(n_given) > 1
    engine.scheduler.suspend(engine.running[1])
    handles[0].cancel()
    engine.step()
    assert [len(collect(handle).tokens) for handle in handles] == n_given


class Pieces(FakeBackend):
    """Its tokens are several letters, parts of a character, or nothing."""

    PIECES = (b"a", b"ab", b"\xc3", b"\xa9", b"bca", b"", b"c\xc3")

    def piece(self, token: int) -> bytes:
        return self.PIECES[token % len(self.PIECES)]


@settings(deadline=None, max_examples=examples(200), derandomize=True)
@given(
    seed=st.integers(1, 50),
    stop=st.lists(st.sampled_from(["ab", "b", "é", "ca", "aa", "\ufffd", "abz", "bca", "aba"]), min_size=1, max_size=3),
    n=st.integers(1, 60),
)
def test_tokens_that_begin_behind_a_stop_string_have_no_probabilities(seed: int, stop: list[str], n: int) -> None:
    handle = RequestHandle(request(Prompt.of([seed, 5, 9], []), n, stop=tuple(stop), n_probs=1))
    backend = Pieces()
    engine = Engine(backend, RamCache(0, 0), EngineSettings())
    engine.submit(handle)
    while engine.step():
        pass
    *pieces, done = [event for event in handle.drain() if isinstance(event, Piece | Done)]
    tokens = [token for piece in pieces for token in piece.tokens]
    data = [b"".join(map(backend.piece, tokens[:k])) for k in range(len(tokens))]
    starts = [len(codecs.utf_8_decode(each, "replace", False)[0]) for each in data]
    size = len("".join(piece.text for piece in pieces))
    begun = [start for start in starts if start < size or done.stop_type != "word"]
    assert sum(len(piece.probs) for piece in pieces) == len(begun)

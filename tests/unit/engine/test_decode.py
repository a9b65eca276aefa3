"""Several tokens a step: how many steps that takes, and when a reply is told.
draft/test_drafted_replies.py shows that each reply equals that of single tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.cache.ram import RamCache
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.draft.speculation import Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Piece
from pyctl.prompt import Prompt
from tests.effort import examples
from tests.fake import FakeBackend
from tests.unit.engine.draft.guesses import Guesses
from tests.unit.engine.drive import ask, cold, collect, request, run_all
from tests.unit.engine.scheduling import ENDLESS

PROMPT = Prompt.from_ids(np.random.default_rng(5).integers(1, 60, 150), [100, 146])


@cache
def known(kind: str) -> list[int]:
    """Return a reply without drafts that does not end."""
    return cold(FakeBackend(kind), PROMPT, 80, sampling=ENDLESS).tokens


def drafting(backend: FakeBackend, width: int) -> Engine:
    """Return an engine that drafts ``width`` tokens of that reply."""
    source = Guesses({PROMPT: known(backend.kind)}, width, shortest=width)
    return Engine(backend, RamCache(8, None), EngineSettings(), speculation=Speculation([source]))


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("width", [1, 3])
def test_right_drafts_save_steps(kind: str, width: int) -> None:
    engine = drafting(FakeBackend(kind), width)
    assert ask(engine, PROMPT, 61, sampling=ENDLESS).tokens == known(kind)[:61]
    n_prefill = 4  # batches: 64, then the boundaries at 100 and 146 and what is left
    assert engine.counters.n_calls - n_prefill == 60 // (width + 1)
    assert engine.counters.n_longest == len(PROMPT) + 60


def test_control_tokens_are_text_where_the_request_says_so() -> None:
    backend = FakeBackend("attention")
    reply = cold(backend, PROMPT)
    hidden = reply.tokens[3]
    shown = cold(backend, PROMPT, control_texts={hidden: b"<mark>"})
    assert shown.tokens == reply.tokens
    texts = [
        b"<mark>" if token == hidden else backend.vocabulary.piece(token) for token in reply.tokens
    ]
    assert shown.text == b"".join(texts).decode("utf-8", "replace")


@pytest.mark.parametrize("is_async", [True, False])
def test_what_a_step_gave_is_told_at_once_while_the_next_is_evaluated(is_async: bool) -> None:
    """A device evaluates on its own from when decode returns; elsewhere, others run while decode
    does.
    """
    backend = FakeBackend("hybrid")
    backend.facts = replace(backend.facts, is_async=is_async)
    engine = drafting(backend, 3)
    handle = RequestHandle(request(PROMPT, 41, sampling=ENDLESS))
    engine.submit(handle)
    told = list[list[int]]()
    woken = list[int]()
    decode = backend.decode

    def spied(items: Sequence[SequenceTokens]) -> None:
        told.append(collect(handle).tokens)
        handle._wake = lambda: woken.append(1)
        decode(items)

    backend.decode = spied
    run_all(engine)
    told.append(collect(handle).tokens)
    assert len(woken) == len(told) - 1, "once for each step"
    assert [len(tokens) for tokens in told] == ([0, 1, *[4] * 8, 8] if is_async else [1, *[4] * 10])
    assert [token for tokens in told for token in tokens] == known("hybrid")[:41]


def test_a_reply_that_is_cancelled_or_waits_tells_what_it_has() -> None:
    backend = FakeBackend("hybrid", n_seqs=2)
    engine = Engine(backend, RamCache(8, None), EngineSettings())
    handles = [RequestHandle(request(PROMPT, 40, sampling=ENDLESS)) for _ in range(2)]
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


@settings(max_examples=examples(200))
@given(
    seed=st.integers(1, 50),
    stop=st.lists(
        st.sampled_from(["ab", "b", "é", "ca", "aa", "\ufffd", "abz", "bca", "aba"]),
        min_size=1,
        max_size=3,
    ),
    n=st.integers(1, 60),
)
def test_tokens_that_begin_behind_a_stop_string_have_no_probabilities(
    seed: int, stop: list[str], n: int
) -> None:
    handle = RequestHandle(
        request(Prompt.from_ids([seed, 5, 9], []), n, stop=tuple(stop), n_probs=1)
    )
    backend = Pieces()
    engine = Engine(backend, RamCache(0, 0), EngineSettings())
    run_all(engine, handle)
    *pieces, done = [event for event in handle.drain() if isinstance(event, Piece | Done)]
    tokens = [token for piece in pieces for token in piece.tokens]
    data = [b"".join(map(backend.piece, tokens[:k])) for k in range(len(tokens))]
    starts = [len(codecs.utf_8_decode(each, "replace", False)[0]) for each in data]
    size = len("".join(piece.text for piece in pieces))
    begun = [start for start in starts if start < size or done.stop_type != "word"]
    assert sum(len(piece.probs) for piece in pieces) == len(begun)

"""Verify batches: shares, widths, and batches behind a mark."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from pyctl.cache.ram import RamCache
from pyctl.cache.sequence import LiveSequence
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.draft.draft_length import DraftLengthController
from pyctl.engine.draft.source import DraftJob
from pyctl.engine.draft.speculation import ModelDrafts, Speculation
from pyctl.engine.draft.verify_batch import BatchItem, verify_batches
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.sampling import Sampling
from pyctl.engine.schedule.admission import ActiveRequest
from pyctl.errors import EngineError
from pyctl.prompt import as_tokens
from tests.fake import FakeBackend
from tests.unit.engine.draft.guesses import Guesses, Told
from tests.unit.engine.drive import ask, request, run_all
from tests.unit.engine.scheduling import alone, prompt_of, submit

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)


class WatchedBackend(FakeBackend):
    """Notes what it decodes, and how many tokens it drafts for how many requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decoded, self.asked = list[SequenceTokens](), list[tuple[int, int]]()

    def decode(self, items: Sequence[SequenceTokens]) -> None:
        self.decoded += items
        super().decode(items)

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        self.asked.append((len(items), n))
        return super().draft(items, n)


def drafting(
    backend: FakeBackend, *sources: Guesses, model: ModelDrafts | None = None, width: int = 0
) -> Engine:
    return Engine(
        backend,
        RamCache(8, None),
        EngineSettings(),
        speculation=Speculation(sources, model, width=width),
    )


def waiting(key: int, n: int, sure: tuple[int, ...] = (5,)) -> ActiveRequest:
    """Return a request whose sequence of the same number holds ``n`` tokens."""
    seq = LiveSequence(key, 4096)
    seq.append(as_tokens([1] * n), exact=True)
    handle = RequestHandle(request(prompt_of(1, 60)))
    return ActiveRequest(handle, id=key, seq=seq, step=sure)


def batches_of(
    backend: FakeBackend,
    requests: list[ActiveRequest],
    speculation: Speculation,
    n_free: int = 1000,
) -> list[list[BatchItem]]:
    return verify_batches(requests, backend.facts, speculation, n_free, lambda n: True)


def widths(batches: list[list[BatchItem]]) -> list[list[int]]:
    return [[len(item.tokens) for _, item, _ in batch] for batch in batches]


def test_everybody_gets_the_same_share_of_what_there_is() -> None:
    """Requests share outputs, cells and tokens of a batch equally, and each limit alone shortens
    the drafts: outputs, cells, the batch, the context, and the rollback of states.
    """
    source = Told("told")
    speculation = Speculation([source])
    backend = FakeBackend("attention", n_seqs=4, n_ctx=200, n_cells=1000, n_ubatch=64, n_outputs=24)
    batches_of(backend, [waiting(0, 10)], speculation)
    assert source.maximum == {0: 23}, "outputs: one is the next token's"
    batches_of(backend, [waiting(key, 10) for key in range(4)], speculation)
    assert source.maximum == dict.fromkeys(range(4), 5)
    batches_of(backend, [waiting(key, 10) for key in range(4)], speculation, n_free=9)
    assert source.maximum == dict.fromkeys(range(4), 2), "cells"
    backend.facts = replace(backend.facts, n_outputs=1000)
    batches_of(backend, [waiting(key, 10) for key in range(4)], speculation)
    assert source.maximum == dict.fromkeys(range(4), 15), "tokens of one evaluation"
    batches_of(backend, [waiting(0, 196)], speculation)
    assert source.maximum[0] == 3, "the context's end"
    backend = FakeBackend("hybrid", max_drafts=8, n_ubatch=64)
    batches_of(backend, [waiting(0, 10)], speculation)
    assert source.maximum[0] == 8, "what can be taken back"


@pytest.mark.parametrize("n_free", [-3, 0])
def test_without_room_nobody_is_asked(n_free: int) -> None:
    source = Told("told", (1, 2, 3))
    (batch,) = batches_of(FakeBackend(), [waiting(0, 10)], Speculation([source]), n_free)
    assert source.maximum == {}
    assert batch[0].tokens == SequenceTokens(0, (5,), 10)


def test_where_planes_count_all_have_as_many_tokens() -> None:
    """A hybrid backend gets equal widths for drafts that its state history covers: shorter ones are
    padded, and the padding counts as no draft. Attention needs no padding.
    """
    speculation = Speculation([Told("told", (1, 2, 3), (4,), (), (6,) * 20)])
    requests = [
        waiting(0, 10),
        waiting(1, 20),
        waiting(2, 30),
        waiting(3, 40),
        waiting(4, 50, sure=(7, 8)),
    ]
    hybrid = FakeBackend("hybrid", n_seqs=5, n_ubatch=256, n_state_history=3)
    batches = batches_of(hybrid, requests, speculation)
    assert sorted(map(sorted, widths(batches))) == [[2, 21], [4, 4, 4]]
    filled = {
        active.id: (item.tokens, draft.n_drafted)
        for batch in batches
        for active, item, draft in batch
    }
    assert filled[0] == ((5, 1, 2, 3), 3)
    assert filled[1] == ((5, 4, 5, 5), 1), "what fills up is no draft of anybody"
    assert filled[2] == ((5, 5, 5, 5), 0)
    attention = FakeBackend("attention", n_seqs=5, n_ubatch=256)
    assert widths(batches_of(attention, requests, speculation)) == [[4, 2, 1, 21, 2]]


def test_a_replay_beside_others_keeps_its_planes() -> None:
    """Repeated tokens make a batch wider than others, by less than the planes."""
    backend = FakeBackend("hybrid", n_seqs=2, n_state_history=3)
    for seq in (0, 1):
        backend.evaluate(seq, as_tokens([1] * 10), 0)
    requests = [waiting(0, 10, sure=(7, 8)), waiting(1, 10)]
    batches = batches_of(backend, requests, Speculation([Told("told", (1, 2, 3), (4, 5, 6))]))
    assert widths(batches) == [[5], [4]]
    for batch in batches:
        backend.decode([item.tokens for item in batch])
    assert backend.rollback(0, 12) == 12
    assert backend.rollback(1, 11) == 11


def test_more_tokens_than_one_evaluation_takes_are_several() -> None:
    requests = [waiting(key, 100, sure=(1,) * 30) for key in range(5)]
    backend = FakeBackend("hybrid", n_seqs=5, n_ubatch=64, n_state_history=0)
    assert widths(batches_of(backend, requests, Speculation([Told("told")]))) == [
        [30, 30],
        [30, 30],
        [30],
    ]


@pytest.mark.parametrize("n_state_history", [0, 3])
def test_rejected_long_drafts_are_evaluated_again_once(n_state_history: int) -> None:
    """Drafts that are always long and always wrong: what is evaluated again is evaluated once."""
    backend = WatchedBackend("hybrid", n_state_history=n_state_history, n_ctx=1024)
    prompt = prompt_of(1, 150)
    seen = backend.decoded
    known = alone(prompt, 320, sampling=ENDLESS).tokens
    engine = drafting(backend, Guesses({prompt: known}, longest=40, wrong=0.1))
    assert ask(engine, prompt, 300, sampling=ENDLESS).tokens == known[:300]
    replays = [item for item in seen if item.n_committed > 1]
    assert replays
    assert all(item.n_drafts <= n_state_history for item in replays)
    for before, after in itertools.pairwise(seen):
        assert after.position + after.n_committed > before.position + before.n_committed, (
            "each step adds a token"
        )
        assert before.n_committed == 1 or after.position >= before.position + before.n_committed


def test_one_source_that_fails_costs_drafts_only(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend(n_ctx=1024, n_seqs=2, draft_type="draft-mtp")
    backend.draft = Mock(side_effect=EngineError("the draft model failed"))
    engine = drafting(backend, model=ModelDrafts(backend, 3))
    handles = [submit(engine, prompt_of(seed, 150), 20, sampling=ENDLESS) for seed in (1, 2)]
    run_all(engine)
    for seed, handle in zip((1, 2), handles, strict=True):
        tokens = [token for event in handle.drain() for token in getattr(event, "tokens", ())]
        assert tokens == alone(prompt_of(seed, 150), 20, sampling=ENDLESS).tokens
    assert "draft source draft-mtp failed" in caplog.text


@pytest.mark.parametrize(("n_max", "kind"), [(3, "hybrid"), (4, "hybrid"), (2, "attention")])
def test_a_model_drafts_for_all_at_once_or_for_nobody(n_max: int, kind: str) -> None:
    backend = WatchedBackend(kind, n_ctx=1024, n_seqs=3, n_state_history=3, draft_type="draft-mtp")
    engine = drafting(backend, model=ModelDrafts(backend, n_max))
    handles = [submit(engine, prompt_of(seed, 150), 40, sampling=ENDLESS) for seed in (1, 2, 3)]
    run_all(engine)
    assert {n for _, n in backend.asked} == {n_max, min(n_max, backend.facts.n_rollback)}, (
        "fewer behind a mark"
    )
    assert max(n for n, _ in backend.asked) == 3
    assert all(handle.drafts.n_accepted > 10 for handle in handles)


def test_with_a_width_all_batches_have_it() -> None:
    """All batches have the given width whether anybody drafts, or much or little, so that the
    computation is the same.
    """
    prompt = prompt_of(1, 150)
    known = alone(prompt, 320, sampling=ENDLESS).tokens
    for longest, silent in ((1, 0.5), (40, 0.5), (3, 0.0), (3, 1.0)):
        backend = WatchedBackend(n_ctx=1024)
        engine = drafting(backend, Guesses({prompt: known}, longest, 0.2, silent), width=3)
        handle = submit(engine, prompt, 100, sampling=ENDLESS)
        run_all(engine)
        assert {len(item.tokens) for item in backend.decoded} == {4}
        assert (handle.drafts.n_drafted == 0) == (silent == 1.0)


def test_a_model_is_asked_for_as_many_as_pay() -> None:
    class Choosing(DraftLengthController):
        def length(self, key: int, source: str, limit: int, *args: object, **fields: object) -> int:
            return min(key, limit)

    backend = WatchedBackend("hybrid", n_seqs=4, n_state_history=5, draft_type="draft-mtp")
    for seq in range(4):
        backend.evaluate(seq, as_tokens([1] * 10), 0)
    speculation = Speculation(model=ModelDrafts(backend, 5), lengths=Choosing())
    assert widths(batches_of(backend, [waiting(key, 10) for key in (0, 1)], speculation)) == [
        [2, 2]
    ]
    assert widths(batches_of(backend, [waiting(key, 10) for key in (0, 3, 2)], speculation)) == [
        [4, 4, 4]
    ]
    assert widths(batches_of(backend, [waiting(0, 10)], speculation)) == [[1]]
    assert [n for _, n in backend.asked] == [1, 3]


@pytest.mark.parametrize(
    ("n_min", "expected"), [(0, [0, 1, 2, 3]), (2, [0, 0, 2, 3]), (4, [0, 0, 0, 0])]
)
def test_drafts_of_a_model_that_are_too_short_are_none(n_min: int, expected: list[int]) -> None:
    class Unsure(FakeBackend):
        def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
            return [(7,) * min(item.seq, n) for item in items]

    jobs = [DraftJob(key, LiveSequence(key, 4096), (5,), 3) for key in range(4)]
    source = ModelDrafts(Unsure(draft_type="draft-mtp"), 3, n_min)
    assert [len(draft) for draft in source.propose(jobs)] == expected
    if n_min <= 3:
        assert [len(draft) for draft in source.propose(jobs, 1)] == [0, 1, 1, 1], (
            "no more were wanted"
        )

"""A reply with drafts equals the reply without, for every source, any other requests and any
end.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.cache.ram import RamCache
from pyctl.chat.reasoning import ReasoningLimit
from pyctl.engine.draft.draft_length import DraftLengthController
from pyctl.engine.draft.speculation import ModelDrafts, Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.sampling import Sampling
from pyctl.prompt import Prompt
from tests.effort import examples
from tests.unit.engine.draft.guesses import Continuing, Guesses, RememberingBackend
from tests.unit.engine.drive import Reply, ask, cold, collect, run_all
from tests.unit.engine.scheduling import check_at_rest, prompt_of, submit

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)
ENDING = Sampling(temperature=0.0)
BUDGET = ReasoningLimit(4, "<", (">", "jl"), (21, 22, 23), (7,), {7: b"<", 8: b">"}, recurs=True)
N_CTX = 512
PROMPTS = tuple(prompt_of(seed, 60 + 40 * seed, head=50 * (seed % 2)) for seed in range(8))


@cache
def without(number: int, n: int, kind: str, **fields: Any) -> Reply:
    return cold(RememberingBackend(kind, n_ctx=N_CTX), PROMPTS[number], n, **fields)


def known(kind: str, **fields: Any) -> dict[Prompt, list[int]]:
    """Return for each prompt the tokens of a reply that goes on and on; an ending reply is known up
    to its end.
    """
    return {prompt: without(i, -1, kind, **fields).tokens for i, prompt in enumerate(PROMPTS)}


class Drafting:
    """Which sources there are, and what the backend can take back."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.__dict__.update(data)

    def engine(
        self, kind: str, n_seqs: int, replies: dict[Prompt, list[int]], **options: Any
    ) -> Engine:
        """Return an engine with these draft sources, which propose parts of ``replies``."""
        backend = RememberingBackend(
            kind,
            n_ctx=N_CTX,
            n_cells=self.n_cells,
            n_seqs=n_seqs,
            n_state_history=self.n_state_history,
            max_drafts=self.max_drafts,
            n_outputs=self.n_outputs,
            draft_type="draft-mtp" if self.n_model else "",
            can_hold=self.can_hold,
        )
        self.sources = [
            (Continuing if self.is_composed else Guesses)(
                replies, longest, wrong, silent, self.seed + i, f"guesses-{i}"
            )
            for i, (longest, wrong, silent) in enumerate(self.guesses)
        ]
        model = ModelDrafts(backend, self.n_model) if self.n_model else None
        width = min(self.n_model or 3, backend.facts.n_rollback) if self.is_fixed else 0
        lengths = (
            DraftLengthController(n_free=backend.facts.n_rollback)
            if self.is_paced and not self.is_fixed
            else None
        )
        speculation = Speculation(self.sources, model, lengths=lengths, width=width)
        return Engine(
            backend, RamCache(*self.cache), EngineSettings(**options), speculation=speculation
        )


DRAFTING = st.fixed_dictionaries(
    {
        "n_state_history": st.sampled_from([0, 1, 3, 3, 5]),
        "max_drafts": st.sampled_from([0, 8, 48]),
        "n_outputs": st.sampled_from([0, 4, 16]),
        "n_model": st.sampled_from([0, 0, 1, 3, 4]),
        "n_cells": st.sampled_from([N_CTX, N_CTX, 2 * N_CTX]),
        "guesses": st.lists(
            st.tuples(
                st.sampled_from([1, 3, 6, 40]),
                st.sampled_from([0.0, 0.1, 0.5, 1.0]),
                st.sampled_from([0.0, 0.3, 0.9]),
            ),
            max_size=2,
        ),
        "is_fixed": st.booleans(),
        "is_composed": st.booleans(),
        "is_paced": st.booleans(),
        "cache": st.sampled_from([(32, None), (4, None), (0, None), (8, 20_000)]),
        "can_hold": st.sampled_from([True, True, False]),
        "seed": st.integers(0, 1000),
    }
).map(Drafting)

FIELDS = st.fixed_dictionaries(
    {
        "sampling": st.sampled_from([ENDLESS, ENDING, replace(ENDLESS, post_sampling_probs=True)]),
        "stop": st.sampled_from([(), ("ab",), ("q",)]),
        "n_probs": st.sampled_from([0, 2]),
        "reasoning": st.sampled_from([None, BUDGET]),
    }
)


def check_reply(reply: Reply, expected: Reply) -> None:
    assert reply.error is None
    assert reply.text == expected.text
    assert reply.tokens == expected.tokens
    assert reply.done.stop_type == expected.done.stop_type
    assert reply.done.stopping_word == expected.done.stopping_word
    assert reply.done.timings.n_predicted == expected.done.timings.n_predicted


@settings(max_examples=examples(120))
@given(
    kind=st.sampled_from(["hybrid", "hybrid", "attention", "opaque"]),
    drafting=DRAFTING,
    fields=FIELDS,
    number=st.integers(0, 5),
    n=st.sampled_from([1, 2, 7, 40, 90, -1]),
)
def test_a_reply_is_the_one_without_drafts(
    kind: str, drafting: Drafting, fields: dict[str, Any], number: int, n: int
) -> None:
    """Drafts change no token, no row of the sequence and no later reply, for any sources, widths
    and kinds of memory. The counts of drafts agree with each other.
    """
    expected = without(number, n, kind, **fields)
    endless = {**fields, "stop": (), "n_probs": 0}
    engine = drafting.engine(kind, 1, known(kind, **endless), exact=True)
    backend = engine.backend
    handle = submit(engine, PROMPTS[number], n, **fields)
    run_all(engine)
    reply = collect(handle)
    check_reply(reply, expected)
    check_at_rest(engine, backend)
    (seq,) = engine.sequences
    plain = RememberingBackend(kind, n_ctx=N_CTX)
    ask(Engine(plain, RamCache(0, 0), EngineSettings(exact=True)), PROMPTS[number], n, **fields)
    assert backend.seqs[0].rows == plain.seqs[0].rows[: seq.n]
    assert seq.tokens.tolist() == [*PROMPTS[number].tokens, *reply.tokens][: seq.n]
    if drafting.max_drafts <= drafting.n_state_history or kind == "attention":
        assert backend.digest(0) == plain.digest(0), "nothing but the last token is missing"
    counts = handle.drafts
    assert (
        sum(counts.by_position)
        == counts.n_accepted
        <= min(counts.n_drafted, reply.done.timings.n_predicted - 1)
    )
    assert list(counts.by_position) == sorted(counts.by_position, reverse=True)
    assert engine.counters.drafts == reply.done.timings.drafts == counts

    follow = Prompt.from_ids([*PROMPTS[number].tokens, *reply.tokens, 7, 8, 9][: N_CTX - 20], [100])
    engine.speculation = Speculation()
    plain_follow = cold(
        RememberingBackend(kind, n_ctx=N_CTX), follow, options=EngineSettings(exact=True)
    )
    assert ask(engine, follow).tokens == plain_follow.tokens


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 7), st.sampled_from([1, 30, 150, -1, -1])),
        st.tuples(st.just("ask"), st.integers(0, 3), st.just(-1)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("park"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("step"), st.sampled_from([1, 2, 7, 40, 200]), st.just(0)),
    ),
    min_size=8,
    max_size=25,
)


@settings(max_examples=examples(240))
@given(
    kind=st.sampled_from(["hybrid", "hybrid", "attention", "opaque"]),
    n_seqs=st.sampled_from([1, 2, 3, 4, 4]),
    drafting=DRAFTING,
    fields=FIELDS,
    clear_idle=st.booleans(),
    missing=st.sampled_from([0, 0, 0, 60, 150]),
    actions=ACTIONS,
)
def test_replies_do_not_depend_on_other_drafting_requests(
    kind: str,
    n_seqs: int,
    drafting: Drafting,
    fields: dict[str, Any],
    clear_idle: bool,
    missing: int,
    actions: list[tuple[str, int, int]],
) -> None:
    """Too few cells for all, so that requests are suspended; some are cancelled, at any step, or
    made to wait. With ``missing`` the context has fewer cells than it says.
    """
    endless = {**fields, "stop": (), "n_probs": 0}
    engine = drafting.engine(
        kind, n_seqs, known(kind, **endless), exact=True, clear_idle=clear_idle
    )
    engine.backend.n_cells -= missing
    asked: list[tuple[int, int, RequestHandle]] = []
    for action, value, n in actions:
        if action == "ask":
            longest = min(N_CTX, drafting.n_cells - missing) - len(PROMPTS[value])
            n = longest if n < 0 else min(n, longest)
            asked.append((value, n, submit(engine, PROMPTS[value], n, **fields)))
        elif action == "cancel" and asked:
            asked[value % len(asked)][2].cancel()
        elif action == "park" and len(engine.running) > 1:
            engine.scheduler.suspend(engine.running[value % len(engine.running)])
        elif action == "step":
            for _ in range(value):
                engine.step()
                check_sequences(engine)
    run_all(engine)
    for number, n, handle in asked:
        reply = collect(handle)
        expected = without(number, n, kind, **fields)
        assert reply.error is None
        if reply.done is None:
            assert handle.cancelled
            assert reply.tokens == expected.tokens[: len(reply.tokens)]
        else:
            check_reply(reply, expected)
    check_at_rest(engine, engine.backend)
    assert not any(source.followed for source in drafting.sources)


def check_sequences(engine: Engine) -> None:
    """Check that between two steps each sequence holds what the engine reports, and nothing of a
    draft.
    """
    for held, seq in zip(engine.backend.seqs, engine.sequences, strict=True):
        assert len(held.rows) == seq.n
        assert engine.backend.kind == "attention" or held.at == seq.n or not seq.n

"""Random prompts, cancels and sequences in too few cells: no failures, no leaks, and the replies of single requests."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.engine.handle import RequestHandle
from tests.effort import examples
from tests.fake import FakeBackend
from tests.unit.engine.drive import collect, engine_of
from tests.unit.engine.test_scheduler import ENDLESS, KINDS, alone, check_at_rest, prompt_of, run, submit

N_CTX = 512
CONVERSATIONS = [prompt_of(seed, 60 + 40 * seed, head=50 * (seed % 2)) for seed in range(8)]


@cache
def longest_alone(number: int, kind: str) -> list[int]:
    """What the conversation gets as its reply alone, as long as there is room: a shorter reply is its beginning."""
    prompt = CONVERSATIONS[number]
    return alone(prompt, N_CTX - len(prompt), kind, N_CTX, sampling=ENDLESS).tokens


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 7), st.sampled_from([1, 30, 150, -1, -1])),
        st.tuples(st.just("ask"), st.integers(0, 3), st.just(-1)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("step"), st.sampled_from([2, 7, 40, 200]), st.just(0)),
    ),
    min_size=10,
    max_size=25,
)


@settings(max_examples=examples(150))
@given(
    kind=st.sampled_from(KINDS),
    n_seqs=st.sampled_from([1, 2, 3, 4, 4]),
    kept=st.sampled_from([(32, None), (4, None), (0, None), (8, 20_000)]),
    clear_idle=st.booleans(),
    missing=st.sampled_from([0, 0, 0, 60]),
    can_hold=st.sampled_from([True, True, False]),
    actions=ACTIONS,
)
def test_whoever_asks_beside_whom_each_reply_is_the_one_alone(
    kind: str,
    n_seqs: int,
    kept: tuple[int, int | None],
    clear_idle: bool,
    missing: int,
    can_hold: bool,
    actions: list[tuple[str, int, int]],
) -> None:
    """Eight conversations of together three times the cells, some with a common head; nothing fails, nothing is left.

    With ``missing`` the context has fewer cells than it says.
    """
    n_ctx, conversations = N_CTX, CONVERSATIONS
    assert sum(len(prompt) for prompt in conversations) > 3 * n_ctx
    backend = FakeBackend(kind, n_ctx=n_ctx, n_seqs=n_seqs, can_hold=can_hold)
    engine = engine_of(backend, *kept, exact=True, clear_idle=clear_idle)
    backend.n_cells -= missing
    fields = {"sampling": ENDLESS}
    asked: list[tuple[int, int, RequestHandle]] = []
    for action, value, n in actions:
        if action == "ask":
            longest = n_ctx - missing - len(conversations[value])
            n = longest if n < 0 else min(n, longest)
            asked.append((value, n, submit(engine, conversations[value], n, **fields)))
        elif action == "cancel" and asked:
            asked[value % len(asked)][2].cancel()
        elif action == "step":
            for _ in range(value):
                engine.step()
    run(engine)
    for number, n, handle in asked:
        reply = collect(handle)
        expected = longest_alone(number, kind)[:n]
        assert len(expected) == n
        assert reply.error is None
        assert reply.tokens == expected if reply.done else handle.cancelled
        assert reply.tokens == expected[: len(reply.tokens)]
    check_at_rest(engine, backend)

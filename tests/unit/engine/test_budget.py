"""The end of reasoning, forced token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.stream import ReasoningBudget
from pyctl.prompt import Prompt
from pyctl.reasoning import ReasoningLimit
from tests.fake import FakeBackend
from tests.unit.engine.drive import ask, cold

OPEN, CLOSE, NEWLINE = 101, 102, 10


def limit(n: int, read: tuple[int, ...] = (OPEN,), forced: tuple[int, ...] = (NEWLINE, CLOSE)) -> ReasoningLimit:
    return ReasoningLimit(n, "e", ("f", "\7\x08"), forced, read, recurs=True)


def letters(token: int) -> bytes:
    return bytes([token])


def run(budget: ReasoningBudget, says: list[int]) -> list[int]:
    """The output when the model would say ``says``."""
    out = []
    for token in says:
        forced = budget.next()
        out.append(token if forced is None else forced)
        budget.saw(out[-1])
    return out


@pytest.mark.parametrize("n", [0, 1, 3])
def test_the_end_is_forced_after_n_tokens(n: int) -> None:
    assert run(ReasoningBudget(limit(n), letters), [1] * 8) == [1] * n + [NEWLINE, CLOSE] + [1] * (6 - n)


def test_somebody_may_end_a_block_but_only_one_that_is_open() -> None:
    budget = ReasoningBudget(limit(100), letters)
    assert run(budget, [1, 1]) == [1, 1]
    budget.end()
    assert run(budget, [1] * 4) == [NEWLINE, CLOSE, 1, 1]
    budget.end()
    assert run(budget, [1, OPEN, 1, 1]) == [1, OPEN, 1, 1]


def test_what_the_prompt_holds_counts() -> None:
    assert run(ReasoningBudget(limit(3, read=(OPEN, 5, 5)), letters), [1] * 4) == [1, NEWLINE, CLOSE, 1]
    assert run(ReasoningBudget(limit(0, read=(OPEN, NEWLINE)), letters), [1] * 4) == [NEWLINE, CLOSE, 1, 1]


def test_an_end_in_time_is_left_alone_and_a_new_block_counts_anew() -> None:
    assert run(ReasoningBudget(limit(3), letters), [1, CLOSE, 1, 1, 1, 1]) == [1, CLOSE, 1, 1, 1, 1]
    assert run(ReasoningBudget(limit(3), letters), [1, 7, 8, 1, 1, 1]) == [1, 7, 8, 1, 1, 1]
    says = [1, CLOSE, 1, 1, OPEN, 1, 1, 1, 1, 1]
    assert run(ReasoningBudget(limit(3), letters), says) == [1, CLOSE, 1, 1, OPEN, 1, 1, 1, NEWLINE, CLOSE]


def test_without_a_block_nothing_is_forced() -> None:
    assert run(ReasoningBudget(limit(0, read=()), letters), [1] * 5) == [1] * 5


def test_a_character_is_never_torn() -> None:
    # 0xC3 0xA4 is one character in two tokens.
    assert run(ReasoningBudget(limit(1), letters), [0xC3, 0xA4, 1, 1]) == [0xC3, 0xA4, NEWLINE, CLOSE]


@given(
    st.integers(0, 20), st.lists(st.integers(1, 110), max_size=60), st.lists(st.integers(1, 6), min_size=1, max_size=4)
)
def test_a_block_is_never_longer_than_its_limit(n: int, says: list[int], message: list[int]) -> None:
    out = run(ReasoningBudget(limit(n, forced=(*message, CLOSE)), letters), says)
    length, inside = 0, True
    for at, token in enumerate(out):
        if not inside:
            inside, length = token == OPEN, 0
        elif token == CLOSE or out[max(at - 1, 0) : at + 1] == [7, 8]:
            inside = False
        else:
            length += 1
            assert length <= n + len(message)


def test_forced_tokens_are_evaluated_like_any_other() -> None:
    """The sequence afterwards holds what a prompt with the same tokens would make of it."""
    backend = FakeBackend()
    prompt = Prompt.of([*range(1, 50), 5], [])
    reasoning = ReasoningLimit(4, "<", (">",), (9, 3), (5,), {5: b"<", 9: b">"})
    reply = ask(Engine(backend, RamCache(0, 0), EngineSettings()), prompt, 12, reasoning=reasoning)
    free = cold(FakeBackend(), prompt, 12).tokens
    assert reply.tokens[:4] == free[:4]
    assert reply.tokens[4:6] == [9, 3]
    again = FakeBackend()
    longer = Prompt.of([*prompt.tokens, *reply.tokens[:-1]], [])
    for at in (slice(0, 50), *(slice(i, i + 1) for i in range(50, len(longer)))):
        again.evaluate(0, longer.tokens[at], at.start)
    assert again.digest(0) == backend.digest(0)

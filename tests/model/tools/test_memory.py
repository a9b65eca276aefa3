"""An early token changes late logits of a generated model, through the rows and through the
state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from tests.model.tools.conftest import Load, Loaded

LENGTH = 2000


def two_prompts(changed: int = 5) -> tuple[list[int], list[int]]:
    """Return two prompts of `LENGTH` tokens that differ in one."""
    one = np.random.default_rng(1).integers(0, 95, LENGTH).tolist()
    other = list(one)
    other[changed] = (one[changed] + 1) % 95
    return one, other


def last_logits(
    model: Loaded, prompt: list[int], state: bytes | None = None
) -> tuple[np.ndarray, bytes]:
    """Return logits after the last token, which sees `state` instead of the prompt's own, and that
    own state before it.
    """
    model.forget()
    model.evaluate(prompt[:-1])
    own = model.state()
    if state is not None:
        model.set_state(state)
    return model.evaluate(prompt[-1:]), own


def test_an_early_token_changes_the_last_logits(tiny: Loaded) -> None:
    one, other = (last_logits(tiny, prompt)[0] for prompt in two_prompts())
    assert np.abs(one - other).max() > 1e-2


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-moe"])
@pytest.mark.parametrize("changed", [0, 5, 900])
def test_through_the_rows_and_through_the_state(loaded: Load, name: str, changed: int) -> None:
    model = loaded(name)
    one, other = two_prompts(changed)
    logits_one, state_one = last_logits(model, one)
    logits_other, _ = last_logits(model, other)
    mixed, _ = last_logits(model, other, state_one)
    assert np.abs(mixed - logits_other).max() > 1e-3, "the state does not matter"
    assert np.abs(mixed - logits_one).max() > 1e-3, "the rows do not matter"


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-moe"])
def test_evaluating_again_gives_the_same_bits(loaded: Load, name: str) -> None:
    model = loaded(name)
    prompt, _ = two_prompts()
    assert np.array_equal(last_logits(model, prompt)[0], last_logits(model, prompt)[0])

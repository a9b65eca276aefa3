"""Raw prompts."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.errors import RequestError
from pyctl.requests.body import CompletionBody
from pyctl.requests.prompts import RequestedPrompt, raw_prompts
from pyctl.requests.request_pool import NOTHING
from tests.unit.server.fake import Bench, play


def read(prompt: Any, **fields: Any) -> list[RequestedPrompt]:
    body = CompletionBody.from_json({"prompt": prompt, **fields})
    return list(raw_prompts(Bench(play("x")).service, body, NOTHING))


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        (["a", 98], ["ab"]),
        ([[97], "b", ["c", 100]], ["a", "b", "cd"]),
        ({"prompt_string": "ab"}, ["ab"]),
    ],
)
def test_forms_of_a_prompt(prompt: Any, texts: list[str]) -> None:
    assert [requested.text for requested in read(prompt)] == texts
    tokens = [requested.prompt.tokens.tolist() for requested in read(prompt)]
    assert tokens == [list(text.encode()) for text in texts]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "'prompt' is missing"),
        ([], "'prompt' is empty"),
        (1, "'prompt' must be a string or a list"),
        ([["a", None]], "'prompt' must hold strings and token ids"),
        (["a"] * 513, "at most 512 prompts with this 'n'"),
    ],
)
def test_values_that_are_no_prompt(prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read(prompt)


def test_a_raw_prompt_has_the_constraint_and_the_reasoning_that_the_request_names() -> None:
    (requested,) = read(
        "a",
        grammar="root ::= [a]",
        reasoning_budget_tokens=3,
        reasoning_budget_start_tag="<t>",
        reasoning_budget_end_tags=["</t>"],
    )
    assert requested.chat is None
    assert requested.constraint is not None
    assert requested.constraint.grammar == "root ::= [a]"
    assert requested.reasoning is not None
    assert requested.reasoning.n_tokens == 3

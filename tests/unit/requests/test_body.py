from __future__ import annotations

from typing import Any

import pytest

from pyctl.errors import RequestError
from pyctl.requests.body import (
    ChatBody,
    CompletionBody,
    ConversationBody,
    InfillBody,
    StructuredOutput,
)
from pyctl.requests.body_reader import Body


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, InfillBody, ConversationBody])
def test_nothing_said_is_the_default(body: type[Body]) -> None:
    assert body.from_json({}) == body()


@pytest.mark.parametrize(
    ("values", "n_probs"),
    [
        ({"logprobs": True}, 20),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": 2}, 2),
        ({"logprobs": 2, "top_logprobs": 3}, 3),
        ({"logprobs": False, "n_probs": 4}, 4),
        ({"logprobs": True, "n_probs": 0}, 20),
        ({"logprobs": 0}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"n_probs": 0}, None),
        ({"n_probs": -1}, None),
        ({}, None),
    ],
)
def test_log_probabilities_of_a_chat_are_a_switch_or_a_count(
    values: dict[str, Any], n_probs: int | None
) -> None:
    assert ChatBody.from_json(values).n_probs == n_probs


@pytest.mark.parametrize(
    ("values", "n_probs"),
    [
        ({"logprobs": 0}, 0),
        ({"logprobs": 3}, 3),
        ({"logprobs": False}, None),
        ({"logprobs": None}, None),
        ({"logprobs": -1}, None),
        ({"n_probs": 0}, None),
        ({"n_probs": 2, "logprobs": 0}, 2),
    ],
)
def test_log_probabilities_of_a_text_are_a_count(
    values: dict[str, Any], n_probs: int | None
) -> None:
    assert CompletionBody.from_json(values).n_probs == n_probs


@pytest.mark.parametrize(
    ("values", "schema"),
    [
        ({"json_schema": {"type": "string"}}, {"type": "string"}),
        ({"json_schema": {}, "response_format": {"type": "text"}}, {"type": "object"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            {"type": "object"},
        ),
        ({"grammar": "root ::= [a]"}, None),
    ],
)
def test_the_schema_of_a_structured_output(values: dict[str, Any], schema: Any) -> None:
    assert StructuredOutput.from_json(values).schema() == schema


@pytest.mark.parametrize(
    ("response_format", "words"),
    [
        ({"type": "xml"}, "response_format type must be one of"),
        ({"type": "json_schema", "json_schema": {"type": "string"}}, "its member 'schema'"),
        ({"type": "json_schema", "json_schema": []}, "'json_schema' must be an object"),
    ],
)
def test_a_format_that_has_no_schema(response_format: dict[str, Any], words: str) -> None:
    output = StructuredOutput.from_json({"response_format": response_format})
    with pytest.raises(RequestError, match=words):
        output.schema()

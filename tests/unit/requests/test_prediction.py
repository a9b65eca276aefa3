"""The field ``prediction``: its forms, and the values that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.errors import RequestError
from pyctl.requests.body import ChatBody
from pyctl.requests.prediction import MAX_CHARS, MAX_PARTS, predicted_tokens
from tests.unit.chat.toy import chatml_tokenizer


def read(prediction: Any) -> str | None:
    return ChatBody.from_json({"messages": [], "prediction": prediction}).prediction


def test_a_prediction_is_a_text_or_parts_of_it() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert read({"type": "content", "content": "one two"}) == "one two"
    assert read({"type": "content", "content": parts}) == "one two"
    assert read({"type": "content", "content": ""}) == ""
    assert read(None) is None


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ("text", "'prediction' must be an object"),
        ({"content": "x"}, "'prediction.type' must be \"content\", not: None"),
        ({"type": "other", "content": "x"}, "'prediction.type' must be \"content\", not: other"),
        ({"type": "content"}, "'prediction.content' is required"),
        ({"type": "content", "content": 7}, "'prediction.content' must be a list"),
        ({"type": "content", "content": ["x"]}, "'prediction.content[0]' must be an object"),
        ({"type": "content", "content": [{"type": "image"}]}, "'prediction.content[0]' must be"),
        ({"type": "content", "content": [{"type": "text", "text": 1}]}, "'prediction.content[0]'"),
        ({"type": "content", "content": "x" * (MAX_CHARS + 1)}, "'prediction.content' must have"),
        ({"type": "content", "content": [{}] * (MAX_PARTS + 1)}, "'prediction.content' must have"),
    ],
)
def test_other_values_are_refused(prediction: Any, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(prediction)
    assert str(refused.value).startswith(message)


def test_tokens_are_cut_at_the_context_and_control_tokens_are_text() -> None:
    tokenizer = chatml_tokenizer()
    text = "<|im_start|>abc"
    tokens = predicted_tokens(text, tokenizer, 1000)
    assert tokenizer.detokenize(tokens).decode() == text
    assert tokenizer.special_tokens()["<|im_start|>"] not in tokens
    assert predicted_tokens(text, tokenizer, 4) == tokens[:4]

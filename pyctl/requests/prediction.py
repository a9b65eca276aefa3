"""The field ``prediction``: the text that a client expects as the reply."""

from __future__ import annotations

from typing import Any

from pyctl.chat.tokenizer import Tokenizer
from pyctl.errors import RequestError
from pyctl.requests.body_reader import at_most, items, json_object
from pyctl.settings.limit import limit

__all__ = ["predicted_tokens", "read_prediction"]

MAX_CHARS = limit(2**20, "`prediction`, all parts together", "400", "request", "characters")
MAX_PARTS = limit(1024, "`prediction.content`, parts of the text", "400", "request")


def read_prediction(value: Any, name: str) -> str:
    """Return the text of OpenAI's predicted output, ``{"type": "content", "content": ...}``, whose
    content is a string or a list of text parts. Raises RequestError.
    """
    prediction = json_object(value, name)
    kind = prediction.get("type")
    if kind != "content":
        raise RequestError(f"'{name}.type' must be \"content\", not: {str(kind)[:40]}")
    content = prediction.get("content")
    path = f"{name}.content"
    if content is None:
        raise RequestError(f"'{path}' is required")
    if not isinstance(content, str):
        content = _joined_parts(content, path)
    at_most(MAX_CHARS, len(content), path, "characters")
    return content


def _joined_parts(value: Any, name: str) -> str:
    parts = items(value, name)
    at_most(MAX_PARTS, len(parts), name, "parts")
    texts = []
    for index, part in enumerate(parts):
        where = f"{name}[{index}]"
        fields = json_object(part, where)
        text = fields.get("text")
        if fields.get("type") != "text" or not isinstance(text, str):
            raise RequestError(f"'{where}' must be a part of type \"text\" with a text")
        texts.append(text)
    return "".join(texts)


def predicted_tokens(text: str, tokenizer: Tokenizer, n_ctx: int) -> tuple[int, ...]:
    """Return the tokens of a prediction, at most as many as a context of ``n_ctx`` holds.

    The text of a control token is ordinary text, since no reply shows such a token.
    """
    tokens = tokenizer.tokenize(text, parse_special=False)
    return tuple(tokens[:n_ctx])

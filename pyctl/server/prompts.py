"""The ``prompt`` field in all its shapes: text, token ids, both mixed, and lists of these."""

from __future__ import annotations

from typing import Any

from pyctl.chat.format import ChatFormat
from pyctl.errors import RequestError
from pyctl.prompt import Prompt

__all__ = ["mixed", "prompts_of"]


def prompts_of(value: Any, chat: ChatFormat, n_vocab: int) -> list[tuple[Prompt, str | None]]:
    """One prompt per text or sequence, with the text if it was one; a list that holds a token id is one sequence.

    Raises RequestError.
    """
    if value is None:
        raise RequestError("'prompt' is missing")
    if isinstance(value, list) and not any(_is_token(item) for item in value):
        prompts = [_prompt(item, chat, n_vocab) for item in value]
    else:
        prompts = [_prompt(value, chat, n_vocab)]
    if not prompts:
        raise RequestError("'prompt' is empty")
    return prompts


def mixed(value: Any, name: str, n_vocab: int) -> list[str | int]:
    """A text, or a list of texts and token ids, as such a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError(f"'{name}' must be a string or a list of strings and token ids")
    for item in value:
        if not isinstance(item, str) and not (_is_token(item) and 0 <= item < n_vocab):
            raise RequestError(f"'{name}' must hold strings and token ids in [0, {n_vocab}) only")
    return value


def _prompt(value: Any, chat: ChatFormat, n_vocab: int) -> tuple[Prompt, str | None]:
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            raise RequestError("prompts with images or sound are not supported")
        value = value.get("prompt_string")
    if isinstance(value, str):
        return chat.prompt_from_text(value), value
    return chat.prompt_from_mixed(mixed(value, "prompt", n_vocab)), None


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

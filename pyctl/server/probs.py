"""Token probabilities as llama-server writes them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from pyctl.chat.tokenizer import Tokenizer

__all__ = ["TokenProbs", "probs_json"]

TokenProbs = tuple[tuple[int, float], ...]
"""(id, logprob or probability) of the sampled token, then of the most likely ones."""

_LOWEST = -3.4028234663852886e38
"""Stands for minus infinity, which JSON does not have: the lowest float32."""


def probs_json(probs: Iterable[TokenProbs], tokenizer: Tokenizer, after_sampling: bool = False) -> list[dict[str, Any]]:
    """One object per token, with ``top_logprobs`` inside; ``after_sampling``, with ``prob`` and ``top_probs``."""
    name, top = ("prob", "top_probs") if after_sampling else ("logprob", "top_logprobs")
    return [
        {
            **_entry(token[0], tokenizer, name),
            top: [_entry(candidate, tokenizer, name) for candidate in token[1:]],
        }
        for token in probs
    ]


def _entry(candidate: tuple[int, float], tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    token, value = candidate
    piece = tokenizer.piece(token, special=False)
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(piece)  # without half a character at the end
    return {"id": token, "token": text, "bytes": list(piece), name: max(value, _LOWEST)}

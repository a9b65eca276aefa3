"""Token probabilities as llama-server writes them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from pyctl.chat.tokenizer import Tokenizer

__all__ = ["TokenProbs", "probs_json"]

TokenProbs = tuple[tuple[int, float], ...]
"""(id, logprob) of the sampled token, then of the most likely ones."""

_LOWEST = -3.4028234663852886e38
"""Stands for minus infinity, which JSON does not have: the lowest float32."""


def probs_json(probs: Iterable[TokenProbs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One object per token, with ``top_logprobs`` inside."""
    return [
        {
            **_entry(token[0], tokenizer),
            "top_logprobs": [_entry(candidate, tokenizer) for candidate in token[1:]],
        }
        for token in probs
    ]


def _entry(candidate: tuple[int, float], tokenizer: Tokenizer) -> dict[str, Any]:
    token, logprob = candidate
    piece = tokenizer.piece(token, special=False)
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(piece)  # without half a character at the end
    return {"id": token, "token": text, "bytes": list(piece), "logprob": max(logprob, _LOWEST)}

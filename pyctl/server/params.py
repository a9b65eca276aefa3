"""The sampling parameters that /slots and /props show, with every key that llama-server has there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["params_json"]

_KEYS: Mapping[str, Any] = {
    **dict.fromkeys(("seed", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p")),
    **dict.fromkeys(("top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p", "repeat_last_n")),
    **dict.fromkeys(("repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base")),
    **dict.fromkeys(("dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta")),
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    **dict.fromkeys(("max_tokens", "n_predict")),
    "n_keep": 0,
    "n_discard": 0,
    **dict.fromkeys(("ignore_eos", "stream", "n_probs", "min_keep")),
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "samplers": None,
    "speculative.types": "none",
    "timings_per_token": False,
    "post_sampling_probs": False,
    "backend_sampling": False,
    "lora": [],
}
"""In llama-server's order, with the value of what does not exist here."""


def params_json(settings: Mapping[str, Any], reasoning_format: str, *, full: bool = False) -> dict[str, Any]:
    """``settings`` of a request in that order; with ``full`` also what may be long, such as a grammar."""
    shown = {key: settings.get(key, default) for key, default in _KEYS.items()}
    shown["reasoning_format"] = settings.get("reasoning_format", reasoning_format)
    return {**settings, **shown} if full else shown

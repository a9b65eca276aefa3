"""The settings that a reply was made with, as llama-server's ``generation_settings``."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from pyctl.engine.request import Request
from pyctl.server.options import Options

__all__ = ["settings_json", "without_long"]

_FLOATS = (
    "temperature",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_p",
    "min_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "typical_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "mirostat_tau",
    "mirostat_eta",
    "adaptive_target",
    "adaptive_decay",
)
_PLAIN = (
    "seed",
    "top_k",
    "repeat_last_n",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "mirostat",
    "ignore_eos",
    "min_keep",
    "grammar",
    "grammar_lazy",
    "samplers",
    "post_sampling_probs",
)
_LONG = frozenset(
    ("stop", "logit_bias", "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens", "dry_sequence_breakers")
)


def settings_json(request: Request, options: Options, generation_prompt: str | None = None) -> dict[str, Any]:
    """All settings; ``generation_prompt`` is what a chat's prompt holds of the reply, None without a chat."""
    sampling = request.sampling
    form = "deepseek" if options.reasoning_format == "auto" else options.reasoning_format
    return {
        **{name: getattr(sampling, name) for name in _PLAIN},
        **{name: ctypes.c_float(getattr(sampling, name)).value for name in _FLOATS},  # llama-server has no doubles
        "stop": request.stop,
        "max_tokens": request.max_tokens,
        "n_predict": request.max_tokens,
        "n_keep": options.n_keep,
        "n_discard": options.n_discard,
        "stream": options.stream,
        "logit_bias": [{"bias": bias, "token": token} for token, bias in sampling.logit_bias],
        "n_probs": request.n_probs,
        "grammar_triggers": [{"type": 2, "value": pattern} for pattern in sampling.grammar_triggers],
        "preserved_tokens": [],
        "chat_format": "Content-only" if generation_prompt is None else "peg-native",
        "reasoning_format": form,
        "reasoning_in_content": options.stream and form == "deepseek-legacy",
        "generation_prompt": generation_prompt or "",
        "speculative.types": "none",
        "timings_per_token": options.timings_per_token,
        "backend_sampling": options.backend_sampling,
        "lora": [{"id": number, "scale": scale} for number, scale in options.lora],
        "cache_prompt": request.cache_prompt,
    }


def without_long(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What /props and /slots show of the ``settings``: all but what may be long."""
    return {key: value for key, value in settings.items() if key not in _LONG}

"""Sampling parameters of a request body, in all the forms that llama-server takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pyctl.chat.cached_tokenizer import Tokenizer
from pyctl.engine.sampling import RANDOM_SEED, SAMPLERS, Sampling
from pyctl.errors import RequestError
from pyctl.server.body import Fields

__all__ = ["sampling_of"]

_INFINITY = float("inf")

_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, _INFINITY),
    "dynatemp_range": (-_INFINITY, _INFINITY),
    "dynatemp_exponent": (-_INFINITY, _INFINITY),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_n_sigma": (-_INFINITY, _INFINITY),
    "typical_p": (-_INFINITY, _INFINITY),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "repeat_penalty": (-_INFINITY, _INFINITY),
    "presence_penalty": (-_INFINITY, _INFINITY),
    "frequency_penalty": (-_INFINITY, _INFINITY),
    "dry_multiplier": (-_INFINITY, _INFINITY),
    "dry_base": (-_INFINITY, _INFINITY),
    "mirostat_tau": (-_INFINITY, _INFINITY),
    "mirostat_eta": (-_INFINITY, _INFINITY),
    "adaptive_target": (-_INFINITY, 1.0),
}
"""Values beyond these ends are cut to them, as llama-server does."""

_CUT_INTEGERS = {"top_k": (0, 2**31 - 1), "mirostat": (0, 2)}

_INTEGERS = {"repeat_last_n": -1, "dry_allowed_length": 0, "dry_penalty_last_n": -1, "min_keep": 0}
"""The least value; below it the request is refused."""

_SAMPLER_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "i": "infill",
    "a": "adaptive_p",
}

_SAMPLER_NAMES = {
    **{name.replace("_", dash): name for name in SAMPLERS for dash in ("_", "-", "")},
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
}


def sampling_of(fields: Fields, defaults: Sampling, tokenizer: Tokenizer, n_vocab: int) -> Sampling:
    """The sampling that ``fields`` ask for; what they leave out is as in ``defaults``. Raises RequestError."""
    changes: dict[str, Any] = {
        name: fields.number(name, getattr(defaults, name), low, high)
        for name, (low, high) in _NUMBERS.items()
        if name in fields
    }
    changes |= {
        name: int(fields.number(name, getattr(defaults, name), low, high))
        for name, (low, high) in _CUT_INTEGERS.items()
        if name in fields
    }
    changes |= {
        name: fields.integer(name, default=getattr(defaults, name), low=low)
        for name, low in _INTEGERS.items()
        if name in fields
    }
    if changes.get("dry_base", 1.0) < 1.0:
        del changes["dry_base"]
    if "seed" in fields:
        changes["seed"] = int(fields.number("seed", 0)) & RANDOM_SEED  # -1 is random; wider numbers lose bits
    for name in ("ignore_eos", "post_sampling_probs"):
        if name in fields:
            changes[name] = fields.boolean(name, False)
    if "adaptive_decay" in fields:
        changes["adaptive_decay"] = decay = fields.number("adaptive_decay", 0.0)
        if not 0.0 <= decay <= 0.99:
            raise RequestError(f"'adaptive_decay' must be in [0, 0.99], not {decay}")
    if "dry_sequence_breakers" in fields:
        breakers = fields.get("dry_sequence_breakers")
        if not isinstance(breakers, list) or not breakers or not all(isinstance(item, str) for item in breakers):
            raise RequestError("'dry_sequence_breakers' must be a list of strings with at least one")
        changes["dry_sequence_breakers"] = tuple(breakers)
    if "samplers" in fields:
        changes["samplers"] = tuple(_samplers(fields.get("samplers"), defaults.samplers))
    if "logit_bias" in fields:
        changes["logit_bias"] = tuple(_logit_bias(fields.get("logit_bias"), tokenizer, n_vocab))
    return replace(defaults, **changes)


def _samplers(value: Any, default: tuple[str, ...]) -> Iterable[str]:
    """Names, in any spelling, or one letter per sampler; what is unknown is left out, another type means nothing."""
    if isinstance(value, str):
        return [_SAMPLER_LETTERS[letter] for letter in value if letter in _SAMPLER_LETTERS]
    if not isinstance(value, list):
        return default
    if not all(isinstance(item, str) for item in value):
        raise RequestError("'samplers' must be a list of names or a string of letters")
    return [_SAMPLER_NAMES[name.lower()] for name in value if name.lower() in _SAMPLER_NAMES]


def _logit_bias(value: Any, tokenizer: Tokenizer, n_vocab: int) -> Iterable[tuple[int, float]]:
    """``[[token or text, bias or false], ...]`` or ``{token or text: bias or false}``.

    A text stands for each of its tokens, false for never. What makes no sense is left out.
    """
    if isinstance(value, dict):
        pairs = [(int(key) if _is_integer(key) else key, bias) for key, bias in value.items()]
    elif isinstance(value, list):
        pairs = [(pair[0], pair[1]) for pair in value if isinstance(pair, list) and len(pair) == 2]
    else:
        return
    for token, bias in pairs:
        if bias is False:
            bias = -_INFINITY
        elif isinstance(bias, bool) or not isinstance(bias, int | float):
            continue
        if isinstance(token, str):
            for part in tokenizer.tokenize(token, add_special=False, parse_special=False):
                yield part, float(bias)
        elif isinstance(token, int) and not isinstance(token, bool) and 0 <= token < n_vocab:
            yield token, float(bias)


def _is_integer(text: str) -> bool:
    return text.strip().lstrip("+-").isdecimal() and text.strip().isascii()

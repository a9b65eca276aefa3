"""Sampling parameters of one request, under llama-server's names and defaults."""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeVar

from pyctl.errors import RequestError

__all__ = [
    "DEFAULT_SAMPLERS",
    "RANDOM_SEED",
    "SAMPLERS",
    "SAMPLER_LETTERS",
    "Range",
    "Sampling",
    "range_of",
    "sampler_named",
]

RANDOM_SEED = 0xFFFFFFFF
"""The seed value that asks for a fresh random seed."""

DEFAULT_SAMPLERS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
"""Order in which llama-server applies its samplers unless a request says otherwise."""

SAMPLERS = (*DEFAULT_SAMPLERS, "infill", "adaptive_p")
"""All that a request may name. Wherever ``adaptive_p`` stands, it comes last and chooses the token."""

SAMPLER_LETTERS = dict(zip("edskypmxtia", SAMPLERS, strict=True))
"""llama-server's short names."""

_SAMPLER_ALIASES = {
    **{name.replace("_", ""): name for name in SAMPLERS},
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
}


def sampler_named(text: str) -> str | None:
    """The sampler that ``text`` means in any of llama-server's spellings; None for none."""
    return _SAMPLER_ALIASES.get(text.lower().replace("_", "").replace("-", ""))


T = TypeVar("T", int, float)


class Range(NamedTuple):
    """What a request may say; llama-server cuts other values to the nearer end, refuses them, or overhears them."""

    low: float
    high: float
    beyond: Literal["cut", "refuse", "ignore"]


def _cut(default: T, low: T | float = -math.inf, high: T | float = math.inf) -> T:
    return field(default=default, metadata={"range": Range(low, high, "cut")})


def _refuse(default: T, low: T, high: T) -> T:
    return field(default=default, metadata={"range": Range(low, high, "refuse")})


def _ignore(default: T, low: T) -> T:
    return field(default=default, metadata={"range": Range(low, math.inf, "ignore")})


def range_of(item: Field[Any]) -> Range | None:
    """The range of a field of `Sampling`; None for one that is no plain number."""
    found: Range | None = item.metadata.get("range")
    return found


_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Sampling()                    # llama-server's defaults: temperature 0.8, top-k 40, top-p 0.95, min-p 0.05
    Sampling(temperature=0.0)     # greedy
    Sampling(seed=7, top_k=20)

    ``logit_bias`` holds (token id, bias) pairs; -inf forbids a token. A ``grammar_lazy`` grammar binds nothing until
    the reply's text, special tokens included, holds a match of one of ``grammar_triggers`` (regular expressions); then
    it binds from the match's first group that took part, or from the match. Any other grammar has read
    ``grammar_prefill`` before the reply begins. ``post_sampling_probs`` asks for probabilities as they are after all
    samplers, not the model's own. A number's range is declared beside it and holds for requests; values that
    nothing can be made of raise RequestError.
    """

    seed: int = RANDOM_SEED
    temperature: float = _cut(0.8, 0.0)
    dynatemp_range: float = _cut(0.0)
    dynatemp_exponent: float = _cut(1.0)
    top_k: int = _cut(40, 0, _INT32_MAX)
    top_p: float = _cut(0.95, 0.0, 1.0)
    min_p: float = _cut(0.05, 0.0, 1.0)
    top_n_sigma: float = _cut(-1.0)
    typical_p: float = _cut(1.0)
    xtc_probability: float = _cut(0.0, 0.0, 1.0)
    xtc_threshold: float = _cut(0.1, 0.0, 1.0)
    repeat_last_n: int = _refuse(64, -1, _INT32_MAX)
    repeat_penalty: float = _cut(1.0)
    presence_penalty: float = _cut(0.0)
    frequency_penalty: float = _cut(0.0)
    dry_multiplier: float = _cut(0.0)
    dry_base: float = _ignore(1.75, 1.0)
    dry_allowed_length: int = _refuse(2, 0, _INT32_MAX)
    dry_penalty_last_n: int = _refuse(64, -1, _INT32_MAX)
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = _cut(0, 0, 2)
    mirostat_tau: float = _cut(5.0)
    mirostat_eta: float = _cut(0.1)
    min_keep: int = _refuse(0, 0, _INT32_MAX)
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    grammar_lazy: bool = False
    grammar_triggers: tuple[str, ...] = ()
    grammar_prefill: str = ""
    adaptive_target: float = _cut(-1.0, high=1.0)
    adaptive_decay: float = _refuse(0.9, 0, 0.99)
    post_sampling_probs: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            value: Any = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"{item.name} must be a finite number")
        if self.repeat_penalty <= 0.0:
            raise RequestError("repeat_penalty must be greater than 0")
        if self.mirostat not in (0, 1, 2):
            raise RequestError("mirostat must be 0, 1 or 2")
        if self.repeat_last_n < -1 or self.dry_penalty_last_n < -1:
            raise RequestError("repeat_last_n and dry_penalty_last_n must be at least -1")
        unknown = [name for name in self.samplers if name not in SAMPLERS]
        if unknown:
            raise RequestError(f"unknown sampler {unknown[0]!r}; known are {', '.join(SAMPLERS)}")
        if self.grammar_lazy and not self.grammar_triggers:
            raise RequestError("a lazy grammar needs a trigger")
        if not 0 <= self.seed <= RANDOM_SEED:
            raise RequestError("seed must be a 32-bit unsigned number, or -1 for a random one")

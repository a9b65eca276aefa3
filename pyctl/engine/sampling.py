"""Sampling parameters of one request, under llama-server's names and defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from pyctl.errors import RequestError

__all__ = ["DEFAULT_SAMPLERS", "RANDOM_SEED", "SAMPLERS", "Sampling"]

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
    samplers, not the model's own. Values out of range raise RequestError.
    """

    seed: int = RANDOM_SEED
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    min_keep: int = 0
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    grammar_lazy: bool = False
    grammar_triggers: tuple[str, ...] = ()
    grammar_prefill: str = ""
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
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

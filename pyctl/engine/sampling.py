"""Sampling parameters of one request, with llama-server's names and defaults."""

from __future__ import annotations

import math
import re
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeAlias

from pyctl.errors import RequestError
from pyctl.settings.convert import INT32_MAX, integer, number, tokens
from pyctl.settings.setting import SAMPLING, Flag

__all__ = [
    "DEFAULT_SAMPLERS",
    "RANDOM_SEED",
    "SAMPLERS",
    "SAMPLER_LETTERS",
    "GrammarKind",
    "Range",
    "Sampling",
    "field_range",
    "sampler_named",
]

RANDOM_SEED = 0xFFFFFFFF
"""The seed value that selects a random seed."""

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
"""llama-server's default order of samplers."""

SAMPLERS = (*DEFAULT_SAMPLERS, "infill", "adaptive_p")
"""All valid names of samplers. ``adaptive_p`` always runs last and chooses the token, wherever it
is named.
"""

SAMPLER_LETTERS = dict(zip("edskypmxtia", SAMPLERS, strict=True))
"""llama-server's one-letter names."""

_SAMPLER_ALIASES = {
    **{name.replace("_", ""): name for name in SAMPLERS},
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
}


def sampler_named(text: str) -> str | None:
    """Return the sampler for any of llama-server's spellings; None if unknown."""
    return _SAMPLER_ALIASES.get(text.lower().replace("_", "").replace("-", ""))


class Range(NamedTuple):
    """The valid range of a parameter, and llama-server's treatment of other values: clamp, refuse
    or ignore.
    """

    low: float
    high: float
    beyond: Literal["cut", "refuse", "ignore"]


def cut(low: float = -math.inf, high: float = math.inf) -> Range:
    """Return a range that clamps values, as llama-server does."""
    return Range(low, high, "cut")


def integer_range(low: float, high: float = INT32_MAX) -> Range:
    """Return a range of integers that refuses other values."""
    return Range(low, high, "refuse")


def ignore(low: float) -> Range:
    """Return a range that treats values below ``low`` as absent."""
    return Range(low, math.inf, "ignore")


def field_range(item: Field[Any]) -> Range | None:
    """Return the range of a field of `Sampling`; None for fields that are not numbers."""
    bounds: Range | None = item.metadata.get("range")
    return bounds


def by_names(text: str) -> tuple[str, ...]:
    """Parse names of samplers in any spelling, separated by semicolons."""
    given = (part.strip().lower() for part in text.split(";") if part.strip())
    return tuple(sampler_named(name) or name for name in given)


def by_letters(text: str) -> tuple[str, ...]:
    """Parse samplers as one letter each. Raises ValueError for an unknown letter."""
    if unknown := [letter for letter in text if letter not in SAMPLER_LETTERS]:
        raise ValueError(f"{unknown[0]!r} is not one of the letters {''.join(SAMPLER_LETTERS)}")
    return tuple(SAMPLER_LETTERS[letter] for letter in text)


def as_seed(text: str) -> int:
    """Parse a seed; -1 selects a random one."""
    value = int(integer(-1, RANDOM_SEED)(text))
    return RANDOM_SEED if value == -1 else value


def not_negative(text: str) -> float:
    """Parse a number; negative values become 0."""
    return max(float(number()(text)), 0.0)


def as_bias(text: str) -> tuple[tuple[int, float], ...]:
    """Parse ``ID+BIAS`` or ``ID-BIAS`` into one pair. Raises ValueError for other forms."""
    match = re.fullmatch(r"([0-9]+)([+-][0-9]*\.?[0-9]+|-inf)", text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form TOKEN_ID+BIAS or TOKEN_ID-BIAS")
    return (
        (int(integer(0)(match[1])), float(match[2] if match[2] == "-inf" else number()(match[2]))),
    )


def breaker(text: str) -> tuple[str, ...]:
    """Parse one sequence breaker and resolve its escapes; ``none`` returns no breaker."""
    escapes = {"n": "\n", "r": "\r", "t": "\t"}
    return (
        ()
        if text == "none"
        else (re.sub(r"\\([nrt'\"\\])", lambda m: escapes.get(m[1], m[1]), text),)
    )


GrammarKind: TypeAlias = Literal["gbnf", "llguidance"]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Sampling()                  # llama-server's: temperature 0.8, top-k 40, top-p 0.95, min-p 0.05
    Sampling(temperature=0.0)     # greedy
    Sampling(seed=7, top_k=20)

    ``logit_bias`` holds (token id, bias) pairs; -inf forbids a token. ``grammar`` has the syntax of
    ``grammar_kind``: llama.cpp's GBNF, or llguidance, never from a client because it may overflow
    the stack. A ``grammar_lazy`` grammar starts once the reply's text, special tokens included,
    matches one of the regular expressions ``grammar_triggers``; it applies from the first group
    that matched, else from the match. Text within ``grammar_hidden`` (an opening, empty if the
    prompt ends with it, and a closing) at the start of the reply cannot trigger it. Other grammars
    consume ``grammar_prefill`` first. ``post_sampling_probs`` selects probabilities after all
    samplers, not the model's own. Each number declares its range for requests. Invalid values raise
    RequestError.
    """

    seed: int = SAMPLING.flag(
        RANDOM_SEED, "-s --seed", "-1 = random", as_seed, metavar="SEED", shown="-1"
    )
    temperature: float = SAMPLING.flag(
        0.8,
        "--temp --temperature",
        "temperature, 0 = always the most likely token",
        not_negative,
        "LLAMA_ARG_TEMPERATURE",
        range=cut(0.0),
    )
    dynatemp_range: float = SAMPLING.flag(
        0.0, "--dynatemp-range", "dynamic temperature, 0 = off", number(), range=cut()
    )
    dynatemp_exponent: float = SAMPLING.flag(
        1.0, "--dynatemp-exp", "exponent of the dynamic temperature", number(), range=cut()
    )
    top_k: int = SAMPLING.flag(
        40, "--top-k", "0 = off", integer(-1), "LLAMA_ARG_TOP_K", range=cut(0, INT32_MAX)
    )
    top_p: float = SAMPLING.flag(
        0.95, "--top-p", "1 = off", number(), "LLAMA_ARG_TOP_P", range=cut(0.0, 1.0)
    )
    min_p: float = SAMPLING.flag(
        0.05, "--min-p", "0 = off", number(), "LLAMA_ARG_MIN_P", range=cut(0.0, 1.0)
    )
    top_n_sigma: float = SAMPLING.flag(
        -1.0, "--top-nsigma --top-n-sigma", "-1 = off", number(), range=cut()
    )
    typical_p: float = SAMPLING.flag(1.0, "--typical --typical-p", "1 = off", number(), range=cut())
    xtc_probability: float = SAMPLING.flag(
        0.0, "--xtc-probability", "0 = off", number(), range=cut(0.0, 1.0)
    )
    xtc_threshold: float = SAMPLING.flag(
        0.1, "--xtc-threshold", "1 = off", number(), range=cut(0.0, 1.0)
    )
    repeat_last_n: int = SAMPLING.flag(
        64,
        "--repeat-last-n",
        "tokens that penalties scan, 0 = off",
        tokens(0),
        range=integer_range(-1),
    )
    repeat_penalty: float = SAMPLING.flag(
        1.0, "--repeat-penalty", "1 = off", number(), "LLAMA_ARG_REPEAT_PENALTY", range=cut()
    )
    presence_penalty: float = SAMPLING.flag(
        0.0, "--presence-penalty", "0 = off", number(), "LLAMA_ARG_PRESENCE_PENALTY", range=cut()
    )
    frequency_penalty: float = SAMPLING.flag(
        0.0, "--frequency-penalty", "0 = off", number(), "LLAMA_ARG_FREQUENCY_PENALTY", range=cut()
    )
    dry_multiplier: float = SAMPLING.flag(0.0, "--dry-multiplier", "0 = off", number(), range=cut())
    dry_base: float = SAMPLING.flag(
        1.75, "--dry-base", "DRY base, at least 1", number(1.0), range=ignore(1.0)
    )
    dry_allowed_length: int = SAMPLING.flag(
        2,
        "--dry-allowed-length",
        "longest repetition without a DRY penalty",
        integer(0),
        range=integer_range(0),
    )
    dry_penalty_last_n: int = SAMPLING.flag(
        64,
        "--dry-penalty-last-n",
        "tokens that DRY scans, 0 = off",
        tokens(0),
        range=integer_range(-1),
    )
    dry_sequence_breakers: tuple[str, ...] = SAMPLING.flag(
        ("\n", ":", '"', "*"),
        "--dry-sequence-breaker",
        "replace the DRY breakers, none = no breakers; may be repeated",
        breaker,
        metavar="TEXT",
        many=True,
    )
    mirostat: int = SAMPLING.flag(
        0, "--mirostat", "version of Mirostat, 1 or 2, 0 = off", integer(0, 2), range=cut(0, 2)
    )
    mirostat_tau: float = SAMPLING.flag(
        5.0, "--mirostat-ent", "target entropy", number(), range=cut()
    )
    mirostat_eta: float = SAMPLING.flag(
        0.1, "--mirostat-lr", "learning rate", number(), range=cut()
    )
    min_keep: int = field(default=0, metadata={"range": integer_range(0)})
    samplers: tuple[str, ...] = SAMPLING.flag(
        DEFAULT_SAMPLERS,
        "--samplers",
        "samplers in order, separated by ';'",
        by_names,
        metavar="NAMES",
        also=(
            Flag(
                "--sampler-seq --sampling-seq",
                "samplers in order, by letters",
                by_letters,
                metavar="LETTERS",
            ),
        ),
    )
    logit_bias: tuple[tuple[int, float], ...] = SAMPLING.flag(
        (),
        "-l --logit-bias",
        "add to a token's logit: 15043+1, 15043-1; may be repeated",
        as_bias,
        metavar="ID+BIAS",
        many=True,
    )
    ignore_eos: bool = SAMPLING.flag(False, "--ignore-eos", "continue after the end-of-text token")
    grammar: str = SAMPLING.flag(
        "", "--grammar", "GBNF that replies must follow", str, metavar="GBNF"
    )
    grammar_kind: GrammarKind = "gbnf"
    grammar_lazy: bool = False
    grammar_triggers: tuple[str, ...] = ()
    grammar_hidden: tuple[str, str] | None = None
    grammar_prefill: str = ""
    adaptive_target: float = SAMPLING.flag(
        -1.0,
        "--adaptive-target",
        "target probability of adaptive sampling, below 0 = off",
        number(high=1.0),
        range=cut(high=1.0),
    )
    adaptive_decay: float = SAMPLING.flag(
        0.9,
        "--adaptive-decay",
        "decay of adaptive sampling",
        number(0.0, 0.99),
        range=integer_range(0, 0.99),
    )
    post_sampling_probs: bool = False

    def __post_init__(self) -> None:
        """Raise RequestError for parameters that no sampler accepts."""
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

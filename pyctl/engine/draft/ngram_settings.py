"""Settings of the sources of drafts that look texts up: n-grams, and `cache`."""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.settings.convert import integer
from pyctl.settings.limit import limit
from pyctl.settings.setting import SPECULATION

__all__ = ["LONGEST", "NgramSettings"]

LONGEST = limit(128, "tokens of a draft from `cache`", "cut", "request")
"""Longer ones gain nothing in a rewriting: its edits end them
(docs/decisions/009-composed-drafts.md of 1323d1c8).
"""

_SIZE = integer(1, 1024)
_LENGTH = integer(0, 1024)


@dataclass(frozen=True)
class NgramSettings:
    """Settings of n-gram sources: ``size_n`` and ``match`` are matching tokens, ``size_m`` and
    ``max`` draft tokens.
    """

    simple_size_n: int = SPECULATION.flag(
        12, "--spec-ngram-simple-size-n", "ngram-simple: tokens looked up", _SIZE
    )
    simple_size_m: int = SPECULATION.flag(
        48, "--spec-ngram-simple-size-m", "ngram-simple: tokens of a draft", _SIZE
    )
    map_k_size_n: int = SPECULATION.flag(
        12, "--spec-ngram-map-k-size-n", "ngram-map-k: tokens looked up", _SIZE
    )
    map_k_size_m: int = SPECULATION.flag(
        48, "--spec-ngram-map-k-size-m", "ngram-map-k: tokens of a draft", _SIZE
    )
    map_k4v_size_n: int = SPECULATION.flag(
        12, "--spec-ngram-map-k4v-size-n", "ngram-map-k4v: tokens looked up", _SIZE
    )
    map_k4v_size_m: int = SPECULATION.flag(
        48, "--spec-ngram-map-k4v-size-m", "ngram-map-k4v: tokens of a draft", _SIZE
    )
    mod_match: int = SPECULATION.flag(
        24, "--spec-ngram-mod-n-match", "ngram-mod: tokens looked up", _SIZE
    )
    mod_max: int = SPECULATION.flag(
        64, "--spec-ngram-mod-n-max", "ngram-mod: maximum tokens per draft", _LENGTH
    )

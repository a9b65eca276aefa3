"""Placements of tensors: pairs of a regular expression over tensor names and a buffer type."""

from __future__ import annotations

import re

from pyctl.settings.convert import integer, words

__all__ = ["CPU_EXPERTS", "as_placements", "cpu_experts", "cpu_ffn", "experts_on_cpu"]

CPU_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Expert weights of any layer, as llama-server's --cpu-moe matches them."""

DENSE_FFN = r"\.ffn_(up|down|gate)\."


def experts_on_cpu(n_layers: int) -> tuple[tuple[str, str], ...]:
    """Return placements that keep the experts of the first ``n_layers`` layers on the CPU."""
    return tuple((rf"blk\.{layer}{CPU_EXPERTS}", "CPU") for layer in range(n_layers))


def as_placements(text: str) -> tuple[tuple[str, str], ...]:
    """Parse ``PATTERN=BUFFER,...``. Raises ValueError."""
    placements = []
    for part in words(text):
        pattern, equals, buffer = part.partition("=")
        if not (pattern and equals and buffer):
            raise ValueError(f"{part!r} is not of the form PATTERN=BUFFER")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        placements.append((pattern, buffer))
    return tuple(placements)


def cpu_experts(text: str) -> tuple[tuple[str, str], ...]:
    """Parse N, and return placements that keep the experts of the first N layers on the CPU."""
    return experts_on_cpu(integer(0, 10_000)(text))


def cpu_ffn(text: str) -> tuple[tuple[str, str], ...]:
    """Parse N, and return placements that keep the dense feed-forward weights of the first N layers
    on the CPU.
    """
    return tuple((rf"blk\.{layer}{DENSE_FFN}", "CPU") for layer in range(integer(0, 10_000)(text)))

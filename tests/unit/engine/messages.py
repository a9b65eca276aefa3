"""Prompts of messages for the fake backend."""

from __future__ import annotations

import numpy as np

from pyctl.prompt import Prompt

KINDS = ("hybrid", "attention", "opaque")


def chat(*messages: tuple[int, int]) -> Prompt:
    """Return a prompt of messages (seed, length), ended by a generation header of 4 tokens.

    Lengths in these tests leave 32 to 63 tokens in the last batch of 64, so that every boundary
    ends a batch.
    """
    parts = [
        np.random.default_rng(seed).integers(1, 60, length)
        for seed, length in (*messages, (999, 4))
    ]
    return Prompt.from_ids(np.concatenate(parts), np.cumsum([part.size for part in parts])[:-1])

"""NVIDIA's own program: links and memory of the cards."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

__all__ = ["CardState", "card_states", "used_bytes"]

# in MiB
FIELDS = (
    "name,pcie.link.width.current,pcie.link.width.max,"
    "pcie.link.gen.max,pcie.link.gen.gpumax,memory.used"
)

SECONDS = 20.0


class CardState(NamedTuple):
    """The program's answer for a card; None for fields that it lacks.

    ``lanes`` are PCIe lanes now, and the card's. ``generations`` are the best that slot and
    card reach together, and the card's; a card at rest runs below both. ``used`` is bytes.
    """

    name: str
    lanes: tuple[int | None, int | None] = (None, None)
    generations: tuple[int | None, int | None] = (None, None)
    used: int | None = None


def card_states(program: str = "nvidia-smi") -> tuple[CardState, ...] | None:
    """Return all cards of the machine, for any CUDA_VISIBLE_DEVICES; None if ``program`` does not
    answer.
    """
    command = [program, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=SECONDS
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    states = []
    for line in (line for line in text.splitlines() if line.count(",") >= 5):
        name, *words = (word.strip() for word in line.rsplit(",", 5))
        lanes, maximum, best, newest, used = (
            int(word) if word.isdecimal() else None for word in words
        )
        states.append(
            CardState(name, (lanes, maximum), (best, newest), used if used is None else used << 20)
        )
    return tuple(states)


def used_bytes() -> int | None:
    """Return the bytes in use on all cards, by all programs; None without a card."""
    used = [state.used for state in card_states() or () if state.used is not None]
    return sum(used) if used else None

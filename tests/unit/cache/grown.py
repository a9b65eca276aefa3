"""Snapshots of made-up conversations, for comparing indexes of them with a plain search."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

STEP = 10


SHAPES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 3), st.booleans()), min_size=1, max_size=40
)
"""For each snapshot: which earlier one it continues (0 for none), by how many steps, and whether
from its middle.
"""


@dataclass
class Held:
    """A snapshot of a plain search: its segments with the positions up to which they count, the
    deepest first.
    """

    n: int
    chain: dict[int, int]
    used: float = 0.0
    is_turn: bool = False
    seen: float = -1.0
    reach: int = 0
    opening: int = 0
    system: int = 0

    def stems_from(self, other: Held) -> bool:
        return other.n < self.n and self.chain.get(next(iter(other.chain)), 0) >= other.n

    def below(self, held: dict[int, Held]) -> int:
        return max((other.n for other in held.values() if self.stems_from(other)), default=0)


def grown(shapes: list[tuple[int, int, bool]]) -> list[Held]:
    found: list[Held] = []
    for segment, (stem, steps, middle) in enumerate(shapes):
        chain: dict[int, int] = {}
        start = 0
        if found and stem:
            parent = found[stem % len(found)]
            start = parent.n - STEP // 2 if middle else parent.n
            chain = {other: min(last, start) for other, last in parent.chain.items()}
        n = start + steps * STEP
        used = float(segment)
        found.append(Held(n, {segment: n, **chain}, used, False, used, n))
    return found

"""The share of a CUDA graph in the first steps of a width, and the reason for a new width."""

from __future__ import annotations

import pytest

from pyctl.engine.draft.expected_gain import StepWidth
from pyctl.engine.draft.step_widths import GRAPH_SHARES, StepWidths, WidthChange

PLAIN = StepWidth(4, 4)
WIDE = StepWidth(4, 12)


def test_the_second_step_of_a_width_captures_its_graph() -> None:
    widths = StepWidths()
    shares = []
    for width in (PLAIN, PLAIN, PLAIN, WIDE, PLAIN):
        widths.add(width, has_text=False)
        shares.append(widths.graph_share)
    first, second = GRAPH_SHARES
    assert shares == [first, second, 0.0, first, first]


@pytest.mark.parametrize(
    ("width", "has_text", "had_text", "reason"),
    [
        (StepWidth(3, 3), False, False, WidthChange.REPLIES),
        (StepWidth(3, 20), True, True, WidthChange.REPLIES),
        (WIDE, True, False, WidthChange.TEXTS),
        (WIDE, False, True, WidthChange.TEXTS),
        (WIDE, False, False, WidthChange.MODEL),
    ],
)
def test_a_change_has_a_reason(
    width: StepWidth, has_text: bool, had_text: bool, reason: WidthChange
) -> None:
    widths = StepWidths()
    widths.add(PLAIN, has_text=had_text)
    for _ in range(2):  # the reason holds while the width stays
        widths.add(width, has_text=has_text)
        assert widths.changed_by is reason

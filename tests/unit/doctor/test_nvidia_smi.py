from __future__ import annotations

from pathlib import Path

import pytest

from pyctl.doctor.nvidia_smi import CardState, card_states

CARD = "NVIDIA GeForce RTX 3090, 4, 16, 3, 4, 11\nodd, name, [N/A], 16, 4, [N/A], [N/A]"


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (
            f'echo "a warning\n{CARD}"',
            (
                CardState("NVIDIA GeForce RTX 3090", (4, 16), (3, 4), 11 << 20),
                CardState("odd, name", (None, 16), (4, None)),
            ),
        ),
        ("", ()),
        ("exit 9", None),
    ],
)
def test_cards_are_described(
    tmp_path: Path, script: str, found: tuple[CardState, ...] | None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert card_states(str(program)) == found
    assert card_states(str(tmp_path / "missing")) is None

"""The table of `pyctl bench`, and its judgement, from records alone."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.measure.bench_report import is_wrong, table_lines
from pyctl.measure.bench_run import AGAIN, COLD, FROM_DISK, FROM_RAM, NEXT, OURS, PEER

DEPTHS = (2048, 8192, 32768, 131072)

EXACT = {
    "kind": "exact",
    "mode": "by default",
    "what": "from disk",
    "cached": 1500,
    "difference": 0.0,
}


def records() -> list[dict[str, Any]]:
    """Return the records of a whole run: two servers, all depths, drafts, and one measure that was
    skipped.
    """
    found: list[dict[str, Any]] = []
    for server in (OURS, PEER):
        for way in (COLD, NEXT, AGAIN, *((FROM_RAM, FROM_DISK) if server == OURS else ())):
            found += [
                {
                    "kind": "first token",
                    "server": server,
                    "way": way,
                    "depth": depth,
                    "first_ms": depth / 3.0,
                    "source": {FROM_RAM: "ram", FROM_DISK: "disk"}.get(way, ""),
                }
                for depth in DEPTHS
            ]
        counts = {"drafted": 0, "accepted": 0}
        found += [
            {"kind": "prefill", "server": server, "depth": depth, "rate": 12345.6}
            for depth in DEPTHS
        ]
        found += [
            {"kind": "decode", "server": server, "depth": depth, "rate": 41.26, **counts}
            for depth in DEPTHS
        ]
        found.append({"kind": "memory", "server": server, "ram_mib": 1234.0, "vram_mib": 18_400.0})
    found.append({"kind": "drafts", "depth": 2048, "rate": 63.0, "drafted": 90, "accepted": 60})
    return [
        *found,
        EXACT,
        {"kind": "skipped", "what": "131,072 tokens", "why": "takes about 400 s, 90 s are left"},
    ]


def test_the_table_has_80_columns_and_every_figure() -> None:
    lines = list(table_lines(records(), ["pyctl 0.2.0"]))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    for part in (
        "43,691",
        "12,346",
        "41.3",
        "63.0 instead of 41.3",
        "60 of 90 drafts accepted",
        "from disk 0",
    ):
        assert part in text
    assert text.count(PEER) == 6  # cold, next turn, another chat, prefill, decode, memory


def test_a_restore_from_another_place_is_no_figure() -> None:
    found = [
        {**record, "source": "none"} if record.get("way") == FROM_DISK else record
        for record in records()
    ]
    (line,) = (line for line in table_lines(found, []) if FROM_DISK in line)
    assert line.split()[-4:] == ["missed"] * len(DEPTHS)


def test_a_head_that_drafted_nothing_has_one_figure() -> None:
    """A head that drafted nothing has the figure of the row of replies: its own is the same without
    drafts, and differs by the machine's noise alone.
    """
    drafts = {"kind": "drafts", "depth": 2048, "rate": 411.0, "drafted": 0, "accepted": 0}
    plain = {
        "kind": "decode",
        "server": OURS,
        "depth": 2048,
        "rate": 176.0,
        "drafted": 0,
        "accepted": 0,
    }
    for found in (
        [plain, drafts],
        [{**drafts, "rate": 176.0}],
        [{**plain, "rate": None}, {**drafts, "rate": 176.0}],
    ):
        (line,) = (line for line in table_lines(found, []) if line.startswith("drafts"))
        assert line == f"{'drafts of its head':24}176 tokens/s, no drafts"


def test_a_table_of_nothing_says_why() -> None:
    lines = list(
        table_lines([{"kind": "failed", "server": OURS, "why": "cannot load the model"}], ["head"])
    )
    assert lines == ["head", f"{'failed':24}pyctl: cannot load the model"]


@pytest.mark.parametrize(
    ("record", "is_so"),
    [
        ({"kind": "failed"}, True),
        (EXACT, False),
        ({**EXACT, "difference": 1e-6}, True),
        ({**EXACT, "difference": 1e-6, "what": "after its own reply"}, False),
        ({**EXACT, "difference": 1e-6, "what": "after its own reply", "mode": "--exact"}, True),
    ],
)
def test_a_broken_promise_is_wrong(record: dict[str, Any], is_so: bool) -> None:
    assert is_wrong([record]) is is_so

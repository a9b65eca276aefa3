"""The faults that `python -m tools.faults` plants have one place each, and the tests that catch them are there."""

from __future__ import annotations

import pytest

from tools.faults import ROOT
from tools.planted_faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place_and_tests(fault: Fault) -> None:
    assert (ROOT / fault.place).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.new != fault.old
    for test in fault.tests:
        file, _, name = test.partition("::")
        function = name.partition("[")[0]
        assert not name or f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")
    assert [each.name for each in FAULTS].count(fault.name) == 1

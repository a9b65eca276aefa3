"""The edits of planted faults apply to today's source."""

from __future__ import annotations

import pytest

from bench.simulate.planted import PLANTED, Edit, plant

EDITS = [
    pytest.param(edit, id=f"{name}-{edit.module}")
    for name, edits in PLANTED.items()
    for edit in edits
]


@pytest.mark.parametrize("edit", EDITS)
def test_each_edit_changes_one_place_of_its_module(edit: Edit) -> None:
    source = edit.path.read_text(encoding="utf-8")
    changed = edit.apply(source)
    assert changed != source
    compile(changed, str(edit.path), "exec")


def test_an_edit_of_text_that_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 0 times"):
        Edit("pyctl.errors", "old", "new").apply("")


def test_a_module_that_was_imported_cannot_be_edited() -> None:
    import pyctl.disk.segment_files  # noqa: F401

    with pytest.raises(RuntimeError, match="imported before"):
        plant("lost sync of a file")

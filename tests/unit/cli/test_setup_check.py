"""The check of built libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyctl.cli import setup_check


def test_the_check_runs_this_pyctl_in_any_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkout" / "pyctl").mkdir(parents=True)
    (tmp_path / "checkout" / "pyctl" / "__init__.py").write_text(
        "raise SystemExit('of the checkout')"
    )
    monkeypatch.chdir(tmp_path / "checkout")
    assert setup_check.output_of(tmp_path, "pyctl", "--version").startswith("pyctl ")

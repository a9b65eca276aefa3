"""Problems of a machine, each with the check that finds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyctl.doctor.examine import CHECKS, DoctorReport, examine
from tests.unit.doctor.machines import desktop

__all__ = ["Problem", "report_of"]


def report_of(
    check: str, root: Path, files: Mapping[str, str | None], **facts: Any
) -> DoctorReport:
    """Return the report of one check on a desktop with other ``files`` and ``facts``."""
    checks = [known for known in CHECKS if known.name == check]
    return examine(desktop(root, dict(files), **facts), checks)


@dataclass(frozen=True)
class Problem:
    """A problem: ``files`` and ``facts`` differ from a sound desktop, and the finding of ``check``
    has ``text`` and ``fix`` in it.
    """

    check: str
    text: str
    fix: str
    files: Mapping[str, str | None] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def check_finding(self, root: Path) -> None:
        """Check that there is this one finding, and that the machine is not sound."""
        report = report_of(self.check, root, self.files, **self.facts)
        (finding,) = report.findings
        assert finding.level in ("wrong", "slow")
        assert self.text in finding.text
        assert self.fix in finding.fix
        assert not report.is_sound

"""All checks in the order of their weight, and the screen with their findings."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pyctl.doctor import card_checks, storage_checks, system_checks
from pyctl.doctor.facts import Facts
from pyctl.doctor.finding import Finding, UnknownError
from pyctl.text import error_text, one_line

__all__ = ["CHECKS", "Check", "DoctorReport", "examine", "screen"]

WIDTH = 80
LEVEL = 9
NAME = 17

ABSENT = "does not apply"
"""The title of the checks of things that this machine does not have."""


@dataclass(frozen=True)
class Check:
    """A check, whose ``run_check`` returns findings, an empty list if all is fine, None if the
    check does not apply to this machine.

    It raises UnknownError if it finds no answer. ``is_quick`` checks take no more than some
    milliseconds together.
    """

    name: str
    run_check: Callable[[Facts], list[Finding] | None]
    is_quick: bool = False


CHECKS = (
    Check("llama.cpp", card_checks.libraries),
    Check("driver", card_checks.driver),
    Check("build", card_checks.build),
    Check("model", storage_checks.model_files),
    Check("chat template", storage_checks.chat_template),
    Check("memory plan", storage_checks.memory_plan),
    Check("overcommit", system_checks.overcommit, is_quick=True),
    Check("container", system_checks.container_memory, is_quick=True),
    Check("locked memory", system_checks.memory_lock, is_quick=True),
    Check("cache directory", storage_checks.cache_place, is_quick=True),
    Check("disk space", storage_checks.cache_space, is_quick=True),
    Check("pinned memory", card_checks.pinned),
    Check("PCIe link", card_checks.link),
    Check("model's disk", storage_checks.model_place, is_quick=True),
)
"""The checks, heaviest first."""


@dataclass(frozen=True)
class DoctorReport:
    """The result of the checks: ``findings`` with faults first, and the names of the checks that
    found nothing, and of those that do not apply.
    """

    findings: tuple[Finding, ...]
    fine: tuple[str, ...]
    absent: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """True if nothing is wrong or slow."""
        return all(finding.level == "unknown" for finding in self.findings)


def examine(facts: Facts, checks: Sequence[Check] = CHECKS) -> DoctorReport:
    """Make all ``checks``."""
    findings: list[Finding] = []
    fine = []
    absent = []
    for check in checks:
        try:
            found = check.run_check(facts)
        except (
            UnknownError,
            OSError,
            ValueError,
            LookupError,
        ) as error:  # no check may end a server
            found = [Finding("unknown", f"cannot be determined: {error_text(error)}")]
        if found is None:
            absent.append(check.name)
        elif not found:
            fine.append(check.name)
        findings += [replace(finding, check=check.name) for finding in found or ()]
    order = ("wrong", "slow", "unknown")
    return DoctorReport(
        tuple(sorted(findings, key=lambda each: order.index(each.level))),
        tuple(fine),
        tuple(absent),
    )


def screen(found: DoctorReport) -> Iterator[str]:
    """Yield lines of 80 columns: each finding with its fix, then the checks that found nothing."""
    for finding in found.findings:
        yield from _paragraph(
            f"{finding.level:{LEVEL}}{finding.check:{NAME}}", one_line(finding.text)
        )
        if finding.fix:
            yield from _paragraph(" " * (LEVEL + NAME) + "-> ", one_line(finding.fix))
    for title, names in (("fine", found.fine), (ABSENT, found.absent)):
        if names:
            yield from _paragraph(f"{title:{LEVEL - 2}}  ", ", ".join(names))


def _paragraph(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )

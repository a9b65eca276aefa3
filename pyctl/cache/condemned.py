"""Snapshots that a check found wrong, and all that shares rows with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TypeAlias

import msgspec

from pyctl.cache.snapshot import Prefix, Segment, Snapshot, StoredFileRef

__all__ = ["Condemned", "Report"]

Report: TypeAlias = Mapping[str, str | int | float]
"""The facts of a check that found a difference, for people."""


class Condemned(msgspec.Struct, frozen=True, dict=True):
    """The bytes that a check found wrong, or that it used and cannot clear.

    Attributes:
        prefixes: The prefixes of the snapshots whose bytes are in doubt.
        segments: The segments whose rows are in doubt, the deepest first.
        file: The name of a stored file whose checksum is wrong, empty for none. A copy in RAM is
            not in doubt for it.
        report: The facts of the check.
    """

    prefixes: tuple[Prefix, ...] = ()
    segments: tuple[Segment, ...] = ()
    file: str = ""
    report: Report = msgspec.field(default_factory=dict)

    @cached_property
    def file_names(self) -> frozenset[object]:
        """The names of the files of ``segments``, as far as they have one."""
        return frozenset(segment.file.name for segment in self.segments) - {None}

    @cached_property
    def _files(self) -> frozenset[StoredFileRef]:
        """The files of ``segments``: all copies of a segment share one."""
        return frozenset(segment.file for segment in self.segments)

    def has_rows_of(self, segments: Iterable[Segment]) -> bool:
        """Return whether any of ``segments`` is in doubt, is a copy of one that is, or was read
        from the same file.
        """
        return any(
            each.file in self._files or each.file.name in self.file_names for each in segments
        )

    def includes(self, snapshot: Snapshot) -> bool:
        """Return whether ``snapshot`` is in doubt, or shares rows that are."""
        return snapshot.prefix in self.prefixes or self.has_rows_of(snapshot.chain)

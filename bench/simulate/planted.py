"""Faults planted in the product, to show that the simulation finds faults of their kind.

A planted fault is an edit of the source of some modules, made while they are imported. The text
that it replaces has to occur exactly once, so an edit that no longer applies is an error.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Edit:
    """A change of the text of a module.

    Attributes:
        module: The name of the module.
        old: A text that occurs once in its source.
        new: The text in its place.
    """

    module: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """Return ``source`` with the change. Raises ValueError unless ``old`` occurs once."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.module} has {source.count(self.old)} times: {self.old}")
        return source.replace(self.old, self.new)

    @property
    def path(self) -> Path:
        """The file of the module."""
        return ROOT / f"{self.module.replace('.', '/')}.py"


_NO_SYNC = Edit("pyctl.disk.segment_files", "        os.fsync(descriptor)\n", "")

_LATE_SYNC = """        for record in writing.records.values():
            descriptor = os.open(self.folder.path / str(record.name), os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        sync_directory(self.folder.path)
        for segment"""

_SYNC_FOLDER = "        sync_directory(self.folder.path)\n        for segment"

PLANTED: Mapping[str, Sequence[Edit]] = {
    "rows off by one": [
        Edit(
            "pyctl.disk.chain",
            "PartKind.ROWS: segment.rows,",
            "PartKind.ROWS: np.append(segment.rows[:8], np.roll(segment.rows[8:], 8)),",
        )
    ],
    "state of another position": [
        Edit(
            "pyctl.cache.saver",
            "        state = self._memory.save_state(seq.id, seq.n)\n",
            "        state = self._memory.save_state(seq.id, seq.n)\n"
            "        if seq.n % 5 == 0:\n"
            "            state = self.__dict__.setdefault('_earlier', state)\n",
        )
    ],
    "lost sync of a file": [_NO_SYNC],
    "lost sync of a folder": [
        Edit("pyctl.disk.writer", _SYNC_FOLDER, "        for segment"),
    ],
    "rename before the sync": [
        _NO_SYNC,
        Edit("pyctl.disk.writer", _SYNC_FOLDER, _LATE_SYNC),
    ],
    "wrong key": [
        Edit(
            "pyctl.cache.snapshot",
            "before = link.start + common_prefix(link.tokens, self.tokens[link.start :])",
            "before = min(link.end, self.tokens.size)",
        )
    ],
    "truncated file accepted": [
        Edit(
            "pyctl.disk.segment_files",
            'if n == 0:\n                raise CorruptFileError(path.name, "ends too early")',
            "if n == 0:\n                return",
        ),
        Edit("pyctl.disk.file_format", "if total != file_size or not ", "if not "),
    ],
    "checksum ignored": [
        Edit("pyctl.disk.segment_files", "    if crc32(data) != crc:", "    if crc < 0:")
    ],
    "stale row of the index used": [
        Edit(
            "pyctl.disk.writer",
            "if record is None or not self.folder.has_file(current):",
            "if record is None:",
        ),
        Edit(
            "pyctl.disk.writer",
            "return key in graph.records and self.folder.has_file(key[1])",
            "return key in graph.records",
        ),
    ],
    "eviction of rows still needed": [
        Edit(
            "pyctl.cache.snapshot_index",
            "return snapshot not in self.pinned and snapshot not in self.locks",
            "return True",
        )
    ],
    "published before its rows are copied": [
        Edit(
            "pyctl.cache.write_back",
            "            self._memory.synchronize()  # the bytes of new snapshots may still be on "
            "their way\n",
            "",
        ),
        Edit(
            "pyctl.cache.write_back",
            "            self._memory.synchronize()\n            self._disk.supply_rows",
            "            self._disk.supply_rows",
        ),
        Edit(
            "pyctl.cache.device_copies",
            "        self._memory.synchronize()\n        return rows",
            "        return rows",
        ),
    ],
    "wrong fingerprint accepted": [
        Edit(
            "pyctl.disk.model_folder",
            "self.fingerprint = check_fingerprint(fingerprint)",
            'self.fingerprint = check_fingerprint(fingerprint.replace("-1-", "-0-"))',
        )
    ],
    "batches of a cold run ignored": [
        Edit(
            "pyctl.cache.candidates",
            "if self._exact and not (snapshot.exact and self.has_same_batches(snapshot)):",
            "if self._exact and n < 0:",
        ),
        Edit(
            "pyctl.cache.saver",
            "if self._exact and seq.n_exact != seq.n:",
            "if self._exact and seq.n < 0:",
        ),
    ],
}
"""The edits of each planted fault, by its name."""


class _PlantedLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from its edited source, past the compiled file."""

    edits: Sequence[Edit] = ()

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        for edit in self.edits:
            source = edit.apply(source)
        return compile(source, self.path, "exec")


class _PlantedFinder(importlib.abc.MetaPathFinder):
    """Finds the edited modules, before any other finder."""

    def __init__(self, edits: Sequence[Edit]) -> None:
        self._edits = edits

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        edits = [edit for edit in self._edits if edit.module == fullname]
        if not edits:
            return None
        file = str(edits[0].path)
        loader = _PlantedLoader(fullname, file)
        loader.edits = edits
        return importlib.machinery.ModuleSpec(fullname, loader, origin=file)


def plant(name: str) -> None:
    """Plant the fault called ``name`` in the modules that are imported from now on. Raises
    RuntimeError if one of them was imported before.
    """
    edits = PLANTED[name]
    early = [edit.module for edit in edits if edit.module in sys.modules]
    if early:
        raise RuntimeError(f"{early[0]} was imported before the fault was planted")
    sys.meta_path.insert(0, _PlantedFinder(edits))

"""The receipts of a cache directory, of the last day; docs/internals/disk-format.md has their
files.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec

from pyctl.errors import ReceiptError
from pyctl.files.atomic_file import files_in, is_abandoned, make_private, read_regular, write_atomic
from pyctl.receipts.receipt import Receipt
from pyctl.settings.limit import limit

__all__ = ["MAX_BYTES", "Clock", "ReceiptCounts", "ReceiptStore"]

KEPT_SECONDS = limit(86_400, "age of a receipt", "it is removed", "disk", "s")

MAX_RECEIPTS = limit(1000, "receipts of a cache directory", "the oldest are removed", "disk")

MAX_BYTES = limit(
    128 * 2**20, "receipts of a cache directory", "the oldest are removed", "disk", "bytes"
)

Clock: TypeAlias = Callable[[], float]
"""The seconds of UNIX time: `time.time`, or a fake clock in tests."""

KINDS = ("receipt", "equal", "differs")
"""The endings of file names: of receipts, and of the two results of a verification."""

_NAME = re.compile(rf"(\d{{16}})\.({'|'.join(KINDS)})")
"""An id of 16 digits lasts until 2286."""

_Files: TypeAlias = dict[str, dict[int, Path]]
"""Files by their kinds and the ids of their receipts."""


class ReceiptCounts(msgspec.Struct, frozen=True):
    """The receipts of a directory.

    Attributes:
        kept: The number of receipts.
        n_bytes: The bytes of their files.
        verified: The receipts that `pyctl verify` has evaluated again.
        differing: The receipts among them whose logits were not the same.
    """

    kept: int = 0
    n_bytes: int = 0
    verified: int = 0
    differing: int = 0


class ReceiptStore:
    """The receipts in ``directory``, which processes may share: a file for each, mode 0600.

    An empty file next to a receipt, ``ID.equal`` or ``ID.differs``, is the result of its last
    verification. Receipts older than a day are removed by the next write, and never listed.
    Thread-safe, as files are written whole or not at all.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_count: int = MAX_RECEIPTS,
        max_bytes: int = MAX_BYTES,
        clock: Clock = time.time,
    ) -> None:
        self.directory = directory
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._clock = clock

    def ids(self) -> list[int]:
        """Return the ids of the receipts of the last day, the oldest first."""
        return self._recent(self._list())

    def counts(self) -> ReceiptCounts:
        """Return the counts of the receipts of the last day."""
        files = self._list()
        ids = set(self._recent(files))
        equal = files["equal"].keys() & ids
        differing = files["differs"].keys() & ids
        return ReceiptCounts(
            kept=len(ids),
            n_bytes=sum(_size(files["receipt"][number]) for number in ids),
            verified=len(equal | differing),
            differing=len(differing),
        )

    def read(self, number: int) -> Receipt:
        """Return the receipt ``number``. Raises ReceiptError if it cannot be read."""
        try:
            data = read_regular(self._path(number), self._max_bytes)
        except OSError as error:
            raise ReceiptError(error.strerror or str(error)) from error
        receipt = Receipt.from_bytes(data)
        if receipt.id != number:
            raise ReceiptError(f"it is the receipt {receipt.id}")
        return receipt

    def write(self, receipt: Receipt) -> None:
        """Write ``receipt``, and remove others beyond the limits. Raises OSError."""
        if self.directory.is_symlink():
            raise OSError(f"{self.directory} is a link, which may lead to others' files")
        make_private(self.directory)
        # A power failure may cost the receipt: it is not worth a wait for the drive.
        write_atomic(self._path(receipt.id), receipt.to_bytes(), sync=False)
        self.prune()

    def mark(self, number: int, *, is_equal: bool) -> None:
        """Record the result of a verification. Raises OSError."""
        result = "equal" if is_equal else "differs"
        other = "differs" if is_equal else "equal"
        write_atomic(self._path(number, result), b"", sync=False)
        self._path(number, other).unlink(missing_ok=True)

    def prune(self) -> None:
        """Remove receipts beyond age, count and bytes, the oldest first, and the results without
        one.
        """
        files = self._list()
        kept = self._recent(files)[-self._max_count :]
        n_bytes = sum(_size(files["receipt"][number]) for number in kept)
        while kept and n_bytes > self._max_bytes:
            n_bytes -= _size(files["receipt"][kept.pop(0)])
        for paths in files.values():
            for number in paths.keys() - set(kept):
                with suppress(OSError):  # another process was faster
                    paths[number].unlink()
        for path in files_in(self.directory):
            is_abandoned(path, remove=True)

    def _path(self, number: int, kind: str = "receipt") -> Path:
        return self.directory / f"{number:016d}.{kind}"

    def _recent(self, files: _Files) -> list[int]:
        """Return the ids of the receipts among ``files`` that are of the last day, ascending."""
        oldest = (self._clock() - KEPT_SECONDS) * 1e6
        return sorted(number for number in files["receipt"] if number >= oldest)

    def _list(self) -> _Files:
        """Return the files of the directory."""
        files: _Files = {kind: {} for kind in KINDS}
        for path in files_in(self.directory):
            match = _NAME.fullmatch(path.name)
            if match is not None:
                files[match[2]][int(match[1])] = path
        return files


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:  # another process has removed it
        return 0

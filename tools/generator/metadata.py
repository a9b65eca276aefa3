"""Reads the metadata of a GGUF file (versions 2 and 3, little-endian).

`gguf.GGUFReader` makes an array of each string, which takes seconds for a large vocabulary; this takes a fraction of
one. The layout is that of the GGUF specification in ggml's docs/gguf.md.
"""

from __future__ import annotations

import struct
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGUFValueType

__all__ = ["read_metadata"]

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


def read_metadata(path: str | PathLike[str]) -> dict[str, Any]:
    """All key-value pairs, arrays as lists. Raises `ValueError` for a file that is not GGUF or is cut off."""
    with Path(path).open("rb") as file:
        cursor = _Cursor(file)
        try:
            magic, version, _, count = cursor.unpack("4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"{path} is not a GGUF file of version 2 or 3")
            return {cursor.string(): cursor.value(*cursor.unpack("I")) for _ in range(count)}
        except (EOFError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error


class _Cursor:
    """Values one after the other from the start of a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self._take(struct.calcsize(f"<{layout}")))

    def string(self) -> str:
        (length,) = self.unpack("Q")
        return self._take(length).decode()

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            element, count = self.unpack("IQ")
            if element in _SCALARS:
                return list(self.unpack(f"{count}{_SCALARS[element]}"))
            return [self.value(element) for _ in range(count)]
        if kind in _SCALARS:
            return self.unpack(_SCALARS[GGUFValueType(kind)])[0]
        raise ValueError(f"unknown type {kind} of a GGUF value")

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("it ends in the middle of its metadata")
        return data

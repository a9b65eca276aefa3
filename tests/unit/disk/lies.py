"""Cache files with arbitrary content and valid checksums."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pyctl.disk.file_format import _CHUNK, _FIELDS, _PART, _PRELUDE, MAGIC, _digest
from pyctl.disk.segment_files import read_header, read_jobs


@dataclass
class RawPart:
    """A part as numbers: anything goes that the fields can hold."""

    what: int
    codec: int
    phase: int
    chunk: int
    size: int
    pieces: list[bytes]
    stored: list[int] | None = None


@dataclass
class RawFile:
    """A cache file in numbers; `pack` makes bytes with right checksums of whatever they are."""

    kind: int
    flags: int
    start: int
    end: int
    created: float
    digest: bytes
    tag: bytes
    fingerprint: bytes
    parent: bytes
    parts: list[RawPart] = field(default_factory=list)
    n_parts: int | None = None

    @classmethod
    def read(cls, path: Path) -> RawFile:
        """Return the file at ``path`` in parts that a test can change and write again."""
        header = read_header(path)
        data = path.read_bytes()
        _, _, kind, flags, _, _ = _PRELUDE.unpack_from(data)
        start, end, created, digest, tag, n_fingerprint, n_parent, _ = _FIELDS.unpack_from(
            data, _PRELUDE.size
        )
        at = _PRELUDE.size + _FIELDS.size
        fingerprint = data[at : at + n_fingerprint]
        parent = data[at + n_fingerprint :][:n_parent]
        raw = cls(kind, flags, start, end, created, digest, tag, fingerprint, parent)
        outs = {part.kind: np.empty(part.size, np.uint8) for part in header.parts}
        for job in read_jobs(path, header, outs):
            job()
        for part in header.parts:
            raw.parts.append(
                RawPart(part.kind, 0, 0, part.chunk, part.size, [outs[part.kind].tobytes()])
            )
        return raw

    def pack(self) -> bytes:
        body = b"".join(piece for part in self.parts for piece in part.pieces)
        table = b""
        for part in self.parts:
            table += _PART.pack(part.what, part.codec, part.phase, part.chunk, part.size)
            stored = part.stored or [len(piece) for piece in part.pieces]
            for n, piece in zip(stored, part.pieces, strict=False):
                table += _CHUNK.pack(n % 2**32, zlib.crc32(piece))
        n_parts = len(self.parts) if self.n_parts is None else self.n_parts
        counts = len(self.fingerprint), len(self.parent), n_parts
        fields = _FIELDS.pack(self.start, self.end, self.created, self.digest, self.tag, *counts)
        rest = fields + self.fingerprint + self.parent + table
        size = _PRELUDE.size + len(rest) + 8
        head = _PRELUDE.pack(MAGIC, 1, self.kind, self.flags, size, size + len(body)) + rest
        return head + _digest(head) + body

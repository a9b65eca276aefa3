"""Files made by hand after docs/disk-format.md are adopted and read; the writer's files have the same bytes."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable

import numpy as np

from pyctl.cache.disk.file_format import parse
from pyctl.cache.disk.store import DiskStore
from tests.unit.cache.disk.making import check_directory, check_read, segment, snapshot

CREATED = 1_750_000_000.5


def digest(data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()


def file_bytes(
    kind: int, flags: int, start: int, end: int, names: tuple[bytes, bytes], needs: str, parts: list[tuple[int, bytes]]
) -> bytes:
    """A file with raw parts of one chunk each."""
    table, body = b"", b""
    for what, data in parts:
        table += struct.pack("<BBBIQ", what, 0, 0, 4_194_240, len(data))
        table += struct.pack("<II", len(data), zlib.crc32(data)) if data else b""
        body += data
    fields = struct.pack("<QQd", start, end, CREATED) + names[0] + names[1]
    fields += struct.pack("<HHH", len("model"), len(needs), len(parts)) + b"model" + needs.encode()
    size = 24 + len(fields) + len(table) + 8
    head = struct.pack("<8sHBBIQ", b"pyctlKV\0", 1, kind, flags, size, size + len(body)) + fields + table
    return head + digest(head, 8) + body


def test_files_made_by_hand(open_store: Callable[..., DiskStore]) -> None:
    store = open_store()
    made = snapshot(segment(range(100, 120)), 15)
    rows = made.segment
    tokens, ends = rows.tokens.astype("<i4").tobytes(), np.array(rows.ends, "<u4").tobytes()
    data = rows.rows.tobytes()
    tag = digest(b"\0" + ends + struct.pack("<QI", len(data), zlib.crc32(data)), 8)
    whole = digest(tokens, 16)
    files = {f"0-20-{whole.hex()}-{tag.hex()}.rows": b"", f"15-{made.prefix.digest.hex()}.state": b""}
    first, second = files
    files[first] = file_bytes(1, 0, 0, 20, (whole, tag), "", [(1, tokens), (2, ends), (3, data)])
    blob = [(4, made.state.recurrent.tobytes())]
    files[second] = file_bytes(2, 1, 0, 15, (made.prefix.digest, bytes(8)), first, blob)
    home = store.directory.path / "model"
    for name, content in files.items():
        assert parse(name) is not None
        (home / name).write_bytes(content)

    assert store.directory.recover().unknown == [f"model/{first}", f"model/{second}"]
    check_read(store, made)
    check_directory(store)
    assert [entry.created for entry in store.directory.entries()] == [CREATED]

    store.directory.prune(0)
    assert store.write(made) == sum(map(len, files.values()))
    at = 24 + 16
    for name, content in files.items():
        written = (home / name).read_bytes()
        assert written[:at] == content[:at]
        assert written[at + 8 : -len(blob[0][1])][:60] == content[at + 8 : -len(blob[0][1])][:60]

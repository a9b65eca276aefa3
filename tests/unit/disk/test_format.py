"""Files made by hand after docs/internals/disk-format.md are read; the writer's files have the same
bytes and names.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.disk.file_format import SegmentName, StateName, check_fingerprint, parse
from pyctl.files.atomic_file import temp_name, temp_pid
from tests.unit.disk.making import DirectStore, check_directory, check_read, segment, snapshot

CREATED = 1_750_000_000.5


def digest(data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()


def file_bytes(
    kind: int,
    flags: int,
    start: int,
    end: int,
    names: tuple[bytes, bytes],
    needs: str,
    parts: list[tuple[int, bytes]],
) -> bytes:
    """Return a file with raw parts of one chunk each."""
    table = b""
    body = b""
    for what, data in parts:
        table += struct.pack("<BBBIQ", what, 0, 0, 4_194_240, len(data))
        table += struct.pack("<II", len(data), zlib.crc32(data)) if data else b""
        body += data
    fields = struct.pack("<QQd", start, end, CREATED) + names[0] + names[1]
    fields += struct.pack("<HHH", len("model"), len(needs), len(parts)) + b"model" + needs.encode()
    size = 24 + len(fields) + len(table) + 8
    head = (
        struct.pack("<8sHBBIQ", b"pyctlKV\0", 1, kind, flags, size, size + len(body))
        + fields
        + table
    )
    return head + digest(head, 8) + body


def test_files_made_by_hand(open_store: Callable[..., DirectStore]) -> None:
    store = open_store()
    made = snapshot(segment(range(100, 120)), 15)
    rows = made.segment
    tokens = rows.tokens.astype("<i4").tobytes()
    ends = np.array(rows.ends, "<u4").tobytes()
    data = rows.rows.tobytes()
    tag = digest(b"\0" + ends + struct.pack("<QI", len(data), zlib.crc32(data)), 8)
    whole = digest(tokens, 16)
    files = {
        f"0-20-{whole.hex()}-{tag.hex()}.rows": b"",
        f"15-{made.prefix.digest.hex()}.state": b"",
    }
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


digests = st.binary(min_size=16, max_size=16)


@given(
    start=st.integers(0, 10**9),
    length=st.integers(1, 10**6),
    digest=digests,
    n=st.integers(1, 10**9),
)
def test_names_are_parsed_back_to_their_parts(
    start: int, length: int, digest: bytes, n: int
) -> None:
    for name in (SegmentName(start, start + length, digest, digest[:8]), StateName(n, digest)):
        assert parse(str(name)) == name
        assert temp_pid(str(name)) is None


@pytest.mark.parametrize(
    "file",
    [
        "index.sqlite3",
        "0-0-" + "0" * 32 + "-" + "0" * 16 + ".rows",
        "9-5-" + "0" * 32 + "-" + "0" * 16 + ".rows",
        "05-" + "0" * 32 + ".state",
        "0-" + "0" * 32 + ".state",
        "5-" + "0" * 32 + ".state\n",
        "5-" + "A" * 32 + ".state",
    ],
)
def test_other_names_are_foreign(file: str) -> None:
    assert parse(file) is None


def test_temp_names_say_whose_they_are() -> None:
    names = {temp_name() for _ in range(100)}
    assert len(names) == 100
    assert {temp_pid(name) for name in names} == {os.getpid()}
    assert all(parse(name) is None for name in names)
    assert temp_pid(".5-x.tmp") is None


def test_fingerprints_cannot_be_temp_or_index_names() -> None:
    assert check_fingerprint("qwen36-27b.Q4_K_M-0a1b") == "qwen36-27b.Q4_K_M-0a1b"
    with pytest.raises(ValueError, match="fingerprint"):
        check_fingerprint(temp_name())

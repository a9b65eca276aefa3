"""Files made by hand after docs/internals/disk-format.md are read; the writer's files have the same
bytes and names.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache import plan
from pyctl.cache.block_sizes import BlockSizes
from pyctl.disk.file_format import (
    CHUNK,
    MAX_TOKENS,
    CorruptFileError,
    Header,
    Part,
    PartKind,
    PromptName,
    SegmentName,
    StateName,
    check_fingerprint,
    check_sizes,
    header_size,
    is_obsolete,
    pack,
    parse,
    parse_sizes,
    rules_id,
    sizes_text,
    unpack,
)
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
    """Files that are packed here by docs/internals/disk-format.md are recovered and read, and the
    writer produces the same bytes. Reader and writer can therefore not agree on a wrong format.
    """
    store = open_store()
    made = snapshot(segment(range(100, 120)), 15)
    rows = made.segment
    tokens = rows.tokens.astype("<i4").tobytes()
    ends = np.array(rows.batch_ends, "<u4").tobytes()
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


# -- headers
# ----------------------------------------------------------------------------------

PARENT = SegmentName(0, 7, bytes(16), bytes(8))
STATE_NAME = StateName(7, bytes(range(16)))


@st.composite
def headers(draw: st.DrawFn) -> Header:
    """Return a header of a state or of a segment, with all checksums."""
    chunk = draw(st.integers(1, CHUNK))
    is_state = draw(st.booleans())
    if is_state:
        name: SegmentName | StateName = STATE_NAME
        sizes = {PartKind.STATE: draw(st.integers(0, 3 * chunk))}
        draft = PartKind.DRAFT_STATE
        parent = PARENT
    else:
        n = draw(st.integers(1, 50))
        name = SegmentName(7, 7 + n, draw(digests), draw(digests)[:8])
        n_ends = draw(st.integers(0, n))
        sizes = {PartKind.TOKENS: 4 * n, PartKind.ENDS: 4 * n_ends, PartKind.ROWS: 48 * n}
        draft = PartKind.DRAFT_ROWS
        parent = PARENT
    if draw(st.booleans()):
        sizes[draft] = draw(st.integers(1, 100))
    chunk = max(chunk, max(sizes.values()) // 20, 1)
    parts = [Part(kind, size, [], chunk) for kind, size in sizes.items()]
    for part in parts:
        part.crcs = draw(
            st.lists(
                st.integers(0, 2**32 - 1), min_size=len(part.chunks), max_size=len(part.chunks)
            )
        )
    return Header("model", name, parent, draw(st.booleans()), draw(st.floats(0, 2e9)), parts)


@given(headers())
def test_a_header_is_unpacked_to_what_was_packed(header: Header) -> None:
    data = pack(header)
    assert len(data) == header_size(header)
    file_size = header.offsets[-1]
    assert unpack(data + b"rest", str(header.name), file_size) == header
    assert unpack(data[:40], str(header.name), file_size) == len(data), "so many bytes are missing"


@given(headers(), st.data())
def test_no_byte_of_a_header_may_change(header: Header, data: st.DataObject) -> None:
    packed = bytearray(pack(header))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    try:
        found = unpack(bytes(packed), str(header.name), header.offsets[-1])
    except CorruptFileError:
        return
    assert isinstance(found, int), "its size may have changed, and then more of it is read"
    assert found > len(packed)


def header_of(**fields: Any) -> Header:
    parts = [Part(PartKind.STATE, 100, [1])]
    return replace(Header("model", STATE_NAME, PARENT, True, 1.0, parts), **fields)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (header_of(parent=None), "parent segment ends before"),
        (header_of(parent=SegmentName(7, 9, bytes(16), bytes(8))), "parent segment ends before"),
        (header_of(parts=[Part(PartKind.ROWS, 100, [1])]), "other parts"),
        (header_of(parts=[]), "other parts"),
        (header_of(created=-1.0), "wrong sizes"),
        (header_of(created=float("nan")), "wrong sizes"),
        (header_of(parts=[Part(PartKind.STATE, 100, [1], CHUNK + 1)]), "wrong sizes"),
        (header_of(name=StateName(MAX_TOKENS + 1, bytes(16))), "parent segment ends before"),
    ],
)
def test_a_header_whose_fields_contradict_each_other_is_damage(
    header: Header, message: str
) -> None:
    with pytest.raises(CorruptFileError, match=message):
        unpack(pack(header), str(header.name), header.offsets[-1])


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "shorter than a header"), (bytes(100), "another format")],
)
def test_other_files_have_no_header(data: bytes, message: str) -> None:
    with pytest.raises(CorruptFileError, match=message) as error:
        unpack(data, "a.state", len(data))
    assert error.value.file == "a.state"


def test_the_size_of_the_file_is_in_its_header() -> None:
    header = header_of()
    with pytest.raises(CorruptFileError, match=r"\d+ bytes instead of"):
        unpack(pack(header), str(header.name), header.offsets[-1] + 1)


def test_a_file_has_the_content_of_its_name() -> None:
    header = header_of()
    with pytest.raises(CorruptFileError, match="the content of 7-"):
        unpack(pack(header), "8-" + 32 * "0" + ".state", header.offsets[-1])


# -- parts and sizes
# ----------------------------------------------------------------------------------


@given(size=st.integers(0, 1000), chunk=st.integers(1, 300))
def test_chunks_cover_a_part(size: int, chunk: int) -> None:
    chunks = Part(PartKind.STATE, size, [], chunk).chunks
    covered = [at for first, last in chunks for at in range(first, last)]
    assert covered == list(range(size))
    assert all(last - first == chunk for first, last in chunks[:-1])


@given(base=st.integers(0, 10**9), row=st.integers(0, 10**9), state=st.integers(-1, 10**12))
def test_sizes_are_read_as_they_are_written(base: int, row: int, state: int) -> None:
    sizes = BlockSizes(base, row, state)
    assert parse_sizes(sizes_text(sizes)) == sizes


@pytest.mark.parametrize(
    "text", ["", "rows 1 + n * 2, state 3", "rows -1 + n * 2, state 3\n", "x\n"]
)
def test_other_sizes_are_unknown(text: str) -> None:
    assert parse_sizes(text) is None


@pytest.mark.parametrize(("state", "is_right"), [(100, True), (-1, True), (99, False)])
def test_a_state_has_the_size_of_the_models_states(state: int, is_right: bool) -> None:
    if is_right:
        check_sizes(header_of(), BlockSizes(0, 1, state))
        return
    with pytest.raises(CorruptFileError, match="100 bytes of state"):
        check_sizes(header_of(), BlockSizes(0, 1, state))


def test_rows_have_the_size_of_their_number() -> None:
    name = SegmentName(7, 17, bytes(16), bytes(8))
    header = header_of(name=name, parts=[Part(PartKind.ROWS, 64 + 480, [1])])
    check_sizes(header, BlockSizes(64, 48, 0))
    with pytest.raises(CorruptFileError, match="544 bytes of rows"):
        check_sizes(header, BlockSizes(0, 48, 0))


# -- other names
# ----------------------------------------------------------------------------------


def test_names_of_prompts_sort_by_age_and_differ_within_a_nanosecond() -> None:
    names = [PromptName.new(made) for made in (5, 2**63, 5)]
    texts = [str(name) for name in names]
    assert [PromptName.parse(text) for text in texts] == names
    assert max(texts) == texts[1]
    assert texts[0] != texts[2]
    assert PromptName.parse("x.prompt") is None


@pytest.mark.parametrize(
    ("file", "is_old"),
    [("recent", True), ("words.7.tmp", True), ("replies.7.tmp", True), ("replies", False)],
)
def test_files_of_older_versions(file: str, is_old: bool) -> None:
    assert is_obsolete(file) == is_old


def test_other_rules_of_batch_ends_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = rules_id()
    assert rules_id() == before
    monkeypatch.setattr(plan, "RULES", ("others",))
    assert rules_id() != before

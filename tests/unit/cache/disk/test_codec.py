"""Every codec of the format is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.disk.codec import CHUNK, Codec, Coding, chunks, decode
from pyctl.cache.disk.store import DiskStore
from tests.unit.cache.disk.lies import RawFile
from tests.unit.cache.disk.making import check_read, conversation, on_disk


def stored(coding: Coding, data: bytes) -> bytes:
    """A chunk as any version wrote it."""
    if coding.codec == Codec.RAW:
        return data
    if width := {Codec.PLANES2: 2, Codec.PLANES4: 4}.get(coding.codec):
        last = len(data) // width * width
        data = b"".join(data[i:last:width] for i in range(width)) + data[last:]
    elif coding.codec == Codec.BLOCKS34:
        first = min(coding.phase, len(data))
        last = first + (len(data) - first) // 34 * 34
        quants = b"".join(data[i + 2 : i + 34] for i in range(first, last, 34))
        data = quants + data[first:last:34] + data[first + 1 : last : 34] + data[:first] + data[last:]
    return zstandard.compress(data, 1)


@given(data=st.binary(max_size=300), codec=st.sampled_from(Codec), phase=st.integers(0, 33))
def test_all_codecs_are_read(data: bytes, codec: Codec, phase: int) -> None:
    coding = Coding(codec, phase if codec == Codec.BLOCKS34 else 0)
    out = np.full(len(data), 7, np.uint8)
    decode(coding, stored(coding, data), out)
    assert out.tobytes() == data


@pytest.mark.parametrize("codec", Codec)
def test_files_of_earlier_versions_are_read(open_store: Callable[..., DiskStore], codec: Codec) -> None:
    store, coding = open_store(), Coding(codec, 5 if codec == Codec.BLOCKS34 else 0)
    made = conversation(3)
    for each in made:
        store.write(each)
    for path in on_disk(store.directory.path):
        file = RawFile.read(path)
        for part in file.parts:
            (data,) = part.pieces
            part.codec, part.phase, part.chunk = coding.codec, coding.phase, 340
            part.pieces = [stored(coding, data[first:last]) for first, last in chunks(len(data), 340)]
        path.write_bytes(file.pack())
    for each in made:
        check_read(store, each)
    assert store.damaged == 0


@given(data=st.binary(max_size=200), codec=st.sampled_from(Codec))
def test_garbage_is_refused(data: bytes, codec: Codec) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode(Coding(codec), data, np.empty(1001, np.uint8))


def test_chunks_keep_every_phase() -> None:
    assert CHUNK % 34 == CHUNK % 4 == 0
    assert list(chunks(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(chunks(0)) == []

"""File names are parsed back to their parts, and every other name is refused."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.atomic_file import temp_name, temp_pid
from pyctl.cache.disk.file_format import SegmentName, StateName, check_fingerprint, parse

digests = st.binary(min_size=16, max_size=16)


@given(start=st.integers(0, 10**9), length=st.integers(1, 10**6), digest=digests, n=st.integers(1, 10**9))
def test_round_trip(start: int, length: int, digest: bytes, n: int) -> None:
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
def test_others_are_foreign(file: str) -> None:
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

"""Every codec decodes to its input, and the choice of a codec depends on the bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.disk.codec import CHUNK, RAW, Codec, Coding, choose, chunks, decode, encode, phase_of_blocks
from pyctl.cache.snapshot import Block


def bytes_of(values: np.ndarray) -> Block:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def q8_0_blocks(phase: int, n: int = 30_000) -> Block:
    random = np.random.default_rng(0)
    scales = random.normal(0.02, 0.004, (n, 1)).astype(np.float16).view(np.uint8)
    quants = random.normal(0, 40, (n, 32)).clip(-127, 127).astype(np.int8).view(np.uint8)
    return np.concatenate([np.zeros(phase, np.uint8), bytes_of(np.concatenate([scales, quants], axis=1))])


@given(data=st.binary(max_size=300), codec=st.sampled_from(Codec), phase=st.integers(0, 33))
def test_round_trip(data: bytes, codec: Codec, phase: int) -> None:
    chunk = np.frombuffer(data, np.uint8)
    coding = Coding(codec, phase if codec == Codec.BLOCKS34 else 0)
    out = np.full(chunk.size, 7, np.uint8)
    decode(coding, encode(coding, chunk), out)
    assert out.tobytes() == data


@given(data=st.binary(max_size=200), codec=st.sampled_from(Codec))
def test_garbage_is_refused(data: bytes, codec: Codec) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode(Coding(codec), data, np.empty(1001, np.uint8))


@pytest.mark.parametrize("phase", [0, 2, 13, 33])
def test_phase_of_blocks_is_found(phase: int) -> None:
    assert phase_of_blocks(q8_0_blocks(phase)) == phase


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyctl.cache.disk.codec.MIN_DECODE", 0.0)
    monkeypatch.setattr("pyctl.cache.disk.codec.MIN_SAVING", 0.07)
    random = np.random.default_rng(0)
    values = random.standard_normal(500_000)
    assert choose(bytes_of(values.astype(np.float16))).codec == Codec.PLANES2
    assert choose(bytes_of(values.astype(np.float32))).codec == Codec.PLANES4
    assert choose(q8_0_blocks(30)) == Coding(Codec.BLOCKS34, 30)
    assert choose(np.zeros(100_000, np.uint8)).codec == Codec.ZSTD
    assert choose(random.integers(0, 256, 100_000, dtype=np.uint8)) == RAW
    assert choose(np.zeros(100, np.uint8)) == RAW


def test_a_small_saving_is_not_worth_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyctl.cache.disk.codec.MIN_DECODE", 0.0)
    values = np.random.default_rng(0).standard_normal(500_000)
    for part in (bytes_of(values.astype(np.float16)), bytes_of(values.astype(np.float32)), q8_0_blocks(30)):
        assert choose(part) == RAW
    assert choose(np.repeat(np.arange(250, dtype=np.uint8), 1000)).codec == Codec.ZSTD


def test_too_slow_is_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyctl.cache.disk.codec.MIN_DECODE", 1e15)
    assert choose(np.zeros(100_000, np.uint8)) == RAW


def test_chunks_keep_every_phase() -> None:
    assert CHUNK % 34 == CHUNK % 4 == 0
    assert list(chunks(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(chunks(0)) == []

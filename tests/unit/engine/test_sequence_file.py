"""Slot files hold all of a sequence; what is damaged, or of another model, is refused before
anything is loaded.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from pyctl.cache.resume_points import NOWHERE
from pyctl.cache.sequence import LiveSequence
from pyctl.engine.sequence_file import SPAN, TAIL, load_file, save_file
from pyctl.errors import RequestError, StateError
from pyctl.prompt import as_tokens
from tests.fake import FakeBackend


def evaluated(n: int) -> tuple[FakeBackend, LiveSequence]:
    """Return a backend that has evaluated ``n`` tokens of the sequence."""
    backend = FakeBackend("hybrid", n_ctx=2 * SPAN, n_ubatch=2 * SPAN)
    seq = LiveSequence(0, 2 * SPAN)
    if n:
        backend.evaluate(0, as_tokens(range(n)), 0)
        seq.append(as_tokens(range(n)), exact=True)
    return backend, seq


@pytest.mark.parametrize("n", [0, 1, SPAN, SPAN + 25])
def test_a_sequence_comes_back_in_spans(tmp_path: Path, n: int) -> None:
    backend, seq = evaluated(n)
    assert (
        save_file(backend.memory, seq, seq.batch_ends, tmp_path / "a", "me")
        == (tmp_path / "a").stat().st_size
    )
    saved = load_file(tmp_path / "a", "me")
    assert saved.tokens.tolist() == seq.tokens.tolist()
    assert saved.batch_ends == tuple(seq.batch_ends)
    assert saved.n_bytes == (tmp_path / "a").stat().st_size
    other = FakeBackend("hybrid", n_ctx=2 * SPAN, n_ubatch=2 * SPAN)
    other.memory.restore(0, 0, saved.spans, saved.state)
    for each in (backend, other):
        each.evaluate(0, as_tokens([7]), n)
    assert other.output().tobytes() == backend.output().tobytes()


def test_damage_is_refused(tmp_path: Path) -> None:
    """A slot file that is cut, flipped at any byte, of another model or no regular file is refused
    before anything is loaded.
    """
    backend, seq = evaluated(40)
    path = tmp_path / "a"
    save_file(backend.memory, seq, seq.batch_ends, path, "me")
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    cuts = [whole[:at] for at in (0, 20, len(whole) - 1, *rng.integers(0, len(whole), 20).tolist())]
    flips = [
        whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
        for at in rng.integers(0, len(whole), 40).tolist()
    ]
    for data in (*cuts, *flips, bytes(500)):
        path.write_bytes(data)
        with pytest.raises(StateError, match="invalid slot save file"):
            load_file(path, "me")
    path.write_bytes(whole)
    with pytest.raises(StateError, match="another model"):
        load_file(path, "you")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StateError):
        load_file(tmp_path / "pipe", "me")


N = 40


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("n", N + 1),
        ("n", 2**32 - 1),
        ("n", 0),
        ("n_ends", 2**32 - 1),
        ("n_sizes", 3),
        ("n_sizes", 2**32 - 1),
        ("n_sizes", 0),
        ("size", -8),
        ("size", 2**62),
        ("end", N + 1),
        ("end", -1),
        ("token", -1),
    ],
)
def test_what_contradicts_itself_is_refused_with_a_right_digest(
    tmp_path: Path, changed: str, value: int
) -> None:
    """Counts, sizes, ends and tokens out of range are refused even if the digest is right: the
    digest finds damage, not a forged file.
    """
    backend, seq = evaluated(N)
    path = tmp_path / "a"
    save_file(backend.memory, seq, seq.batch_ends, path, "me")
    data = bytearray(path.read_bytes())
    tail = len(data) - TAIL.size
    counts = {"n": 16, "n_ends": 20, "n_sizes": 24}  # after the owner
    n_ends = len(seq.batch_ends)
    sizes = tail - 8 * 4
    if changed in counts:
        struct.pack_into("<I", data, tail + counts[changed], value)
    elif changed == "size":
        struct.pack_into("<q", data, sizes, value)
    else:
        struct.pack_into(
            "<i", data, sizes - 4 * (n_ends if changed == "end" else n_ends + N), value
        )
    data[-16:] = hashlib.blake2b(data[:-16], digest_size=16).digest()
    path.write_bytes(data)
    with pytest.raises(StateError, match="invalid slot save file"):
        load_file(path, "me")


def test_what_a_file_cannot_hold_leaves_none(tmp_path: Path) -> None:
    backend, seq = evaluated(40)
    with pytest.raises(RequestError, match="Invalid filename"):
        save_file(backend.memory, seq, (), tmp_path / ("a" * 256), "me")
    seq.reset(as_tokens([1, -5, -5]))
    with pytest.raises(StateError, match="holds an image"):
        save_file(backend.memory, seq, (), tmp_path / "a", "me")
    seq.reset(as_tokens(range(40)))
    backend.resume_points = NOWHERE
    with pytest.raises(StateError, match="same bits"):
        save_file(backend.memory, seq, (), tmp_path / "a", "me")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a" * 255, "ä" * 127 + "b"])
def test_names_may_have_255_bytes(tmp_path: Path, name: str) -> None:
    backend, seq = evaluated(3)
    assert (
        save_file(backend.memory, seq, (), tmp_path / name, "me")
        == (tmp_path / name).stat().st_size
    )

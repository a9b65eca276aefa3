"""Directories without locks, as on some network file systems: refused for a cache, and good enough
for a store.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.conftest import Server, pyctl
from tests.process.test_default_cache import at_home
from tests.process.test_remote_store import flags, store_of
from tests.process.test_restart import SYSTEM, user
from tests.waiting import until

Start = Callable[..., Server]

ASKED = [SYSTEM, user(1)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library that makes locks fail in a process that preloads it."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("library") / "without_locks.so"
    source = Path(__file__).with_name("without_locks.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(source), "-ldl"], check=True)
    return path


@pytest.fixture
def place(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory without locks, for processes that start now."""
    place = tmp_path / "network"
    place.mkdir()
    monkeypatch.setenv("WITHOUT_LOCKS_AT", str(place))
    monkeypatch.setenv("WITHOUT_LOCKS_CALLS", "flock fcntl")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    return place


@pytest.mark.parametrize("calls", ["flock", "fcntl", "flock fcntl"])
def test_a_cache_directory_without_locks_ends_the_start(
    calls: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is looked for, and without waiting for a lock."""
    monkeypatch.setenv("WITHOUT_LOCKS_CALLS", calls)
    flags = ["-m", str(place / "missing.gguf"), "--port", "0", "--kv-cache-dir", str(place / "kv")]
    done = pyctl("serve", *flags)
    line = f"pyctl: error: cannot use --kv-cache-dir {place}/kv: its file system has no locks\n"
    assert done.returncode == 2
    assert done.stderr == line
    assert list((place / "kv").iterdir()) == []


def test_a_home_without_locks_is_a_warning(place: Path, start: Start) -> None:
    server = start("tiny-hybrid", before=at_home(place))
    assert server.log().count("its file system has no locks") == 1
    assert server.chat(ASKED).source == "none"
    assert server.stop() == 0


def test_a_store_needs_no_locks(place: Path, start: Start, tmp_path: Path) -> None:
    """Each server has a cache directory of its own, and all have one directory as their store."""
    pytest.importorskip("obstore")
    url = f"file://{place}/shared"
    first = start("tiny-hybrid", *flags(tmp_path / "a", url))
    cold = first.chat(ASKED)
    until(lambda: store_of(first)["sent"]["n"], every=0.1)
    second = start("tiny-hybrid", *flags(tmp_path / "b", url))
    until(lambda: store_of(second)["in_use"], every=0.1)
    restored = second.chat(ASKED)
    assert restored.text == cold.text
    assert restored.source == "disk"
    found = second.client.get_json("/cache")["prefixes"][0]
    assert second.client.delete(f"/cache/{found['id']}").status_code == 200
    states = f"{found['id'].partition('-')[0]}-*.state"
    until(lambda: not list((place / "shared").rglob(states)))
    assert first.stop() == 0
    assert second.stop() == 0

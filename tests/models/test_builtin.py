from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pyctl.models import TINY_DENSE, builtin_model, byte_vocab, cached_model, read_vocab


def test_the_builtin_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = builtin_model()
    before = path.stat()
    assert path.parent == tmp_path / "pyctl"
    assert builtin_model() == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_without_a_cache_variable_it_is_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert builtin_model().parent == tmp_path / ".cache" / "pyctl"


def test_another_shape_or_seed_is_another_file(tmp_path: Path) -> None:
    paths = {cached_model(TINY_DENSE, tmp_path), cached_model(TINY_DENSE, tmp_path, seed=1)}
    assert len(paths) == 2


def test_threads_at_once_see_one_whole_file(tmp_path: Path) -> None:
    def read(_: int) -> tuple[Path, int]:
        path = cached_model(TINY_DENSE, tmp_path)
        return path, len(read_vocab(path))

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(read, range(16)))) == 1
    (path,) = tmp_path.iterdir()
    assert read_vocab(path) == byte_vocab()


def test_processes_at_once_see_one_whole_file(tmp_path: Path) -> None:
    code = "from pyctl.models import builtin_model; print(len(builtin_model().read_bytes()))"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = {process.communicate(timeout=60)[0] for process in processes}
    (path,) = (tmp_path / "pyctl").iterdir()
    assert outputs == {f"{path.stat().st_size}\n"}

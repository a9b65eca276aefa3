"""The cache directory of a model: opened once, closed if the load fails, and left out if full."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from pyctl.cache.cache_settings import DiskSettings
from pyctl.cli import load_model
from pyctl.cli.arguments import parse_serve
from pyctl.cli.assemble import assemble
from pyctl.cli.open_disk import open_directory
from pyctl.disk.directory import CacheDirectory
from pyctl.disk.index import Index
from pyctl.errors import ConfigError, ModelError

MIB = 2**20


def test_the_cache_directory_is_opened_once(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    flags = ["-m", str(model_path("tiny-hybrid")), "-c", "512", "-t", "1", "--cache-ram", "64"]
    with patch("pyctl.disk.directory.Index", wraps=Index) as opened:
        service = assemble(parse_serve([*flags, "--kv-cache-dir", str(tmp_path)], {}))
        service.worker.close()
    assert opened.call_count == 1


def test_the_cache_directory_is_closed_if_the_model_cannot_be_loaded(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    path = str(model_path("tiny-hybrid"))
    close = CacheDirectory.close
    with (
        patch.object(CacheDirectory, "close", autospec=True, side_effect=close) as closed,
        patch.object(load_model, "finish_load", side_effect=ModelError("no memory")),
        pytest.raises(ModelError, match="no memory"),
    ):
        assemble(parse_serve(["-m", path, "--kv-cache-dir", str(tmp_path / "cache")], {}))
    assert closed.call_count == 1


def test_a_directory_is_opened_with_its_budget(tmp_path: Path) -> None:
    assert open_directory(DiskSettings()) is None
    directory = open_directory(DiskSettings(cache_dir=str(tmp_path), disk_mib=3))
    assert directory is not None
    assert directory.path == tmp_path
    assert directory.budget == 3 * MIB
    directory.close()


def test_a_drive_that_is_full_by_now_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch("pyctl.disk.directory.make_private", side_effect=full):
        assert open_directory(DiskSettings(cache_dir=str(tmp_path))) is None
    (message,) = caplog.messages
    assert message == f"no disk cache: no space for {tmp_path}; the next start tries again"


def test_a_directory_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = DiskSettings(cache_dir=str(tmp_path / "file" / "kv"))
    with pytest.raises(ConfigError, match=r"^cannot use --kv-cache-dir .*file/kv: File exists$"):
        open_directory(settings)

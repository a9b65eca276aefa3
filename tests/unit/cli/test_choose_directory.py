"""The directory of the disk cache: its default, its budget, and directories that cannot be used."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.cache.cache_settings import DiskSettings
from pyctl.cli.arguments import CommandSettings, parse_serve
from pyctl.cli.choose_directory import log_cache_dir, with_directory
from pyctl.disk.directory import CacheDirectory
from pyctl.errors import ConfigError

MIB = 2**20
GIB = 2**30


def of_disk(
    settings: CommandSettings,
    free: int,
    open_directory: Callable[[Path], CacheDirectory] = CacheDirectory,
) -> DiskSettings:
    """Return the settings of the directory on a disk with so many ``free`` bytes."""
    return with_directory(settings, open_directory, lambda _: free).disk


def settings_of(*flags: str, home: Path) -> CommandSettings:
    return parse_serve(["-m", "m.gguf", *flags], {"XDG_CACHE_HOME": str(home)})


@pytest.mark.parametrize(
    ("free", "flags", "mib"),
    [
        (900 * GIB, (), 16_384),
        (50 * GIB, (), 5_120),
        (50 * GIB, ("--kv-cache-budget", "9000"), 9_000),
        (50 * GIB, ("--kv-cache-budget", "0"), 0),
    ],
)
def test_the_default_directory_takes_a_tenth_of_the_free_space(
    tmp_path: Path, free: int, flags: tuple[str, ...], mib: int
) -> None:
    disk = of_disk(settings_of(*flags, home=tmp_path), free)
    assert Path(disk.cache_dir) == tmp_path / "pyctl" / "kv"
    assert disk.disk_mib == mib
    assert (tmp_path / "pyctl" / "kv").stat().st_mode & 0o777 == 0o700


def test_a_default_directory_that_cannot_be_used_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert of_disk(settings_of(home=tmp_path / "file"), 0).cache_dir == ""
    assert of_disk(settings_of(home=tmp_path), 2 * GIB).cache_dir == ""
    file, full = caplog.messages
    assert file == (
        f"no disk cache: cannot use {tmp_path}/file/pyctl/kv: File exists; --kv-cache-dir "
        "names another"
    )
    assert full.endswith(
        "kv: 2,048 MiB of disk space are free, less than 10,240; --kv-cache-dir names another"
    )


def test_a_given_directory_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    given = settings_of("--kv-cache-dir", str(tmp_path / "file" / "kv"), home=tmp_path)
    with pytest.raises(ConfigError, match=r"^cannot use --kv-cache-dir .*file/kv: File exists$"):
        with_directory(given)


def test_a_full_disk_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SQLite reports it without a number; with space the same error is another fault."""
    given = settings_of("--kv-cache-dir", str(tmp_path / "kv"), home=tmp_path)

    def refuse(_: Path) -> CacheDirectory:
        raise errors[0]

    errors = [
        OSError("index.sqlite3: disk I/O error"),
        OSError(errno.ENOSPC, "No space left on device"),
    ]
    for _ in range(2):
        assert of_disk(given, 4096, refuse).cache_dir == ""
        assert f"no disk cache: no space for {tmp_path}/kv: " in caplog.messages[-1]
        assert caplog.messages[-1].endswith("; the next start tries again")
        errors.reverse()
    with pytest.raises(ConfigError, match="disk I/O error"):
        of_disk(given, GIB, refuse)


def test_the_first_line_says_where_the_directory_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pyctl")
    log_cache_dir(with_directory(settings_of("--kv-cache-budget", "2048", home=tmp_path)).disk)
    assert caplog.messages == [
        f"disk cache: {tmp_path}/pyctl/kv, at most 2,048 MiB; its files contain text of prompts; "
        "--no-kv-cache turns it off"
    ]
    caplog.clear()
    assert with_directory(settings_of("--no-kv-cache", home=tmp_path)).disk == DiskSettings(
        kv_cache=False
    )
    assert caplog.messages == []

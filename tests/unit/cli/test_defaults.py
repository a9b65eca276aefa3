"""Defaults that depend on the machine: bytes of RAM for snapshots, and the directory on disk."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pyctl.cache.cache_settings import CacheSettings, DiskSettings
from pyctl.cli.arguments import CommandSettings, parse_serve
from pyctl.cli.defaults import cache_budget, log_cache_dir, with_directory, with_shared_budget
from pyctl.disk.directory import CacheDirectory
from pyctl.errors import ConfigError
from pyctl.llama.settings.memory_plan import MemoryPlan, Place, Usage

MIB = 2**20
GIB = 2**30


def plan_of(free: float | None, used: float = 0.7) -> MemoryPlan:
    """Return a model that takes ``used`` GiB of RAM where ``free`` GiB are available."""
    usage = Usage(weights=int(used * GIB))
    return MemoryPlan(
        65_536, 4, 65_536.0, 150 * MIB, (Place("host", False, usage, free and int(free * GIB)),)
    )


@pytest.mark.parametrize(
    ("free", "used", "chosen"),
    [
        (119, 0.7, 59.15),  # of 128 GB
        (58, 0.7, 28.65),  # of 64 GB
        (27, 0.7, 13.15),  # of 32 GB
        (27, 12.0, 8.0),  # the same, with experts in RAM
        (13, 0.7, 6.87),  # of 16 GB
        (6, 0.7, 2.65),
        (1, 0.7, 0.5),
        (16, 40.0, 0.5),  # the weights alone are more than there is
    ],
)
def test_snapshots_get_half_of_what_is_left(free: float, used: float, chosen: float) -> None:
    budget = cache_budget(CacheSettings(), plan_of(free, used))
    assert budget is not None
    assert budget / GIB == pytest.approx(chosen, abs=0.01)
    assert budget % MIB == 0


def test_a_given_budget_is_that_of_llama_server() -> None:
    for mib, found in ((-1, None), (0, 0), (100, 100 * MIB), (10**6, 10**6 * MIB)):
        assert cache_budget(CacheSettings(ram_mib=mib), plan_of(16)) == found
    for unknown in (None, plan_of(None)):
        assert cache_budget(CacheSettings(), unknown) == 8 * GIB


def test_several_models_share_half_of_what_is_free(tmp_path: Path) -> None:
    given = settings_of("--cache-ram", "100", home=tmp_path)
    for free, mib in ((119 * GIB, 60928), (13 * GIB, 7509), (None, None)):
        free_ram = partial(int, free) if free is not None else (lambda: None)
        shared = with_shared_budget(settings_of(home=tmp_path), free_ram)
        assert shared.cache.ram_mib == mib
        assert with_shared_budget(given, free_ram).cache.ram_mib == 100


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

"""Settings of the cache: the values that their flags take, and those that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyctl.cache.cache_settings import (
    GIVEN_DAILY_MIB,
    CacheSettings,
    DiskSettings,
    default_directory,
    policy,
    store_url,
)
from pyctl.errors import ConfigError


def test_the_default_directory_is_the_users_cache(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert default_directory(environ) == tmp_path / "pyctl" / "kv"


@pytest.mark.parametrize(
    "text", ["off", "full", "auto", "auto:8", "700", "spill", "full,spill", "AUTO:8,Spill"]
)
def test_a_policy_is_kept_in_lower_case(text: str) -> None:
    assert policy(text) == text.lower()


@pytest.mark.parametrize("text", ["", "some", "auto:0", "-5", "off,spill"])
def test_another_policy_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match="must be one of off, full, auto, auto:N, N"):
        policy(text)


@pytest.mark.parametrize(
    "url", ["s3://bucket/path", "gs://bucket", "az://box", "file:///srv/kv", "memory://"]
)
def test_the_address_of_a_store(url: str) -> None:
    assert store_url(url) == url


@pytest.mark.parametrize(
    "url", ["", "bucket", "http://bucket", "s3://", "file://kv", "S3://bucket"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="it must begin with s3://, gs://"):
        store_url(url)


@pytest.mark.parametrize("url", ["s3://key:secret@bucket", "gs://b?token=secret", "az://b#secret"])
def test_an_address_with_a_key_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="neither key nor query") as refused:
        store_url(url)
    assert "secret" not in str(refused.value)


def test_by_default_free_memory_decides_about_ram() -> None:
    settings = CacheSettings()
    assert settings.ram_mib is None
    assert settings.n_slots == 0, "no limit by number"


def test_by_default_shared_prefixes_and_evicted_snapshots_are_written() -> None:
    settings = DiskSettings()
    assert settings.disk_policy == "auto:30,spill"
    assert settings.daily_mib == GIVEN_DAILY_MIB
    assert settings.store_url == ""


@pytest.mark.parametrize(("n", "is_refused"), [("511", True), ("512", False), ("full", False)])
def test_a_fixed_prefix_is_no_shorter_than_the_shortest_written(n: str, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(ConfigError, match="nothing would be written"):
            DiskSettings(disk_policy=n)
        return
    assert DiskSettings(disk_policy=n).disk_policy == n

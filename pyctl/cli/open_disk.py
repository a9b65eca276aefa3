"""Opening of the cache directory, and of the disk cache of a loaded model in it."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from pyctl.cache.cache_settings import DiskSettings
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.chat.cached_tokenizer import readable
from pyctl.cli.choose_directory import is_full
from pyctl.disk.directory import CacheDirectory, record_model_name
from pyctl.disk.disk import Disk, WriteLimits
from pyctl.disk.model_folder import ModelFolder
from pyctl.disk.reader import StoreReader
from pyctl.disk.remote_store import RemoteStore, connect
from pyctl.disk.writer import StoreWriter
from pyctl.errors import ConfigError
from pyctl.llama.library.pinned_memory import allocate
from pyctl.llama.loader import Loaded

__all__ = ["open_directory", "open_disk"]

log = logging.getLogger("pyctl")

MIB = 2**20


def open_directory(settings: DiskSettings) -> CacheDirectory | None:
    """Open the cache directory, which the caller closes; return None without one, or if the drive
    is full. Raises ConfigError if it cannot be used.
    """
    if not settings.cache_dir:
        return None
    path = Path(settings.cache_dir).expanduser()
    try:
        return CacheDirectory(path, settings.disk_mib * MIB or None)
    except OSError as error:
        _check_full(path, error)
        return None


def open_disk(settings: DiskSettings, directory: CacheDirectory, loaded: Loaded) -> Disk | None:
    """Return the disk cache of the model in ``directory``, which it closes in the end, with its
    object store if there is one; None if the drive is full. Raises ConfigError if the directory
    cannot be used.
    """
    info = loaded.info
    try:
        folder = ModelFolder(directory, info.fingerprint, loaded.backend.memory.shape.sizes)
        record_model_name(directory.path, info.fingerprint, info.model_alias or info.model_name)
    except OSError as error:
        _check_full(directory.path, error)
        directory.close()
        return None
    writer = StoreWriter(folder, settings.daily_mib * MIB or None)
    remote = None
    if settings.store_url:
        remote = RemoteStore(connect(settings.store_url), settings.store_url, writer)
    return Disk(
        StoreReader(folder, allocate),
        writer,
        DiskPolicy.from_flag(settings.disk_policy),
        WriteLimits(
            settings.min_tokens, settings.cold_max, interim_seconds=settings.interim_seconds
        ),
        text_of=partial(readable, loaded.tokenizer),
        remote=remote,
    )


def _check_full(path: Path, error: OSError) -> None:
    """Warn that there is no disk cache if a full drive caused ``error``; else raise ConfigError."""
    if not is_full(path, error):  # it could be used when the process started
        raise ConfigError(f"cannot use --kv-cache-dir {path}: {error.strerror or error}") from error
    log.warning("no disk cache: no space for %s; the next start tries again", path)

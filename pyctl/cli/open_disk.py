"""Opening of the disk cache of a loaded model."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from pyctl.cache.cache_settings import DiskSettings
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.chat.cached_tokenizer import readable
from pyctl.cli.defaults import is_full
from pyctl.disk.directory import CacheDirectory, record_model_name
from pyctl.disk.disk import Disk, WriteLimits
from pyctl.disk.model_folder import ModelFolder
from pyctl.disk.reader import StoreReader
from pyctl.disk.remote_store import RemoteStore, connect
from pyctl.disk.writer import StoreWriter
from pyctl.errors import ConfigError
from pyctl.llama.library.pinned_memory import allocate
from pyctl.llama.loader import Loaded

__all__ = ["open_disk"]

log = logging.getLogger("pyctl")

MIB = 2**20


def open_disk(settings: DiskSettings, loaded: Loaded) -> Disk | None:
    """Open the disk cache of the model, and its object store if there is one; return None without a
    cache directory, or if the drive is full. Raises ConfigError if the directory cannot be used.
    """
    if not settings.cache_dir:
        return None
    path = Path(settings.cache_dir).expanduser()
    info = loaded.info
    try:
        directory = CacheDirectory(path, settings.disk_mib * MIB or None)
        folder = ModelFolder(directory, info.fingerprint, loaded.backend.memory.shape.sizes)
        record_model_name(path, info.fingerprint, info.model_alias or info.model_name)
    except OSError as error:  # it could be used before the model was loaded
        if is_full(path, error):
            log.warning("no disk cache: no space for %s; the next start tries again", path)
            return None
        raise ConfigError(f"cannot use --kv-cache-dir {path}: {error.strerror or error}") from error
    writer = StoreWriter(folder, settings.daily_mib * MIB or None)
    remote = None
    if settings.store_url:
        remote = RemoteStore(connect(settings.store_url), settings.store_url, writer)
    return Disk(
        StoreReader(folder, allocate),
        writer,
        DiskPolicy.from_flag(settings.disk_policy),
        WriteLimits(settings.min_tokens, settings.cold_max),
        text_of=partial(readable, loaded.tokenizer),
        remote=remote,
    )

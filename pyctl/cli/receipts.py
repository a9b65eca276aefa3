"""Receipts of a server's replies, and the loading of a model as a receipt has recorded it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pyctl import __version__
from pyctl.cache.cache_settings import DiskSettings
from pyctl.cli.exact_fingerprint import exact_fingerprint
from pyctl.disk.disk import Disk
from pyctl.disk.file_format import RECEIPTS
from pyctl.errors import ReceiptError
from pyctl.llama.library.extension import build_version
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.receipts.receipt import Provenance
from pyctl.receipts.receipt_store import MAX_BYTES, ReceiptStore
from pyctl.receipts.receipt_writer import ReceiptWriter

__all__ = ["load_recorded", "open_receipts"]

T = TypeVar("T")


def open_receipts(
    settings: DiskSettings, disk: Disk | None, loaded: Loaded, pool: PoolSettings, *, exact: bool
) -> ReceiptWriter | None:
    """Return the writer of receipts into the directory of ``disk``; None without a disk, or with
    --no-receipts.
    """
    if disk is None or not settings.receipts:
        return None
    directory = disk.folder.directory.path / RECEIPTS
    max_bytes = disk.folder.auxiliary_limit(MAX_BYTES)
    store = ReceiptStore(directory, max_bytes=max_bytes)
    provenance = Provenance(
        model=loaded.info.model_alias or loaded.info.model_name,
        fingerprint=loaded.info.fingerprint,
        llama_build=build_version(),
        pyctl_version=__version__,
        is_exact=exact,
        layers=loaded.resolved.memory.layers,
        settings={
            "model": msgspec.to_builtins(_model_settings(loaded)),
            "drafts": msgspec.to_builtins(_draft_settings(loaded)),
            "pool": msgspec.to_builtins(pool),
        },
    )
    return ReceiptWriter(store, provenance, disk, disk.queue.run_soon, disk.writer.reserve_write)


def load_recorded(provenance: Provenance) -> Loaded:
    """Load the model of a receipt with its settings.

    Raises ReceiptError if the build, the model or the machine is another than the recorded one,
    and ModelError if the model cannot be loaded.
    """
    if provenance.llama_build != build_version():
        raise ReceiptError(f"it is of {provenance.llama_build}, here is {build_version()}")
    model = _converted(provenance, "model", ModelSettings)
    drafts = _converted(provenance, "drafts", DraftSettings)
    pool = _converted(provenance, "pool", PoolSettings)
    loaded = load(model, drafts=drafts, pool=pool)
    if reason := _find_mismatch(provenance, loaded):
        loaded.backend.unload()
        raise ReceiptError(reason)
    return loaded


def _find_mismatch(provenance: Provenance, loaded: Loaded) -> str:
    """Return why ``loaded`` may compute other bits than the model of a receipt, "" if it may
    not.
    """
    if loaded.resolved.memory.layers != provenance.layers:
        return (
            "its layers are not placed on the devices as in the receipt, which have too little "
            "free memory; stop the server"
        )
    fingerprint = loaded.info.fingerprint
    if provenance.is_exact:
        fingerprint = exact_fingerprint(loaded)
    if fingerprint != provenance.fingerprint:
        return "the model, the machine, or a variable of llama.cpp is another than in the receipt"
    return ""


def _model_settings(loaded: Loaded) -> ModelSettings:
    """Return the settings of the model without automatic values, and with whole paths."""
    resolved = loaded.resolved
    model = resolved.model
    return replace(
        model,
        path=_whole(model.path),
        lora=tuple((_whole(path), scale) for path, scale in model.lora),
        n_threads=resolved.n_threads,
        n_threads_batch=resolved.n_threads_batch,
    )


def _draft_settings(loaded: Loaded) -> DraftSettings:
    drafts = loaded.resolved.drafts
    return replace(drafts, draft_path=_whole(drafts.draft_path) if drafts.draft_path else "")


def _whole(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _converted(provenance: Provenance, group: str, settings: type[T]) -> T:
    """Return a group of settings. Raises ReceiptError if another version of pyctl made them."""
    values: Any = provenance.settings.get(group)
    try:
        return msgspec.convert(values, settings)
    except msgspec.ValidationError as error:
        raise ReceiptError(f"its settings are of another version of pyctl: {error}") from error

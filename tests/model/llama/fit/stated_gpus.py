"""GPUs that a test states, on a machine that has none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pyctl.llama.fit import breakdown, dry_runs
from pyctl.llama.library.devices import Device

CORE = breakdown.core


def on_gpus(monkeypatch: pytest.MonkeyPatch, gpus: tuple[Device, ...], *names: str) -> None:
    """Replace the extension by one with ``gpus``: each of ``names`` has an equal part of the bytes
    that llama.cpp counts on the host.

    Without names there is no extension.
    """

    def moved(ctx: int) -> dict[str, list[int]]:
        return {name: [size // len(names) for size in CORE.breakdown(ctx)[""]] for name in names}

    def row_places(ctx: int) -> list[str]:
        return [names[0] for _ in CORE.row_places(ctx)]

    extension = SimpleNamespace(
        breakdown=moved, row_places=row_places, layer_devices=CORE.layer_devices
    )
    monkeypatch.setattr(breakdown, "core", extension if names else None)
    monkeypatch.setattr(dry_runs, "devices", lambda: gpus)

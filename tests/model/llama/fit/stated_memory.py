"""Memory that a test states: of GPUs on a machine that has none, and of the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

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

    functions = {"breakdown": moved, "row_places": row_places}
    state(monkeypatch, gpus, functions if names else None)


def state(
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[Device, ...],
    functions: Mapping[str, Callable[..., Any]] | None,
) -> None:
    """Have dry runs find ``gpus``, and an extension with ``functions`` in place of its own; None
    for no extension.
    """
    extension = None if functions is None else SimpleNamespace(**{**vars(CORE), **functions})
    monkeypatch.setattr(breakdown, "core", extension)
    monkeypatch.setattr(dry_runs, "devices", lambda: gpus)


def state_host(monkeypatch: pytest.MonkeyPatch, n_free: int) -> None:
    """Have dry runs find so many free bytes on the host."""
    monkeypatch.setattr(dry_runs, "host_available", lambda: n_free)

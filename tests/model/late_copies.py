"""Copies as a device makes them beside its computation, without a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pyctl.llama.library.native import KVState

LAG = 3
"""Calls by which the extension treats a copy as under way."""


class LateKVState(KVState):
    """KV state whose saved bytes arrive when something waits for them, or just before the next
    load; until then they are nonsense.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named, lag=LAG)
        self._coming: list[tuple[np.ndarray, np.ndarray]] = []

    def _save(self, save: Callable[..., None], *given: Any) -> None:
        *which, out = given
        saved = np.empty_like(out)
        save(*which, saved)
        out[:] = 0xAA
        self._coming.append((out, saved))

    def _load(self, load: Callable[..., None], *given: Any) -> None:
        self._arrive()
        load(*given)

    def _arrive(self) -> None:
        for out, saved in self._coming:
            out[:] = saved
        self._coming.clear()

    def save_rows(self, *given: Any) -> None:
        self._save(super().save_rows, *given)

    def fetch(self, *given: Any) -> None:
        self._save(super().fetch, *given)

    def save_state(self, *given: Any) -> None:
        self._save(super().save_state, *given)

    def save_window(self, *given: Any) -> None:
        self._save(super().save_window, *given)

    def load(self, *given: Any) -> None:
        self._load(super().load, *given)

    def finish(self) -> None:
        self._arrive()
        super().finish()

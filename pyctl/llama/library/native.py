"""The classes of the extension, or of its substitute, and the translation of their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from pyctl.errors import OutOfCellsError, StateError
from pyctl.llama.library import extension, floor

__all__ = [
    "HiddenRows",
    "HostBuffer",
    "KVState",
    "NextnHead",
    "Pulse",
    "RowStore",
    "checked",
]

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    from pyctl._core import HostBuffer, KVState, OutOfCells, Pulse
    from pyctl._drafts import HiddenRows, NextnHead
    from pyctl._pool import RowStore
else:
    KVState = (extension.core or floor).KVState
    HostBuffer = (extension.core or floor).HostBuffer
    Pulse = (extension.core or floor).Pulse
    OutOfCells = (extension.core or floor).OutOfCells
    # Without the module of these, nothing comes to where they are used.
    HiddenRows, NextnHead = (
        getattr(extension.drafts, name, None) for name in ("HiddenRows", "NextnHead")
    )
    RowStore = getattr(extension.pool, "RowStore", None)


def checked(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the extension; convert its errors to StateError or OutOfCellsError."""
    try:
        return function(*args, **kwargs)
    except OutOfCells as error:
        raise OutOfCellsError from error
    except (ValueError, RuntimeError) as error:
        raise StateError(str(error)) from error

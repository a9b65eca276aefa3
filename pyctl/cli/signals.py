"""Handlers of signals for the time of a block."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

__all__ = ["ending_by_signal", "handled"]


@contextmanager
def handled(handlers: Mapping[signal.Signals, signal._HANDLER]) -> Iterator[None]:
    """Use ``handlers`` within the block. Ignored signals, as SIGHUP below nohup, stay ignored."""
    used = {
        number: each
        for number, each in handlers.items()
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    before = {number: signal.signal(number, handler) for number, handler in used.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """Let SIGTERM and SIGHUP leave the block by SystemExit, once, as Ctrl-C does by
    KeyboardInterrupt.
    """
    numbers = signal.SIGTERM, signal.SIGHUP

    def end(number: int, _: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # the block is about to end
        raise SystemExit(128 + number)

    with handled(dict.fromkeys(numbers, end)):
        yield

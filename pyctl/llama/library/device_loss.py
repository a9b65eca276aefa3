"""The loss of a device: ggml aborts the process, and the cache is written before it ends."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from pyctl.llama.library.library_log import last_log_error
from pyctl.settings.limit import limit

__all__ = ["RPC_SOURCE", "Loss", "loss", "shut_down_lost_device", "when_aborted"]

RPC_SOURCE = b"ggml-rpc"
"""Part of the message of an abort that a lost worker causes."""

SAVING_SECONDS = limit(
    30.0,
    "writing the cache after a device was lost",
    "the process exits; unwritten snapshots are lost",
    "process",
    "s",
)


@dataclass
class Loss:
    """The loss of a device.

    Attributes:
        text: The text for the log, "" while all devices are there.
        is_watched: Whether a thread watches for it.
        workers: The names of the workers of --rpc.
    """

    text: str = ""
    is_watched: bool = False
    workers: str = ""


loss = Loss()
"""One for the process, since ggml's devices are global."""

# Each callback is kept: ggml may call it until the process ends.
_abort_callback = cache(ctypes.CFUNCTYPE(None, ctypes.c_char_p))


def when_aborted(function: Callable[[bytes], None]) -> None:
    """Have ``function`` called with the message on the thread on which ggml is about to abort the
    process.
    """
    library = ctypes.CDLL(None)  # with the symbols that `extension` has made global
    library.ggml_set_abort_callback(_abort_callback(function))


def shut_down_lost_device(message: bytes) -> None:
    """End the process after an abort, with the cache written: a worker is lost, or a GPU has no
    memory left.

    The thread of the failed call waits here while others write. While nothing is served there is
    nothing to write.
    """
    text = message.decode("utf-8", "replace")
    is_worker = RPC_SOURCE in message
    if is_worker:
        loss.text = f"the worker {loss.workers} is lost"
    else:
        loss.text = f"llama.cpp has failed: {last_log_error(text)}"
    logging.getLogger("pyctl").critical("the program ends: %s", loss.text)
    if loss.is_watched:
        time.sleep(SAVING_SECONDS)
    elif not is_worker:
        print(text, file=sys.stderr, flush=True)
        ctypes.CDLL(None).ggml_print_backtrace()
    logging.shutdown()
    os._exit(1)

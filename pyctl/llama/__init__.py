"""The interface to llama.cpp, through llama-cpp-python and the extension. No other package calls
llama.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.openmp import SPIN, limit_spinning
from pyctl.setup.libraries import TRIAL, use_libraries, use_release

if SPIN not in os.environ:  # must precede the libraries; the command line may have set it
    limit_spinning(ModelSettings.poll)

if "LLAMA_CPP_LIB_PATH" not in os.environ:  # so must the choice of the libraries
    use_libraries()
if {"LLAMA_CPP_LIB_PATH", TRIAL} & os.environ.keys():
    use_release()

# A library that was linked with -static-libstdc++ exports a part of its C++ runtime, and would take
# the place of that part for all that is loaded after it. An exception that two runtimes share is
# lost. So the system's comes first.
with contextlib.suppress(OSError):
    ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)

from pyctl.llama import extension  # before others import the bindings
from pyctl.llama.devices import Device, devices, host_available
from pyctl.llama.library import allocate, reserve_pinned
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded, load
from pyctl.llama.memory_plan import MemoryPlan
from pyctl.llama.rpc import connect_workers, serve_devices
from pyctl.llama.settings.resolved import gpus

__all__ = [
    "Device",
    "LlamaBackend",
    "Loaded",
    "MemoryPlan",
    "allocate",
    "connect_workers",
    "devices",
    "extension",
    "gpus",
    "host_available",
    "load",
    "reserve_pinned",
    "serve_devices",
]

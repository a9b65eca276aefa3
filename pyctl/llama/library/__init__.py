"""llama.cpp's libraries and the extension: how they are loaded, their reports, how they are
called. Importing the package prepares this process for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from pyctl.engine.openmp import SPIN, limit_spinning
from pyctl.llama.library.package_library import package_library
from pyctl.machine.environment import LIBRARY_PATH, TRIAL
from pyctl.machine.libraries import use_libraries, use_release

if SPIN not in os.environ:  # must precede the libraries; the command line may have set it
    limit_spinning()

if LIBRARY_PATH not in os.environ:  # so must the choice of the libraries
    use_libraries()
if {LIBRARY_PATH, TRIAL} & os.environ.keys():
    use_release()

# All libraries take the operator new[] that was loaded first: that of csrc/allocation aligns the
# arrays that ggml multiplies with. Builds by bench.gpu.prepare lack it.
ALLOCATION = package_library("pyctl-allocation")
with contextlib.suppress(OSError):
    ctypes.CDLL(str(ALLOCATION), mode=ctypes.RTLD_GLOBAL)

# A library that was linked with -static-libstdc++ exports a part of its C++ runtime, and would take
# the place of that part for all that is loaded after it. An exception that two runtimes share is
# lost. So the system's comes first.
with contextlib.suppress(OSError):
    ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)

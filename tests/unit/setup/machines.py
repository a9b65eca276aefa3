"""Made-up machines: a stand-in for libcuda.so.1, and descriptions of machines."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

from pyctl.machine.probe import NVIDIA, Card, Compiler, Driver, Machine

GIB = 2**30

LIBCUDA = r"""
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
static int number(const char * name, int otherwise) { const char * v = getenv(name); return v ? atoi(v) : otherwise; }
int cuDriverGetVersion(int * v) { *v = number("FAKE_CUDA", 13000); return 0; }
int cuInit(unsigned flags) { (void) flags; return number("FAKE_INIT", 0); }
int cuDeviceGetCount(int * n) { *n = number("FAKE_CARDS", 1); return 0; }
int cuDeviceGet(int * device, int index) { *device = index; return 0; }
int cuDeviceGetName(char * name, int size, int device) { return snprintf(name, size, "Card %d", device) < 0; }
int cuDeviceGetAttribute(int * value, int which, int device) {
    int capability = number(device ? "FAKE_SECOND" : "FAKE_FIRST", 86);
    *value = which == 75 ? capability / 10 : capability % 10;
    return number("FAKE_ATTRIBUTE", 0);
}
int cuDeviceTotalMem_v2(size_t * n, int device) { *n = (size_t) 24 << 30; return device > 1; }
"""


def build_libcuda(directory: Path) -> Path:
    """Return a library that answers as its environment says."""
    source = directory / "libcuda.c"
    library = directory / "libcuda.so.1"
    source.write_text(LIBCUDA, encoding="utf-8")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)],
        check=True,
    )
    return library


def set_variable(name: str, value: str) -> None:
    """Set a variable where getenv of a library sees it; an empty one removes it."""
    libc = ctypes.CDLL(None)
    if value:
        libc.setenv(name.encode(), value.encode(), 1)
    else:
        libc.unsetenv(name.encode())


CARD = Card("NVIDIA GeForce RTX 3090", (8, 6), 24 * GIB)
DRIVER = Driver((13, 0), "580.95.05", (CARD,))
ON_BUS = NVIDIA
BARE = Machine(
    driver=None,
    pci_cards=(),
    compiler=Compiler("/usr/bin/g++", "/usr/bin/gcc", True),
    n_cores=16,
    n_ram=64 * GIB,
    libc="glibc 2.41",
    processor="x86_64",
)
"""A machine with a compiler and no card."""
WITH_CARD = replace(BARE, driver=DRIVER, pci_cards=(ON_BUS,))
OLD_DRIVER = replace(WITH_CARD, driver=replace(DRIVER, cuda=(12, 4), release="550.163.01"))

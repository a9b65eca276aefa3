"""Memory that threads freed: it is reused by other threads and returned to the system."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from pyctl.processes.process_memory import share_heaps, trim_heap
from pyctl.requests.request_pool import RequestPool
from pyctl.requests.service import SharedState
from tests.unit.server.fake import Bench

THREADS = 12
MIB = 2**20

PROGRAM = f"""
import ctypes, sys, threading
from pyctl.processes.process_memory import trim_heap, share_heaps
from pyctl.processes.process_memory import resident_bytes

if not share_heaps({{}}):
    sys.exit("no such heaps")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
turn, over = threading.Lock(), threading.Barrier({THREADS + 1})

def work():
    # One after the other takes 16 MiB and frees most of it, as a request that leaves something
    # remembered does.
    with turn:
        pieces = [libc.malloc(2**16) for _ in range(256)]
        for piece in pieces:
            ctypes.memset(piece, 1, 2**16)
        for number, piece in enumerate(pieces):
            if number % 16 < 15:
                libc.free(piece)
    over.wait()

before = resident_bytes()
for _ in range({THREADS}):
    threading.Thread(target=work).start()
over.wait()
print((resident_bytes() - before) // {MIB})
assert trim_heap()
print((resident_bytes() - before) // {MIB})
"""


def test_what_one_thread_freed_is_there_for_the_next() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    if "no such heaps" in done.stderr:
        pytest.skip("the C library is another")
    assert done.returncode == 0, done.stderr[-2000:]
    kept, at_rest = map(int, done.stdout.split())
    assert kept <= 64, (
        "two heaps of 16 MiB, and what 12 threads left; with a heap for each it is 192"
    )
    assert at_rest <= 24, "what 12 threads left is 12 MiB"


def test_the_environment_is_asked_first() -> None:
    assert not share_heaps({"MALLOC_ARENA_MAX": "4"})
    assert not share_heaps({"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"})


def test_what_was_freed_goes_back_when_no_request_is_read() -> None:
    assert SharedState().pool.on_rest is trim_heap
    given = threading.Event()
    bench = Bench(request_pool=RequestPool(given.set, idle_seconds=0.05))
    bench.post("/apply-template", {"messages": [{"role": "user", "content": "Hi"}]})
    assert given.wait(30)

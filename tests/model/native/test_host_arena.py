"""The arena of host memory, in a process of its own and without a device: the memory it takes and
returns.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MIB = 2**20
LIMIT = 512 * MIB

BEGIN = f"""
import random, time
from pyctl.llama.library.native import HostBuffer
from pyctl.processes.process_memory import resident_bytes

MIB, SLAB, LIMIT = {MIB}, 64 * {MIB}, {LIMIT}

def soon(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, (HostBuffer.used() / MIB, HostBuffer.held() / MIB)
        time.sleep(0.01)
"""


def run(program: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_buffers_of_all_sizes_stay_within_the_limit() -> None:
    """Buffers of random sizes never keep more memory than the limit and what lies outside of the
    arena: fragmentation must not grow the process.
    """
    run("""
    assert HostBuffer.open(LIMIT, 0, registered=False)
    before = resident_bytes()
    random.seed(1)
    budget, held = LIMIT * 3 // 4, []
    for _ in range(300):
        size = int(MIB * 2 ** random.uniform(0, 6.5))
        while held and sum(map(len, held)) + size > budget:
            del held[random.randrange(len(held))]
        held.append(HostBuffer(size))
        if not held[-1].pinned:
            memoryview(held[-1])[:] = bytes(size)
    plain = sum(len(buffer) for buffer in held if not buffer.pinned)
    assert sum(map(len, held)) <= HostBuffer.used() <= sum(map(len, held)) + len(held) * 2**16
    # Buffers that fit no hole lie outside of the arena, which returned its empty slabs for them.
    soon(lambda: HostBuffer.held() <= LIMIT + plain // 4)
    assert resident_bytes() - before <= HostBuffer.held() + 32 * MIB
    """)


def test_slabs_that_nobody_uses_make_way_for_what_found_no_hole() -> None:
    """A buffer too large for any hole takes plain memory and has the arena return free slabs, so
    both together stay within the limit; the slabs come back afterwards.
    """
    run("""
    assert HostBuffer.open(LIMIT, 0, registered=False)
    slabs = [HostBuffer(SLAB) for _ in range(8)]
    assert all(buffer.pinned for buffer in slabs) and HostBuffer.held() == LIMIT
    full = resident_bytes()
    del slabs[::2]
    assert HostBuffer.held() == LIMIT, "it is kept for the next"
    large = HostBuffer(3 * SLAB)
    assert not large.pinned
    soon(lambda: HostBuffer.held() == LIMIT)
    assert resident_bytes() <= full - 2 * SLAB, "the large one was not written to yet"
    again = HostBuffer(SLAB)
    assert again.pinned
    del large
    soon(lambda: HostBuffer.held() == 5 * SLAB)
    more = [HostBuffer(SLAB) for _ in range(3)]
    assert all(buffer.pinned for buffer in more) and HostBuffer.held() == LIMIT
    """)


def test_what_a_rush_needed_serves_later_buffers() -> None:
    run("""
    assert HostBuffer.open(LIMIT, SLAB, registered=False)
    soon(lambda: HostBuffer.held() == SLAB)
    rush = [HostBuffer(SLAB) for _ in range(8)]
    assert all(buffer.pinned for buffer in rush) and HostBuffer.held() == LIMIT
    assert not HostBuffer(SLAB).pinned, "nothing is pinned beyond the limit"
    del rush[1:]
    others = [HostBuffer(SLAB // 2) for _ in range(14)]
    assert all(buffer.pinned for buffer in others) and HostBuffer.held() == LIMIT
    """)


def test_no_more_is_made_ready_for_want_of_a_hole() -> None:
    run("""
    assert HostBuffer.open(LIMIT, 2 * SLAB, registered=False)
    slabs = [HostBuffer(SLAB // 2) for _ in range(8)]
    soon(lambda: HostBuffer.held() == 6 * SLAB)
    del slabs[::2]
    slabs.append(HostBuffer(SLAB))
    time.sleep(0.3)
    assert HostBuffer.held() == 6 * SLAB  # three are free, two of them in four holes
    large = HostBuffer(2 * SLAB)
    assert large.pinned, "who needs one gets one"
    """)


def test_the_first_bytes_are_made_ready_at_once_within_the_limit() -> None:
    run("""
    assert HostBuffer.open(LIMIT, SLAB, initial=5 * SLAB, registered=False)
    soon(lambda: HostBuffer.held() == 5 * SLAB)
    assert HostBuffer.open(2 * LIMIT, 2 * LIMIT, initial=2 * LIMIT, registered=False)
    time.sleep(0.3)
    assert HostBuffer.held() == 5 * SLAB, "it is open already"
    assert HostBuffer(5 * SLAB).pinned
    """)
    run("""
    assert HostBuffer.open(LIMIT, SLAB, initial=100 * SLAB, registered=False)
    soon(lambda: HostBuffer.held() == LIMIT)
    """)


def test_threads_that_need_slabs_at_a_time_all_get_theirs() -> None:
    run("""
    from concurrent.futures import ThreadPoolExecutor
    assert HostBuffer.open(LIMIT, 0, registered=False)
    with ThreadPoolExecutor(8) as pool:
        buffers = list(pool.map(HostBuffer, [SLAB] * 8))
    assert all(buffer.pinned for buffer in buffers) and HostBuffer.held() == LIMIT
    for i, buffer in enumerate(buffers):
        memoryview(buffer)[:] = bytes([i]) * SLAB
    assert all(memoryview(buffer)[SLAB - 1] == i for i, buffer in enumerate(buffers))
    """)


@pytest.fixture(scope="module")
def pinning(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the library of pinning.cpp."""
    path = tmp_path_factory.mktemp("pinning") / "pinning.so"
    source = Path(__file__).with_name("pinning.cpp")
    command = ["c++", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    return str(path)


LOAD_PINNING = """
import ctypes, sys
pinning = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
pinning.registered_bytes.restype = ctypes.c_size_t
"""


def test_slabs_are_pinned_while_they_are_ready(pinning: str) -> None:
    run(
        LOAD_PINNING
        + """
assert HostBuffer.open(LIMIT, 0)
slabs = [HostBuffer(SLAB) for _ in range(8)]
assert all(buffer.pinned for buffer in slabs) and pinning.registered_bytes() == LIMIT
del slabs[::2]
large = HostBuffer(3 * SLAB)
soon(lambda: HostBuffer.held() == LIMIT)
assert not large.pinned and pinning.registered_bytes() == 5 * SLAB
HostBuffer.stop()
del large, slabs
assert not HostBuffer(6 * SLAB).pinned and pinning.registered_bytes() == 5 * SLAB
""",
        pinning,
    )


def test_what_the_system_refuses_to_pin_is_plain_memory(pinning: str) -> None:
    run(
        LOAD_PINNING
        + """
pinning.allow(3)
assert HostBuffer.open(LIMIT, 0)
buffers = [HostBuffer(SLAB) for _ in range(4)]
assert [buffer.pinned for buffer in buffers] == [True, True, True, False]
assert pinning.registered_bytes() == 3 * SLAB
pinning.allow(8)
assert not HostBuffer(SLAB).pinned, "it is not asked again"
del buffers
assert HostBuffer(SLAB).pinned and HostBuffer.held() == 3 * SLAB
""",
        pinning,
    )


def test_a_stopped_arena_serves_what_is_ready() -> None:
    run("""
    assert HostBuffer.open(LIMIT, 0, initial=SLAB, registered=False)
    soon(lambda: HostBuffer.held() == SLAB)
    HostBuffer.stop()
    assert HostBuffer(SLAB).pinned and not HostBuffer(2 * SLAB).pinned
    assert HostBuffer.held() == SLAB
    """)


def test_plain_memory_goes_back_whatever_lives_beside_it() -> None:
    """Freed plain buffers return to the system even if small objects live between them: resident
    memory follows the bytes in use.
    """
    run("""
    before = resident_bytes()
    random.seed(1)
    budget, held, beside = 96 * MIB, [], []
    for _ in range(300):
        sizes = (random.randint(MIB // 4, 2 * MIB), random.randint(MIB, 16 * MIB), 3 * MIB)
        size = random.choice(sizes)
        while held and sum(map(len, held)) + size > budget:
            del held[random.choice((0, random.randrange(len(held))))]
        held.append(HostBuffer(size, pinned=False))
        memoryview(held[-1])[::4096] = bytes(len(range(0, size, 4096)))
        beside.append(bytes(random.randint(600, 60_000)))
        if len(beside) > 300:
            del beside[random.randrange(300)]
    assert HostBuffer.used() == HostBuffer.held() == sum(map(len, held))
    assert resident_bytes() - before <= HostBuffer.used() + 24 * MIB
    """)

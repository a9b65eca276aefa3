"""The arena of host memory, in a process of its own and without a device: the memory it takes and
returns.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

MIB = 2**20
LIMIT = 512 * MIB

BEGIN = f"""
import random, time
from pyctl.llama.library import HostBuffer
from pyctl.server.process_memory import resident_bytes

MIB, SLAB, LIMIT = {MIB}, 64 * {MIB}, {LIMIT}

def soon(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, (HostBuffer.used() / MIB, HostBuffer.held() / MIB)
        time.sleep(0.01)
"""


def run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_buffers_of_all_sizes_stay_within_the_limit() -> None:
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


def test_what_only_a_rush_needed_goes_back_when_it_is_quiet() -> None:
    run("""
    assert HostBuffer.open(LIMIT, SLAB, keep=4 * SLAB, quiet=2, registered=False)
    soon(lambda: HostBuffer.held() == SLAB)
    rush = [HostBuffer(SLAB) for _ in range(8)]
    assert all(buffer.pinned for buffer in rush) and HostBuffer.held() == LIMIT
    full = resident_bytes()
    del rush[1:]
    assert HostBuffer.held() == LIMIT, "there may be more of it"
    soon(lambda: HostBuffer.held() == 4 * SLAB)
    assert resident_bytes() <= full - 3 * SLAB
    time.sleep(0.3)
    assert HostBuffer.held() == 4 * SLAB, "so much stays"
    """)


def test_beyond_what_stays_no_more_is_made_ready_for_want_of_a_hole() -> None:
    run("""
    assert HostBuffer.open(LIMIT, 2 * SLAB, keep=4 * SLAB, quiet=60, registered=False)
    slabs = [HostBuffer(SLAB // 2) for _ in range(8)]
    soon(lambda: HostBuffer.held() == 6 * SLAB)
    del slabs[::2]
    slabs.append(HostBuffer(SLAB))
    time.sleep(0.3)
    assert HostBuffer.held() == 6 * SLAB  # three are free, two of them in four holes
    large = HostBuffer(2 * SLAB)
    assert large.pinned, "who needs one gets one"
    """)


def test_what_is_reserved_is_made_ready_beyond_what_stays() -> None:
    run("""
    assert HostBuffer.open(LIMIT, SLAB, keep=2 * SLAB, quiet=3, registered=False)
    HostBuffer.reserve(5 * SLAB)
    soon(lambda: HostBuffer.held() >= 5 * SLAB)
    HostBuffer.reserve(100 * SLAB)
    # There is no such room: it is given up, and not all for ever.
    soon(lambda: HostBuffer.held() == 2 * SLAB)
    assert HostBuffer(SLAB).pinned
    """)


def test_plain_memory_goes_back_whatever_lives_beside_it() -> None:
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

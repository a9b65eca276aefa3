"""Context sizes that fit, from the memory of a few sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyctl.errors import ModelError
from pyctl.llama.fit.context_fit import (
    ContextRange,
    check_host,
    fitting_context,
    known_sum,
    whole_context,
)
from pyctl.llama.settings.memory_plan import MIB, MemoryPlan, Place, Usage

OPEN = ContextRange(
    given=0, n_ctx_train=65_536, least=4096, can_reduce=True, memory_bytes=64_000 * MIB
)


class Machine:
    """A GPU with ``free`` MiB, on which a model takes 1,000 MiB and 0.1 MiB a token."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.measured: list[int] = []

    def plan(self, n_ctx: int) -> MemoryPlan:
        self.measured.append(n_ctx)
        usage = Usage(weights=1_000 * MIB, kv=n_ctx * MIB // 10)
        gpu = Place("CUDA0", True, usage, self.free * MIB)
        host = Place("host", False, Usage(), None)
        return MemoryPlan(n_ctx, 1, MIB / 10, 0, (gpu, host), n_ctx_train=65_536)


def test_a_context_that_fits_is_measured_once() -> None:
    machine = Machine(24_000)
    assert fitting_context(machine.plan, OPEN).n_ctx == 65_536
    assert machine.measured == [65_536]


def test_the_largest_that_fits_follows_from_two_sizes() -> None:
    machine = Machine(4_000)
    plan = fitting_context(machine.plan, OPEN)
    assert machine.measured == [65_536, 4096, plan.n_ctx]
    assert 30_000 - 512 < plan.n_ctx <= 30_000
    assert plan.n_ctx % 256 == 0
    assert plan.fits


def test_no_context_is_reduced_below_the_least() -> None:
    assert fitting_context(Machine(500).plan, OPEN).n_ctx == 4096


@pytest.mark.parametrize(
    "sizes",
    [replace(OPEN, given=50_000), replace(OPEN, can_reduce=False), replace(OPEN, least=99_999)],
)
def test_other_contexts_stay_though_they_do_not_fit(sizes: ContextRange) -> None:
    plan = fitting_context(Machine(500).plan, sizes)
    assert plan.n_ctx == sizes.maximum
    assert not plan.fits


def test_a_context_larger_than_all_memory_is_never_measured() -> None:
    machine = Machine(24_000)
    large = replace(OPEN, given=10**9)
    with pytest.raises(ModelError, match="1000000000 tokens need about 100,000,000 MiB"):
        whole_context(machine.plan, large)
    assert machine.measured == [4096]
    unknown = replace(large, given=100_000, memory_bytes=None)
    assert whole_context(machine.plan, unknown).n_ctx == 100_000


def test_memory_is_known_if_each_part_is() -> None:
    assert known_sum([1, 2]) == 3
    assert known_sum([]) == 0
    assert known_sum([1, None]) is None


def test_a_host_without_room_is_refused() -> None:
    host = Place("host", False, Usage(weights=3 * MIB), 2 * MIB)
    plan = MemoryPlan(512, 1, 1.0, 0, (host,))
    with pytest.raises(ModelError, match="512 tokens need about 3 MiB of memory and there are 2"):
        check_host(plan)
    check_host(replace(plan, places=(replace(host, free=3 * MIB),)))


def test_pages_of_a_file_are_not_what_a_context_needs() -> None:
    usage = Usage(weights=3 * MIB, kv=5 * MIB)
    host = Place("host", False, usage, 4 * MIB, is_mapped=True)
    plan = MemoryPlan(512, 1, 1.0, 0, (host,))
    with pytest.raises(ModelError, match="512 tokens need about 5 MiB of memory and there are 4"):
        check_host(plan)

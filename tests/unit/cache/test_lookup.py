"""The requests that may use the disk, and the snapshots that a lookup keeps from eviction."""

from __future__ import annotations

import pytest

from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.lookup import may_use_disk
from tests.unit.cache.fake_disk import FakeDisk
from tests.unit.cache.steps import Asked, Steps, longer, prompt_of


@pytest.mark.parametrize(
    ("server", "request_policy", "cache_prompt", "expected"),
    [
        ("full", None, True, True),
        ("off", None, True, False),
        ("off", "full", True, True),
        ("full", "off", True, False),
        ("full", None, False, False),
    ],
)
def test_the_policy_of_a_request_goes_before_the_servers(
    server: str, request_policy: str | None, cache_prompt: bool, expected: bool
) -> None:
    disk = FakeDisk()
    disk.policy = DiskPolicy.parse(server)
    own = DiskPolicy.parse(request_policy) if request_policy is not None else None
    request = Asked(prompt_of(1), cache_prompt=cache_prompt, disk_policy=own)
    assert may_use_disk(request, disk) == expected  # type: ignore[arg-type]
    assert not may_use_disk(request, None)


def test_the_snapshots_of_a_lookup_are_those_of_its_candidates() -> None:
    steps = Steps()
    steps.serve(prompt_of(1))
    lookup = steps.lookup(longer(prompt_of(1), 2))
    assert lookup.candidates[0].snapshot is None, "the live sequence"
    assert set(lookup.snapshots) == set(steps.ram.snapshots())

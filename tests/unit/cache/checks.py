"""The invariants of the cache, checked from scratch."""

from __future__ import annotations

from pyctl.cache.check import find_inconsistencies
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import PromptMatch


def check_invariants(cache: RamCache) -> None:
    """Check that `find_inconsistencies` finds none, that lookups find what begins a prompt, and
    that prompt ends have an output.
    """
    assert find_inconsistencies(cache) == []
    for snapshot in cache.snapshots()[:3]:
        match = PromptMatch(snapshot.last_tokens(snapshot.n))
        begins = {each for each in cache.snapshots() if match.shared(each) == each.n}
        found = cache.lookup(match, snapshot.n)
        assert set(found) == begins
        assert [each.n for each in found] == sorted((each.n for each in begins), reverse=True)
    assert all(end.state.output.size for end in list(cache.prompt_ends))

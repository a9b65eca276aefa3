"""The values that cross the ports of the cache."""

from __future__ import annotations

import pytest

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.ports import CacheOptions, CacheRequest, DiskView, Entry, MemoryShape, Written
from pyctl.cache.resume_points import NOWHERE
from pyctl.prompt import Prompt


@pytest.mark.parametrize(("has_rows", "n_kept"), [(True, 70), (False, 0)])
def test_a_sequence_without_rows_keeps_nothing_where_a_state_is_loaded(
    has_rows: bool, n_kept: int
) -> None:
    shape = MemoryShape(NOWHERE, BlockSizes(0, 8, 100), has_rows=has_rows)
    assert shape.n_kept_rows(70) == n_kept


def test_by_default_a_memory_needs_its_state_and_holds_nothing() -> None:
    shape = MemoryShape(NOWHERE, BlockSizes(0, 8, 100))
    assert not shape.cut_anywhere
    assert not shape.can_hold
    assert not shape.is_pool


def test_sums_of_written_snapshots_are_new_values() -> None:
    empty = Written()
    both = empty.plus(100).plus(20)
    assert both == Written(2, 120)
    assert empty == Written(0, 0)


def test_a_snapshot_is_called_by_the_beginning_of_its_digest() -> None:
    entry = Entry(
        fingerprint="model",
        name="4000-0123456789abcdef",
        n=4000,
        n_bytes=1,
        created=0.0,
        used=0.0,
        hits=0,
        pinned=False,
        exact=True,
        parent="",
        label="",
    )
    assert entry.short == "0123456789"


def test_a_request_allows_the_cache_unless_its_client_forbids_it() -> None:
    request = CacheRequest(Prompt.from_ids([1, 2]))
    assert request.cache_prompt
    assert request.may_read_prompts
    assert request.disk_policy is None, "the server's"
    assert not request.background


def test_the_request_that_a_prompt_prepares_makes_no_difference_to_it() -> None:
    prompt = Prompt.from_ids([1, 2])
    before = CacheRequest(Prompt.from_ids([1]))
    assert CacheRequest(prompt, after=before) == CacheRequest(prompt)
    assert "after" not in repr(CacheRequest(prompt, after=before))


def test_a_disk_without_an_object_store_shows_none() -> None:
    view = DiskView("full", 0, 0, -1, 0, Written(), 0)
    assert view.store is None
    assert view.spilled == Written()


def test_by_default_generated_text_is_reused() -> None:
    assert not CacheOptions().exact
    assert CacheOptions().min_step > 0

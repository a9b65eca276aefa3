"""The folder of a model: the files that describe it, and lookups without the drive."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.snapshot import PromptMatch
from pyctl.disk.file_format import RULES, SIZES, StateName, parse_sizes, rules_id
from tests.unit.disk.making import DirectStore, conversation

Opener = Callable[..., DirectStore]


def test_it_notes_its_rules_and_sizes(open_store: Opener) -> None:
    sizes = BlockSizes(1, 48, 500)
    folder = open_store(sizes=sizes).folder
    assert (folder.path / RULES).read_text() == rules_id()
    assert parse_sizes((folder.path / SIZES).read_text()) == sizes
    assert parse_sizes("rows 1 + n * x, state 2\n") is None


def test_prefixes_are_found_the_deepest_first_within_the_limit(open_store: Opener) -> None:
    store = open_store()
    made = conversation(1)
    for each in made:
        store.write(each)
    prompt = PromptMatch(made[-1].last_tokens(60))
    assert [each.n for each in store.folder.find(prompt, 60)] == [60, 40, 20]
    assert [each.n for each in store.folder.find(prompt, 59)] == [40, 20]
    other = PromptMatch(conversation(2)[-1].last_tokens(60))
    assert store.folder.find(other, 60) == []


def test_a_file_that_is_gone_is_still_listed_until_a_read(open_store: Opener) -> None:
    store = open_store()
    made = conversation(1)[0]
    store.write(made)
    name = StateName.from_prefix(made.prefix)
    (store.home / str(name)).unlink()
    assert store.folder.contains(made.prefix)
    assert not store.folder.has_file(name)


@pytest.mark.parametrize(("budget", "limit"), [(None, 1000), (6_400, 100), (10**9, 1000)])
def test_prompts_and_replies_get_a_share_of_the_budget(
    open_store: Opener, budget: int | None, limit: int
) -> None:
    assert open_store(budget=budget).folder.auxiliary_limit(1000) == limit

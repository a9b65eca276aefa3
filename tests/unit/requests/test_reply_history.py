"""Entries by the id of a reply: found by their owner, replaced, bounded."""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.requests.reply_history import ReplyHistory

ME = b"me"


@dataclass(frozen=True)
class Entry:
    n_bytes: int = 10
    owner: bytes = ME


def history(max_entries: int = 100, max_bytes: int = 1000) -> ReplyHistory[Entry]:
    return ReplyHistory(max_entries, max_bytes)


def test_an_entry_is_found_by_its_owner_only() -> None:
    replies = history()
    mine = Entry()
    replies.add("m1", mine)
    assert replies.find("m1", ME) is mine
    assert replies.find("m1", b"you") is None
    assert replies.find("m2", ME) is None


def test_an_entry_takes_the_place_of_the_replaced_one() -> None:
    replies = history()
    replies.add("m1", Entry(10))
    replies.add("m2", Entry(30), replaced="m1")
    assert replies.find("m1", ME) is None
    assert replies.n_bytes == 30
    assert replies.n_forgotten == 0


def test_a_second_entry_of_a_reply_counts_once() -> None:
    replies = history()
    replies.add("m1", Entry(10))
    replies.add("m1", Entry(30))
    assert len(replies) == 1
    assert replies.n_bytes == 30


def test_the_entry_that_was_found_last_stays() -> None:
    replies = history(max_entries=2)
    replies.add("m1", Entry())
    replies.add("m2", Entry())
    replies.find("m1", ME)
    replies.add("m3", Entry())
    assert replies.find("m1", ME) is not None
    assert replies.find("m2", ME) is None
    assert replies.n_forgotten == 1


def test_an_entry_of_another_client_is_not_touched() -> None:
    replies = history(max_entries=2)
    replies.add("m1", Entry())
    replies.add("m2", Entry())
    replies.find("m1", b"you")
    replies.add("m3", Entry())
    assert replies.find("m1", ME) is None


def test_bytes_are_bounded() -> None:
    replies = history(max_bytes=30)
    for number in range(10):
        replies.add(f"m{number}", Entry(10))
    assert len(replies) == 3
    assert replies.n_bytes == 30
    assert replies.n_forgotten == 7


def test_an_entry_that_alone_is_too_large_is_dropped() -> None:
    replies = history(max_bytes=30)
    replies.add("m1", Entry(31))
    assert len(replies) == 0
    assert replies.n_bytes == 0

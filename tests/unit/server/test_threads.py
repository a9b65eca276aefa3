"""Threads: found by the id of the last reply, bounded, and counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyctl.errors import LostThreadError, ThreadError
from pyctl.server.threads import MAX_ONE_THREAD, Thread, ThreadCounts, Threads

ME = b"me"


def thread(*messages: bytes, owner: bytes = ME) -> Thread:
    return Thread(owner, b"{}", messages)


def is_here(threads: Threads, message_id: str, owner: bytes = ME) -> bool:
    try:
        threads.find(message_id, owner)
    except LostThreadError:
        return False
    return True


def test_a_thread_is_found_by_its_owner_only() -> None:
    threads = Threads()
    kept = thread(b"hi")
    threads.keep("m1", kept)
    assert threads.find("m1", ME) is kept
    with pytest.raises(LostThreadError):
        threads.find("m1", b"you")
    with pytest.raises(LostThreadError):
        threads.find("m2", ME)
    assert threads.counts().n_lost == 2


def test_a_reply_takes_the_place_of_the_one_that_it_continues() -> None:
    threads = Threads()
    threads.keep("m1", thread(b"a"))
    threads.keep("m2", thread(b"a", b"b"), "m1")
    assert not is_here(threads, "m1")
    assert is_here(threads, "m2")
    assert threads.counts() == ThreadCounts(
        n_kept=1,
        n_bytes=thread(b"a", b"b").n_bytes,
        n_created=1,
        n_continued=1,
        n_lost=1,
    )


def test_two_replies_to_one_turn_are_two_threads() -> None:
    threads = Threads()
    threads.keep("m1", thread(b"a"))
    for message_id in ("m2", "m3"):
        threads.keep(message_id, thread(b"a", b"b"), "m1")
    assert is_here(threads, "m2")
    assert is_here(threads, "m3")
    assert threads.counts().n_kept == 2


def test_the_least_recently_continued_is_forgotten_first() -> None:
    threads = Threads(max_threads=2)
    threads.keep("m1", thread(b"a"))
    threads.keep("m2", thread(b"b"))
    threads.find("m1", ME)
    threads.keep("m3", thread(b"c"))
    assert is_here(threads, "m1")
    assert not is_here(threads, "m2")
    assert threads.counts().n_forgotten == 1


def test_bytes_are_bounded() -> None:
    one = thread(b"x" * 1000)
    threads = Threads(max_bytes=3 * one.n_bytes)
    for number in range(10):
        threads.keep(f"m{number}", one)
    counts = threads.counts()
    assert counts.n_kept == 3
    assert counts.n_bytes == 3 * one.n_bytes
    assert counts.n_forgotten == 7


def test_a_thread_that_alone_is_too_large_is_not_kept() -> None:
    with pytest.raises(ThreadError, match="cannot be kept"):
        thread(b"x" * MAX_ONE_THREAD).check_size()
    thread(b"x" * 1000).check_size()
    threads = Threads(max_bytes=1000)
    threads.keep("m1", thread(b"x" * 1000))
    assert threads.counts() == ThreadCounts(n_created=1, n_forgotten=1)


def test_the_bytes_count_every_text() -> None:
    bare = thread()
    assert replace(bare, head=b"1234").n_bytes - bare.n_bytes == 2
    assert thread(b"12345678").n_bytes > bare.n_bytes + 8

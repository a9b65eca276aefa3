"""Receipts are written later, within bounds, and only of requests that may be kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pyctl.cache.disk_policy import DiskPolicy
from pyctl.engine.exact_reply import ExactReply
from pyctl.engine.request import Request
from pyctl.files.image_file import ImageFile
from pyctl.prompt import ImageSpan, Prompt
from pyctl.receipts.receipt_store import ReceiptStore
from pyctl.receipts.receipt_writer import MAX_WAITING, ReceiptWriter
from tests.unit.engine.drive import ManualClock, ask, tier_on
from tests.unit.receipts.making import FIRST, NOON, PROVENANCE, recorded_engine


def one_reply() -> ExactReply:
    engine, recorder = recorded_engine()
    ask(engine, FIRST)
    return recorder.replies[0]


REPLY = one_reply()


class Writing:
    """A writer whose disk works when it is told to."""

    def __init__(self, path: Path, policy: str = "full") -> None:
        self.clock = ManualClock()
        self.clock.now = NOON
        self.waiting: list[Callable[[], object]] = []
        self.has_room = True
        self.n_reserved = 0
        self.store = ReceiptStore(path / "receipts", clock=self.clock)
        self.disk = tier_on(path, policy=policy)
        self.writer = ReceiptWriter(
            self.store, PROVENANCE, self.disk, self.waiting.append, self._reserve, self.clock
        )

    def _reserve(self, n_bytes: int) -> bool:
        self.n_reserved += n_bytes if self.has_room else 0
        return self.has_room

    def work(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


@pytest.fixture
def writing(tmp_path: Path) -> Writing:
    return Writing(tmp_path)


def test_a_receipt_is_written_when_the_disk_has_time(writing: Writing) -> None:
    number = writing.writer.record(REPLY)
    assert number == round(NOON * 1e6)
    assert writing.store.ids() == []
    writing.work()
    assert writing.store.ids() == [number]
    assert writing.store.read(number).reply.tolist() == REPLY.trace.tokens
    assert writing.n_reserved == writing.store.counts().n_bytes


def test_two_replies_within_a_microsecond_have_two_receipts(writing: Writing) -> None:
    numbers = [writing.writer.record(REPLY) for _ in range(3)]
    writing.work()
    assert writing.store.ids() == numbers
    assert len(set(numbers)) == 3


def test_a_slow_disk_costs_receipts_and_no_memory(writing: Writing) -> None:
    numbers = [writing.writer.record(REPLY) for _ in range(MAX_WAITING + 2)]
    assert numbers[-2:] == [0, 0]
    assert writing.writer.n_dropped == 2
    writing.work()
    assert writing.store.ids() == numbers[:-2]
    assert writing.writer.record(REPLY) > 0


def test_beyond_the_bytes_of_a_day_nothing_is_written(writing: Writing) -> None:
    writing.has_room = False
    writing.writer.record(REPLY)
    writing.work()
    assert writing.store.ids() == []
    assert writing.writer.n_dropped == 1


def test_a_disk_that_fails_costs_the_receipt_and_is_logged(
    writing: Writing, caplog: pytest.LogCaptureFixture
) -> None:
    writing.store.directory.touch()  # a file in the place of the directory
    writing.writer.record(REPLY)
    writing.work()
    assert writing.writer.n_dropped == 1
    assert "cannot write a receipt: " in caplog.text


def test_what_the_cache_must_not_keep_has_no_receipt(writing: Writing, tmp_path: Path) -> None:
    request = REPLY.request
    off = DiskPolicy.parse("off")
    assert writing.writer.accepts(request)
    assert not writing.writer.accepts(replace(request, cache_prompt=False))
    assert not writing.writer.accepts(replace(request, disk_policy=off))
    without = Writing(tmp_path / "other", policy="off")
    assert not without.writer.accepts(request)
    assert without.writer.accepts(replace(request, disk_policy=DiskPolicy.parse("full")))


def test_a_prompt_with_an_image_has_no_receipt(writing: Writing) -> None:
    image = ImageSpan(b"key", 2, 2, ImageFile(b"", "", 1, 1))
    prompt = Prompt(image.tokens, pictures=(image,))
    assert not writing.writer.accepts(Request(prompt))

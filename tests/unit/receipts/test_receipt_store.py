"""Receipts in a directory: modes, age, count and bytes, damage, and results of verifications."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from pyctl.errors import ReceiptError
from pyctl.files.atomic_file import temp_name
from pyctl.receipts.receipt import Receipt
from pyctl.receipts.receipt_store import KEPT_SECONDS, ReceiptCounts, ReceiptStore
from tests.unit.engine.drive import ManualClock
from tests.unit.receipts.making import NOON, receipt_at


@pytest.fixture
def clock() -> ManualClock:
    made = ManualClock()
    made.now = NOON
    return made


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> ReceiptStore:
    return ReceiptStore(tmp_path / "receipts", clock=clock)


def write(store: ReceiptStore, clock: ManualClock, n: int, seconds: float = 60.0) -> list[Receipt]:
    """Write ``n`` receipts, ``seconds`` apart."""
    first = receipt_at(clock.now)
    receipts = []
    for _ in range(n):
        clock.advance(seconds)
        receipt = msgspec.structs.replace(first, id=round(clock.now * 1e6))
        store.write(receipt)
        receipts.append(receipt)
    return receipts


def test_receipts_come_back_by_their_ids_the_oldest_first(
    store: ReceiptStore, clock: ManualClock
) -> None:
    receipts = write(store, clock, 3)
    assert store.ids() == [receipt.id for receipt in receipts]
    found = [store.read(number).to_bytes() for number in store.ids()]
    assert found == [receipt.to_bytes() for receipt in receipts]


def test_files_are_for_their_owner_alone(store: ReceiptStore, clock: ManualClock) -> None:
    before = os.umask(0)
    try:
        (receipt,) = write(store, clock, 1)
        store.mark(receipt.id, is_equal=True)
    finally:
        os.umask(before)
    modes = [stat.filemode(path.stat().st_mode) for path in store.directory.iterdir()]
    assert modes == ["-rw-------"] * 2
    assert stat.filemode(store.directory.stat().st_mode) == "drwx------"


def test_after_a_day_a_receipt_is_not_listed_and_the_next_write_removes_it(
    store: ReceiptStore, clock: ManualClock
) -> None:
    (old,) = write(store, clock, 1)
    store.mark(old.id, is_equal=True)
    clock.advance(KEPT_SECONDS)
    assert store.ids() == [old.id]
    clock.advance(1)
    assert store.ids() == []
    assert store.counts() == ReceiptCounts()
    (new,) = write(store, clock, 1)
    assert [path.name for path in store.directory.iterdir()] == [f"{new.id}.receipt"]


def test_without_a_newer_receipt_old_ones_are_removed_too(
    store: ReceiptStore, clock: ManualClock
) -> None:
    write(store, clock, 2)
    clock.advance(2 * KEPT_SECONDS)
    store.prune()
    assert list(store.directory.iterdir()) == []


def test_the_oldest_are_removed_beyond_the_count(tmp_path: Path, clock: ManualClock) -> None:
    store = ReceiptStore(tmp_path, max_count=3, clock=clock)
    receipts = write(store, clock, 5)
    assert store.ids() == [receipt.id for receipt in receipts[2:]]


def test_the_oldest_are_removed_beyond_the_bytes(tmp_path: Path, clock: ManualClock) -> None:
    n_bytes = len(receipt_at(NOON).to_bytes())
    store = ReceiptStore(tmp_path, max_bytes=2 * n_bytes, clock=clock)
    receipts = write(store, clock, 5)
    assert store.ids() == [receipt.id for receipt in receipts[3:]]
    assert store.counts().n_bytes <= 2 * n_bytes


def test_results_are_counted_and_the_last_one_is_valid(
    store: ReceiptStore, clock: ManualClock
) -> None:
    receipts = write(store, clock, 3)
    n_bytes = sum(len(receipt.to_bytes()) for receipt in receipts)
    store.mark(receipts[0].id, is_equal=True)
    store.mark(receipts[1].id, is_equal=False)
    assert store.counts() == ReceiptCounts(3, n_bytes, verified=2, differing=1)
    store.mark(receipts[1].id, is_equal=True)
    assert store.counts() == ReceiptCounts(3, n_bytes, verified=2, differing=0)
    store.mark(receipts[0].id, is_equal=False)
    assert store.counts() == ReceiptCounts(3, n_bytes, verified=2, differing=1)


def test_a_damaged_file_is_an_error_of_that_receipt_alone(
    store: ReceiptStore, clock: ManualClock
) -> None:
    first, second = write(store, clock, 2)
    path = store.directory / f"{first.id}.receipt"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ReceiptError, match="its checksum is wrong"):
        store.read(first.id)
    assert store.read(second.id).to_bytes() == second.to_bytes()


def test_a_file_under_the_name_of_another_receipt_is_refused(
    store: ReceiptStore, clock: ManualClock
) -> None:
    first, second = write(store, clock, 2)
    data = (store.directory / f"{second.id}.receipt").read_bytes()
    (store.directory / f"{first.id}.receipt").write_bytes(data)
    with pytest.raises(ReceiptError, match=f"it is the receipt {second.id}"):
        store.read(first.id)


def test_a_link_is_not_read_and_not_written_through(tmp_path: Path, clock: ManualClock) -> None:
    other = tmp_path / "others"
    write(ReceiptStore(other, clock=clock), clock, 1)
    link = tmp_path / "receipts"
    link.symlink_to(other)
    store = ReceiptStore(link, clock=clock)
    assert store.ids() == []
    with pytest.raises(OSError, match="a link"):
        write(store, clock, 1)
    assert len(list(other.iterdir())) == 1


def test_files_of_others_stay_and_abandoned_ones_go(
    store: ReceiptStore, clock: ManualClock
) -> None:
    write(store, clock, 1)
    (store.directory / "notes").touch()
    (store.directory / temp_name()).touch()
    (receipt,) = write(store, clock, 1)[-1:]
    names = {path.name for path in store.directory.iterdir()}
    assert {"notes", f"{receipt.id}.receipt"} <= names
    assert not [name for name in names if name.endswith(".tmp")]


def test_no_directory_has_no_receipts(store: ReceiptStore) -> None:
    assert store.ids() == []
    assert store.counts() == ReceiptCounts()
    store.prune()
    with pytest.raises(ReceiptError, match="No such file"):
        store.read(1)

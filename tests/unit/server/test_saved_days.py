"""The time saved by day: what is kept, for how long, and what a crash and a damaged file cost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.saved_time import Saved
from pyctl.files.atomic_file import temp_path
from pyctl.server.saved_days import (
    FILE,
    MAX_DAYS,
    MAX_SPEEDS,
    WRITE_SECONDS,
    SavedDays,
    start_timer,
)

DAY = 86_400.0


class Machine:
    """A clock that stands until it is turned, with the timers that wait for it."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 28, 12, 0, 0).timestamp()
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now

    def later(self, seconds: float, function: Callable[[], None]) -> Callable[[], None]:
        timer = (self.now + seconds, function)
        self.timers.append(timer)
        return lambda: self.timers.remove(timer)

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer[0] <= self.now]
        for timer in due:
            self.timers.remove(timer)
            timer[1]()

    def start(self, directory: Path | None) -> SavedDays:
        """Return the saved days as a new process of a server has them."""
        days = SavedDays(self.clock, self.later)
        if directory is not None:
            days.keep_in(directory)
        return days


@pytest.fixture
def machine() -> Machine:
    return Machine()


def shown(days: SavedDays, part: str) -> tuple[float, int, int]:
    found = days.view()[part]
    return found["seconds"], found["tokens"], found["requests"]


def test_all_models_and_clients_count_at_once(machine: Machine) -> None:
    days = machine.start(None)
    days.add("one", Saved(2.5, 1000, 1), 400.0)
    days.add("other", Saved(0.5, 200, 1), 400.0)
    assert shown(days, "today") == shown(days, "total") == (3.0, 1200, 2)
    assert days.since_start == Saved(3.0, 1200, 2)
    assert machine.timers == []  # there is no file


def test_a_killed_process_loses_a_minute_at_most(machine: Machine, tmp_path: Path) -> None:
    days = machine.start(tmp_path)
    days.add("f", Saved(1.0, 100, 1), 0.0)
    machine.pass_seconds(WRITE_SECONDS / 2)
    days.add("f", Saved(1.0, 100, 1), 0.0)
    machine.pass_seconds(WRITE_SECONDS / 2)  # the first is a minute old
    days.add("f", Saved(4.0, 400, 1), 0.0)
    machine.pass_seconds(WRITE_SECONDS / 2)
    assert shown(machine.start(tmp_path), "today") == (2.0, 200, 2)  # as after kill -9 here
    machine.pass_seconds(WRITE_SECONDS / 2)
    assert shown(machine.start(tmp_path), "today") == shown(days, "today") == (6.0, 600, 3)
    assert machine.timers == []  # an idle server writes nothing
    assert WRITE_SECONDS <= 60


def test_a_stop_loses_nothing_and_a_day_begins_at_midnight(
    machine: Machine, tmp_path: Path
) -> None:
    """Savings of a day and in total survive a stop, today's start from zero at midnight, and
    closing twice counts once.
    """
    days = machine.start(tmp_path)
    days.add("f", Saved(1.0, 100, 1), 0.0)
    days.close()
    assert machine.timers == []
    machine.pass_seconds(DAY / 2 - 1)
    again = machine.start(tmp_path)
    assert shown(again, "today") == (1.0, 100, 1)
    again.add("f", Saved(2.0, 200, 1), 0.0)
    machine.pass_seconds(1)
    assert shown(again, "today") == (0.0, 0, 0)
    again.add("f", Saved(4.0, 400, 1), 0.0)
    assert shown(again, "today") == (4.0, 400, 1)
    assert shown(again, "total") == (7.0, 700, 3)
    again.close()
    again.close()
    assert shown(machine.start(tmp_path), "total") == (7.0, 700, 3)
    assert again.since_start == Saved(6.0, 600, 2)


@pytest.fixture
def auckland(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Pacific/Auckland")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("auckland")
def test_the_day_is_the_local_one(machine: Machine) -> None:
    machine.now = 1_795_867_200.0  # 2026-11-28 12:00 UTC
    assert machine.start(None).today() == "2026-11-29"


def test_two_servers_share_a_directory(machine: Machine, tmp_path: Path) -> None:
    one = machine.start(tmp_path)
    other = machine.start(tmp_path)
    one.add("f", Saved(1.0, 100, 1), 0.0)
    other.add("f", Saved(2.0, 200, 1), 0.0)
    one.close()
    other.close()
    assert shown(other, "total") == shown(machine.start(tmp_path), "total") == (3.0, 300, 2)


def test_a_year_of_days_and_a_few_speeds_are_kept(machine: Machine, tmp_path: Path) -> None:
    days = machine.start(tmp_path)
    for number in range(MAX_DAYS + 40):
        days.add(f"model {number}", Saved(1.0, 10, 1), 100.0 + number)
        machine.pass_seconds(DAY)
    kept = json.loads((tmp_path / FILE).read_bytes())
    assert len(kept["days"]) == MAX_DAYS
    assert "2026-11-28" not in kept["days"]
    assert len(kept["speeds"]) == MAX_SPEEDS
    assert kept["speeds"][f"model {MAX_DAYS + 39}"] == 100.0 + MAX_DAYS + 39
    assert shown(days, "total")[2] == MAX_DAYS + 40  # what is forgotten of a day stays in the sum
    assert (tmp_path / FILE).stat().st_size < 2**16


def test_a_model_starts_with_the_speed_of_an_earlier_run(machine: Machine, tmp_path: Path) -> None:
    days = machine.start(tmp_path)
    days.add("f", Saved(1.0, 100, 1), 640.0)
    days.add("f", Saved(1.0, 100, 1), 0.0)  # none was measured: the one before stays
    days.close()
    again = machine.start(tmp_path)
    from_disk = RequestStats(n_prompt=6466, source="disk", n_cached=6400, n_evaluated=66)
    assert again.account("f").count(from_disk, 1000.0, is_alone=True) == pytest.approx(10.0)
    assert again.account("another").count(from_disk, 1000.0, is_alone=True) == pytest.approx(
        6400 / 66
    )


DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"total": {"seconds": -1}}',
    b'{"total": {"seconds": 1e999}}',
    b'{"total": {"seconds": "many"}}',
    b'{"days": {"yesterday": {"seconds": 1}}}',
    b'{"speeds": {"f": -5}}',
    b" " * 2**20,
]


@pytest.mark.parametrize("raw", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_replaced(machine: Machine, tmp_path: Path, raw: bytes) -> None:
    (tmp_path / FILE).write_bytes(raw)
    days = machine.start(tmp_path)
    assert shown(days, "total") == (0.0, 0, 0)
    days.add("f", Saved(1.0, 100, 1), 0.0)
    days.close()
    assert shown(machine.start(tmp_path), "total") == (1.0, 100, 1)


def test_a_file_that_is_damaged_meanwhile_costs_nothing(machine: Machine, tmp_path: Path) -> None:
    days = machine.start(tmp_path)
    days.add("f", Saved(1.0, 100, 1), 0.0)
    machine.pass_seconds(WRITE_SECONDS)
    for damage in (lambda: (tmp_path / FILE).write_bytes(b"{"), (tmp_path / FILE).unlink):
        damage()
        days.add("f", Saved(1.0, 100, 1), 0.0)
        machine.pass_seconds(WRITE_SECONDS)
    assert shown(days, "total") == shown(machine.start(tmp_path), "total") == (3.0, 300, 3)


def test_a_write_that_fails_is_tried_again_and_told_once(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "kv"
    days = machine.start(directory)
    directory.write_bytes(b"")  # a file is in its place
    for _ in range(3):
        days.add("f", Saved(1.0, 100, 1), 0.0)
        machine.pass_seconds(WRITE_SECONDS)
        assert len(machine.timers) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "time saved: cannot write saved.json: File exists; it is kept in memory"
    ]
    assert shown(days, "today") == (3.0, 300, 3)
    directory.unlink()
    machine.pass_seconds(WRITE_SECONDS)
    assert shown(machine.start(directory), "today") == (3.0, 300, 3)


def test_a_directory_that_was_removed_is_made_again(machine: Machine, tmp_path: Path) -> None:
    days = machine.start(tmp_path / "kv")
    days.add("f", Saved(1.0, 100, 1), 0.0)
    days.close()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "kv" / FILE).stat().st_mode & 0o777 == 0o600
    assert shown(machine.start(tmp_path / "kv"), "total") == (1.0, 100, 1)


def test_a_process_that_was_killed_while_it_wrote_leaves_nothing(
    machine: Machine, tmp_path: Path
) -> None:
    (tmp_path / f".123-{'0' * 16}.tmp").write_bytes(b"{")
    with temp_path(tmp_path) as used:  # another process writes
        machine.start(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [used.name]


def test_a_link_is_not_followed(machine: Machine, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b'{"total": {"seconds": 9}}')
    (tmp_path / FILE).symlink_to(other)
    days = machine.start(tmp_path)
    days.add("f", Saved(1.0, 100, 1), 0.0)
    days.close()
    assert shown(days, "total") == (1.0, 100, 1)
    assert other.read_bytes() == b'{"total": {"seconds": 9}}'


def test_the_timer_is_another_thread() -> None:
    ran = threading.Event()
    names: list[str] = []

    def run() -> None:
        names.append(threading.current_thread().name)
        ran.set()

    start_timer(0.0, run)
    assert ran.wait(60)
    assert names == ["pyctl-saved"]

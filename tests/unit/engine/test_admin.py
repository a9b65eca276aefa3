"""Views and changes of the engine's sequences and cache, from other threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyctl.engine.loop_detector import ReplyLoop
from pyctl.engine.request import Failed, Timings
from pyctl.errors import RequestError, UnavailableError
from pyctl.prompt import Prompt
from tests.unit.engine.watched_worker import PROMPT, WatchedWorker, result
from tests.waiting import until


def test_a_running_request_is_stopped_by_its_id(make: Any) -> None:
    bench = make()
    handle = bench.begin()

    def task() -> int:
        (live,) = result(bench.admin.view()).live
        return int(live.task)

    until(lambda: task() >= 0)
    running = task()
    assert not result(bench.admin.stop(running + 1))
    assert result(bench.admin.stop(running))
    last = list(handle)[-1]
    assert isinstance(last, Failed)
    assert "stopped from the cache view" in str(last.error)
    until(lambda: task() == -1)
    assert not result(bench.admin.stop(running))


def test_slots_show_the_request_that_they_serve(make: Any) -> None:
    bench = make(n_seqs=2)
    assert [view.task for view in result(bench.admin.sequences())] == [-1, -1]
    handle = bench.begin()
    until(lambda: any(view.n_predicted > 5 for view in result(bench.admin.sequences())))
    (view,) = [view for view in result(bench.admin.sequences(with_tokens=True)) if view.busy]
    assert view.prompt == tuple(PROMPT.tokens.tolist())
    assert view.n_evaluated == 300
    assert view.n_tokens == 300 + len(view.reply)
    assert view.n_predicted == len(view.reply) + 1
    stats = result(bench.admin.stats())
    assert stats.n_processing == 1
    assert stats.n_waiting == 0
    handle.cancel()
    until(lambda: not any(view.busy for view in result(bench.admin.sequences())))


def test_the_counters_count_what_was_served(make: Any) -> None:
    bench = make()
    bench.ask(PROMPT, 8)
    total = result(bench.admin.stats()).total
    assert total.n_evaluated == 300
    assert total.n_cached == 0
    assert total.n_predicted == 8
    assert total.n_longest == 307
    assert total.n_calls == total.n_busy > 8
    again = bench.ask(PROMPT, 8).stats
    stats = result(bench.admin.stats())
    assert stats.recent.n_cached == again.n_cached > 0
    assert stats.total.n_evaluated == 300 + again.n_evaluated == 300 + stats.recent.n_evaluated


def test_statistics_that_were_read_stay_as_they_are(make: Any) -> None:
    """The histograms of the engine change in place; those of an earlier read do not."""
    bench = make()
    looping = Timings(0, 1, 1.0, 3, 10.0, 20.0, loop=ReplyLoop(2, 400, is_ended=True))
    bench.engine.counters.count_reply(looping, "disk")
    earlier = result(bench.admin.stats())
    bench.engine.counters.count_reply(looping, "disk")
    later = result(bench.admin.stats())
    assert sum(earlier.total.replies.all_first_tokens.counts) == 1
    assert sum(later.total.replies.all_first_tokens.counts) == 2
    assert later.recent.n_loops == 1
    assert later.recent.n_loops_ended == 1


def test_a_slot_is_saved_erased_and_restored(make: Any, tmp_path: Path) -> None:
    bench = make()
    other = make()
    first = bench.ask(PROMPT)
    path = tmp_path / "a.bin"
    saved = result(bench.admin.save(0, path))
    assert saved.n_tokens == 307
    assert saved.n_bytes == path.stat().st_size
    assert result(bench.admin.erase(5)) == 307  # numbers wrap around
    assert result(bench.admin.erase(0)) == 0
    assert result(other.admin.restore(0, path)).n_tokens == 307
    longer = Prompt.from_ids([*PROMPT.tokens, *first.tokens[:-1], 7, 8, 9])
    reply = other.ask(longer)
    assert reply.stats.source == "live"
    assert reply.stats.n_cached == 307
    bench.ask(PROMPT)
    assert bench.ask(longer).tokens == reply.tokens


def test_a_file_that_is_no_slot(make: Any, tmp_path: Path) -> None:
    bench = make()
    bench.ask(PROMPT)
    (tmp_path / "bad").write_bytes(bytes(64))
    for name in ("bad", "missing"):
        with pytest.raises(RequestError, match="Unable to restore slot"):
            result(bench.admin.restore(0, tmp_path / name))
    warm = bench.ask(PROMPT)
    assert warm.stats.source == "ram", "the conversation that was there went to the cache"


def test_a_busy_slot_is_saved_when_it_is_free(make: Any, tmp_path: Path) -> None:
    bench = make()
    handle = bench.begin()
    until(lambda: result(bench.admin.sequences())[0].n_predicted > 0)
    future = bench.admin.save(0, tmp_path / "a.bin")
    result(bench.worker.call(lambda: None))
    assert not future.done()
    handle.cancel()
    assert result(future).n_tokens >= 300


def test_closing_ends_what_waits_for_a_slot(make: Any, tmp_path: Path) -> None:
    bench = make()
    bench.begin()
    until(lambda: result(bench.admin.sequences())[0].n_predicted > 0)
    future = bench.admin.save(0, tmp_path / "a.bin")
    result(bench.worker.call(lambda: None))
    bench.worker.close()
    with pytest.raises(UnavailableError):
        result(future)


def ids(bench: WatchedWorker) -> set[str]:
    return {snapshot.id for snapshot in result(bench.admin.view()).snapshots}


def test_a_view_shows_snapshots_and_live_sequences(make: Any) -> None:
    bench = make()
    bench.ask(PROMPT)
    view = result(bench.admin.view())
    assert 290 in {snapshot.n for snapshot in view.snapshots}
    (live,) = view.live
    assert live.n == 307
    assert not live.busy
    assert live.task == -1
    assert live.at in ids(bench), "the deepest snapshot of its tokens"


def test_the_revision_grows_with_each_change_and_stays_without_one(make: Any) -> None:
    bench = make()
    bench.ask(PROMPT)
    until(lambda: not result(bench.admin.sequences())[0].busy)
    revision = result(bench.admin.revision())
    assert result(bench.admin.revision()) == revision
    assert result(bench.admin.view()).revision == revision
    bench.ask(PROMPT)
    after = result(bench.admin.revision())
    assert after > revision
    name = max(ids(bench))
    assert result(bench.admin.pin(name, True))
    assert result(bench.admin.revision()) > after


def test_a_pinned_snapshot_is_neither_dropped_nor_cleared(make: Any) -> None:
    bench = make()
    bench.ask(PROMPT)
    name = max(ids(bench))
    assert result(bench.admin.pin(name, True))
    with pytest.raises(RequestError, match="unpin it first"):
        bench.admin.drop(name)
    result(bench.admin.clear())
    assert ids(bench) == {name}
    assert result(bench.admin.pin(name, False))
    assert bench.admin.drop(name)
    assert ids(bench) == set()


def test_a_name_that_no_snapshot_has_is_not_there(make: Any) -> None:
    bench = make()
    assert not result(bench.admin.pin("7-0000", True))
    assert not bench.admin.drop("7-0000")
    assert result(bench.admin.clear()) == 0


def test_pins_have_to_fit_into_the_cache(make: Any) -> None:
    bench = make()
    bench.ask(PROMPT)
    bench.engine.prefix_cache.cache.budget.limit = 1
    with pytest.raises(RequestError, match="exceed --cache-ram"):
        result(bench.admin.pin(max(ids(bench)), True))


def test_clearing_leaves_live_sequences(make: Any) -> None:
    bench = make()
    bench.ask(PROMPT)
    n_snapshots = len(ids(bench))
    assert result(bench.admin.clear()) == n_snapshots > 0
    assert result(bench.admin.view()).live[0].n == 307


def test_the_cache_has_no_contradictions(make: Any) -> None:
    bench = make()
    bench.ask(PROMPT)
    assert result(bench.admin.check()) == []
    bench.engine.prefix_cache.cache.index.pool.n_bytes += 1
    assert result(bench.admin.check()) != []


def test_replies_are_listed_for_an_hour(make: Any) -> None:
    bench = make()
    bench.ask(PROMPT)
    until(lambda: result(bench.admin.requests()))
    bench.advance(1800)
    ((age, served),) = result(bench.admin.requests())
    assert age >= 1800
    assert served.timings.n_predicted == 8
    bench.advance(1800)
    assert result(bench.admin.requests()) == []


def test_memory_counts_snapshots_and_prompts(make: Any) -> None:
    bench = make()
    empty = result(bench.admin.memory())
    assert empty.snapshots == 0
    bench.ask(PROMPT)
    full = result(bench.admin.memory())
    assert full.snapshots == result(bench.admin.view()).n_bytes > 0
    assert full.recent_prompts > empty.recent_prompts
    assert full.blocks.used > 0


def test_conversations_are_counted_by_their_ends(make: Any) -> None:
    bench = make()
    assert result(bench.admin.n_kept()) == 0
    bench.ask(PROMPT)
    bench.ask(Prompt.from_ids([1 + i % 59 for i in range(300)], [100, 290]))
    assert result(bench.admin.n_kept()) == 2


def test_without_a_disk_nothing_is_stored(make: Any) -> None:
    bench = make()
    assert bench.admin.stored() == []
    assert bench.admin.n_saved is None


def test_a_file_with_more_tokens_than_a_sequence_holds_is_refused(
    make: Any, tmp_path: Path
) -> None:
    bench = make()
    bench.ask(PROMPT)
    result(bench.admin.save(0, tmp_path / "a.bin"))
    bench.engine.sequences[0].capacity = 100
    with pytest.raises(RequestError, match="does not fit in the slot context"):
        result(bench.admin.restore(0, tmp_path / "a.bin"))
    assert result(bench.admin.erase(0)) == 0, "a refused file leaves an empty sequence"

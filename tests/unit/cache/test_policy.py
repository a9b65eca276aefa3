"""Disk policies: their syntax, the prefixes they select, and the list of prompts that `auto`
compares with.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.disk_policy import DiskPolicy, Selection
from pyctl.cache.recent import Recent, RecentMatches, RecentPrompts
from pyctl.disk.recent_files import RecentFiles
from pyctl.errors import RequestError
from pyctl.files.atomic_file import FileCalls
from pyctl.prompt import Prompt, common_prefix
from tools.disk_simulation import ROW_BYTES, STATE_BYTES, WORKLOADS, Writer, prompt_of, simulate


def prompts(*texts: str) -> list[Recent]:
    return [Recent(Prompt.of([int(token) for token in text.split()])) for text in texts]


def matches(prompt: Prompt, recent: Sequence[Recent] = ()) -> RecentMatches:
    return RecentMatches(
        prompt, recent, [common_prefix(one.prompt.tokens, prompt.tokens) for one in recent]
    )


def of_length(n: int, *boundaries: int) -> Prompt:
    return Prompt.of(np.arange(n), boundaries)


def chat(*lengths: int, seed: str = "", upto: int = 0) -> Prompt:
    """Return messages of these lengths and a generation header of 4 tokens; those after ``upto``
    depend on ``seed``.
    """
    texts = [f"{i}:{length}:{seed if i >= upto else ''}" for i, length in enumerate(lengths)]
    parts = [
        np.random.default_rng(list(text.encode())).integers(10, 9999, length)
        for text, length in zip(texts, lengths, strict=True)
    ]
    return Prompt.of(np.concatenate([*parts, np.array([1, 2, 3, 4])]), np.cumsum(lengths))


# -- select
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "min_tokens", "selected"), [(2000, 512, 1000), (500, 0, 0), (2000, 1001, 0)]
)
def test_fixed(n: int, min_tokens: int, selected: int) -> None:
    chosen = DiskPolicy.parse("1000").select(
        matches(of_length(n, 100)), min_tokens=min_tokens, cold_max=1
    )
    assert chosen.selected == selected
    assert chosen.positions == ((selected,) if selected else ())


def test_full_is_the_last_boundary_and_of_long_prompts_the_beginning() -> None:
    def positions(prompt: Prompt, min_tokens: int = 512, cold_max: int = 10_240) -> tuple[int, ...]:
        return (
            DiskPolicy("full")
            .select(matches(prompt), min_tokens=min_tokens, cold_max=cold_max)
            .positions
        )

    assert positions(of_length(9000, 100, 8000, 8990)) == (8990,)
    assert positions(of_length(20_000, 9000, 11_000, 19_990)) == (9000, 19_990)
    assert positions(of_length(20_000, 9000, 11_000, 19_990), cold_max=0) == (19_990,)
    assert positions(of_length(20_000, 400, 11_000, 19_990)) == (19_990,)
    assert positions(of_length(500, 300)) == ()
    assert positions(of_length(20_000)) == (20_000,)


def test_off_selects_nothing() -> None:
    prompt = of_length(9000, 8000)
    assert (
        DiskPolicy("off").select(matches(prompt, [Recent(prompt)]), min_tokens=0, cold_max=9000)
        == Selection()
    )


def persisted(log: RecentPrompts, prompt: Prompt, start: int = 0) -> tuple[int, ...]:
    chosen = DiskPolicy("auto").select(log.compare(prompt), min_tokens=50, cold_max=0, start=start)
    log.add(prompt)
    return chosen.positions


def test_a_conversation_is_persisted_to_its_end() -> None:
    log = RecentPrompts()
    assert persisted(log, chat(600, 100)) == ()
    assert persisted(log, chat(600, 100, 50, 60)) == (600, 810)
    assert persisted(log, chat(600, 100, 50, 60, 40, 30), start=810) == (600, 810, 880)


def test_a_dynamic_tail_is_left_out() -> None:
    log = RecentPrompts()
    for i in range(3):
        assert persisted(log, chat(600, 100, 200, seed=str(i), upto=2)) == ((600, 700) if i else ())


def test_a_message_that_is_replaced_at_the_end_of_each_turn_is_left_out() -> None:
    log = RecentPrompts()
    assert persisted(log, chat(600, 100, 70, seed="a", upto=2)) == ()
    assert persisted(log, chat(600, 100, 90, 80, 70, seed="b", upto=4)) == (600, 870)


def test_a_new_conversation_is_left_as_the_one_before_was() -> None:
    log = RecentPrompts()
    persisted(log, chat(600, 100))
    persisted(log, chat(600, 100, 50, 60))
    assert persisted(log, chat(600, 110, seed="other", upto=1)) == (600, 710)


def test_of_three_still_to_be_evaluated_the_scope_waits() -> None:
    log = RecentPrompts()
    persisted(log, chat(600, 300, 100))
    persisted(log, chat(600, 300, 100, 50, 60))
    other = chat(600, 300, 110, seed="other", upto=2)
    recent = log.compare(other)
    assert recent.nearest() is not None
    policy = DiskPolicy("auto")
    assert policy.select(recent, min_tokens=50, cold_max=0).positions == (600, 1010)
    assert policy.select(recent, min_tokens=50, cold_max=0, start=600).positions == (600, 900, 1010)


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=24)
boundaries = st.sets(st.integers(1, 23), max_size=6)
recents = st.lists(
    st.builds(lambda t, b, n: Recent(Prompt.of(t, b), n), tokens, boundaries, st.integers(0, 7)),
    max_size=6,
)


@given(
    ids=tokens,
    at=boundaries,
    recent=recents,
    window=st.integers(0, 7),
    minimum=st.integers(0, 9),
    data=st.data(),
)
def test_what_auto_selects(
    ids: list[int],
    at: set[int],
    recent: list[Recent],
    window: int,
    minimum: int,
    data: st.DataObject,
) -> None:
    prompt = Prompt.of(ids, at)
    start = data.draw(st.integers(0, len(prompt)))
    chosen, wider = (
        DiskPolicy("auto", n).select(
            matches(prompt, recent), min_tokens=minimum, cold_max=5, start=start
        )
        for n in (window, window + 1)
    )
    assert chosen.selected <= wider.selected
    longest = max(
        (common_prefix(one.prompt.tokens, prompt.tokens) for one in recent[:window]), default=0
    )
    cuts = prompt.boundaries or range(longest + 1)
    assert chosen.safe == max((cut for cut in cuts if cut <= longest), default=0)
    assert chosen.selected == (chosen.safe if chosen.safe >= minimum else 0)
    assert list(chosen.positions) == sorted(set(chosen.positions))
    assert sum(n > start for n in chosen.positions) <= 2
    for n in (chosen.selected, *chosen.positions):
        assert 0 <= n <= len(prompt)
        assert n >= minimum or n == 0
        assert n == 0 or not prompt.boundaries or n in prompt.boundaries
    assert 0 not in chosen.positions
    if not longest:
        assert chosen == Selection()


# -- forms
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "off,spill",
        "none,spill",
        "spill,spill",
        "spill,auto",
        "auto,spill,spill",
        ",spill",
        "auto:0,spill",
        "auto,",
    ],
)
def test_other_forms_with_the_word_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        DiskPolicy.of_server(text)


@pytest.mark.parametrize(
    ("text", "name", "spill"),
    [
        ("auto:30", "auto:30", False),
        ("AUTO,Spill", "auto:30,spill", True),
        ("auto:8,spill", "auto:8,spill", True),
        ("full,spill", "full,spill", True),
        ("700,spill", "fixed:700,spill", True),
        ("spill", "spill", True),
        ("none", "off", False),
    ],
)
def test_a_server_may_also_write_what_leaves_ram(text: str, name: str, spill: bool) -> None:
    policy = DiskPolicy.of_server(text)
    assert (policy.name, policy.spill) == (name, spill)
    prompt = chat(900, 40, 30)
    given = {"min_tokens": 0, "cold_max": 0}
    if name != "spill":
        kind = DiskPolicy.parse(text.lower().removesuffix(",spill"))
        assert policy.select(matches(prompt, [Recent(prompt)]), **given) == kind.select(
            matches(prompt, [Recent(prompt)]), **given
        )
    else:
        assert policy.select(matches(prompt, [Recent(prompt)]), **given) == Selection(), (
            "nothing at once"
        )


@pytest.mark.parametrize(
    ("default", "value", "name"),
    [
        ("auto:8", None, "auto:8"),
        ("auto:8", {}, "auto:8"),
        ("auto:8", {"scope": None, "window": None}, "auto:8"),
        *(("auto:8", {"scope": word}, "off") for word in ("off", "None", "disabled")),
        *(("auto:8", {"scope": word}, "full") for word in ("FULL", "full-prefix")),
        ("auto:8", {"scope": "Auto:9"}, "auto:9"),
        ("auto:8", {"scope": "auto:1000000"}, "auto:1000000"),
        ("auto:8", {"scope": "auto"}, "auto:30"),
        ("auto:8", {"scope": "auto:4", "window": 5}, "auto:5"),
        ("auto:8", {"window": 1_000_000}, "auto:1000000"),
        ("auto:8", {"scope": 700}, "fixed:700"),
        ("auto:8", {"scope": "700", "window": 3}, "fixed:700"),
        ("auto:8,spill", None, "auto:8,spill"),
        ("auto:8,spill", {"scope": "full"}, "full,spill"),
        ("auto:8,spill", {"window": 3}, "auto:3,spill"),
        ("auto:8,spill", {"scope": 700}, "fixed:700,spill"),
        ("auto:8,spill", {"scope": "off"}, "off"),
    ],
)
def test_request_policy_overrides_default_and_keeps_spill(
    default: str, value: object, name: str
) -> None:
    assert DiskPolicy.of_request(value, DiskPolicy.of_server(default)).name == name


WINDOWS = [
    {"scope": scope, "window": each}
    for scope in ("auto", "off")
    for each in (0, -1, 1_000_001, 2.0, "3", True)
]
WORDS = (
    "spill",
    "auto,spill",
    "core",
    "task",
    "auto:0",
    "auto:-1",
    "auto:1000001",
    "-5",
    "0",
    "",
    "off:1",
    "1e3",
)
SCOPES = [{"scope": each} for each in (*WORDS, 0, -3, 1_000_001, 1.5, True, ["auto"], {})]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([*WINDOWS, {"window": [1]}], r"^prefix_cache\.window must be a positive integer$"),
        (
            SCOPES,
            (
                r"^prefix_cache\.scope must be off, full, auto, auto:<window>, or a positive token "
                r"count$"
            ),
        ),
        (["auto", 3, ["auto"], True], r"^prefix_cache must be an object"),
    ],
)
def test_a_bad_override_is_refused(values: Sequence[object], message: str) -> None:
    for value in values:
        with pytest.raises(RequestError, match=message):
            DiskPolicy.of_request(value, DiskPolicy.of_server("auto,spill"))


# -- the list of recent prompts
# ----------------------------------------------------------------------------------


def contents(log: RecentPrompts) -> list[tuple[list[int], tuple[int, ...], int]]:
    return [
        (one.prompt.tokens.tolist(), one.prompt.boundaries, one.left) for one in log.newest_first()
    ]


def test_a_conversation_is_one_entry_and_the_newest_comes_first() -> None:
    log = RecentPrompts()
    first = chat(30, 10)
    second = chat(30, 10, 20, 10)
    other = chat(40, 5)
    for prompt in (first, other, second, second):
        log.add(prompt)
    assert [one.prompt for one in log.newest_first()] == [second, other]
    assert [one.left for one in log.newest_first()] == [1, 0]


def test_the_list_is_bounded() -> None:
    log = RecentPrompts(capacity=3, max_tokens=100)
    for i in range(5):
        log.add(Prompt.of([i] * 10))
    assert [one.prompt.tokens[0] for one in log.newest_first()] == [4, 3, 2]
    log.add(Prompt.of([7] * 85))
    assert [len(one.prompt) for one in log.newest_first()] == [85, 10]
    log.add(Prompt.of([8] * 101))
    assert len(log) == 0


@given(ids=st.lists(st.tuples(tokens, boundaries, st.booleans()), max_size=12), prompt=tokens)
def test_all_are_compared_with_one_comparison(
    ids: list[tuple[list[int], set[int], bool]], prompt: list[int]
) -> None:
    log = RecentPrompts(capacity=5, max_tokens=60)
    new = Prompt.of(prompt)
    for each, at, for_disk in ids:
        log.add(Prompt.of(each, at), for_disk=for_disk)
        assert log.compare(new).shared == matches(new, log.newest_first()).shared
    reloaded = RecentPrompts(capacity=5, max_tokens=60)
    reloaded.load(log.newest_first())
    assert reloaded.compare(new).shared == log.compare(new).shared


def test_what_stays_off_the_disk_is_compared_with_but_not_by_a_policy() -> None:
    log = RecentPrompts()
    stored = chat(600, 100)
    private = chat(600, 100, 50)
    longer = chat(600, 100, 50, 40)
    log.add(stored)
    log.add(private, for_disk=False)
    assert [one.prompt for one in log.newest_first()] == [private, stored], (
        "it takes nothing from the policy"
    )
    found = log.compare(longer)
    assert found.nearest().recent.prompt is private  # type: ignore[union-attr]
    assert found.nearest(1, for_disk=True).recent.prompt is stored  # type: ignore[union-attr]
    log.add(longer)
    assert [one.prompt for one in log.newest_first()] == [longer]


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@given(
    recent=st.lists(
        st.tuples(st.lists(st.integers(0, 150_000), min_size=1), boundaries), max_size=6
    )
)
def test_the_list_survives_a_restart(
    recent: list[tuple[list[int], set[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "prompts"
    log = RecentPrompts()
    files = RecentFiles(path)
    for ids, at in recent:
        log.add(Prompt.of(ids, at))
        files.save(log.newest_first())
        loaded = RecentPrompts()
        loaded.load(RecentFiles(path).load())
        assert contents(loaded) == contents(log)
        assert len(files_in(path)) == len(log)


@pytest.mark.parametrize("step", [0, -10])
def test_the_list_keeps_its_order_whatever_the_clock_says(tmp_path: Path, step: int) -> None:
    clock = itertools.count(10**18, step)
    log = RecentPrompts()
    files = RecentFiles(tmp_path, clock_ns=clock.__next__)
    for seed in range(12):
        log.add(chat(30, 10, seed=str(seed)))
        files.save(log.newest_first())
        if seed % 4 == 3:  # a restart
            files = RecentFiles(tmp_path)
            log.load(files.load())
    assert contents(log)[0][0] == chat(30, 10, seed="11").tokens.tolist()
    found = [one.prompt.tokens.tolist() for one in RecentFiles(tmp_path).load()]
    assert found == [chat(30, 10, seed=str(seed)).tokens.tolist() for seed in reversed(range(12))]


def test_a_save_writes_what_is_new_and_removes_what_is_continued(tmp_path: Path) -> None:
    log = RecentPrompts()
    files = RecentFiles(tmp_path)
    log.add(chat(30, 10))
    log.add(chat(40, 5))
    files.save(log.newest_first())
    first, second = files_in(tmp_path)
    log.add(chat(30, 10, 20, 10))
    log.add(chat(50, 5), for_disk=False)
    files.save(log.newest_first())
    kept, new = files_in(tmp_path)
    assert (kept, new > second) == (second, True)
    assert first not in (kept, new)
    files.save(log.newest_first())
    assert files_in(tmp_path) == [kept, new]


def test_the_files_are_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    log = RecentPrompts()
    files = RecentFiles(tmp_path, max_bytes=5_000)
    for seed in range(12):
        log.add(chat(300, 100, seed=str(seed)))
        files.save(log.newest_first())
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5_000
    found = RecentFiles(tmp_path).load()
    assert len(found) > 3
    newest = [one.prompt.tokens.tolist() for one in log.newest_first()]
    assert [one.prompt.tokens.tolist() for one in found] == newest[: len(found)]
    files.save(log.newest_first())
    assert len(files_in(tmp_path)) == len(found), "what went for want of room is not written again"
    log.add(chat(9000))
    files.save(log.newest_first())
    assert len(files_in(tmp_path)) == len(found), "what can never fit drives nothing out"


def test_nothing_is_written_that_the_day_has_no_bytes_for(tmp_path: Path) -> None:
    left = [1]
    log = RecentPrompts()
    files = RecentFiles(tmp_path, spend=lambda n_bytes: bool(left and left.pop()))
    log.add(chat(30, 10))
    log.add(chat(40, 10))
    files.save(log.newest_first())
    assert len(files_in(tmp_path)) == 1
    left.append(1)
    files.save(log.newest_first())
    assert len(files_in(tmp_path)) == 2


def test_damaged_files_are_removed_and_the_others_are_read(tmp_path: Path) -> None:
    log = RecentPrompts()
    assert RecentFiles(tmp_path / "none").load() == []
    log.add(chat(30, 10))
    log.add(chat(40, 10))
    RecentFiles(tmp_path).save(log.newest_first())
    path, other = sorted(tmp_path.iterdir())
    whole = path.read_bytes()
    damaged = [whole[:n] for n in range(len(whole))] + [whole + b"\0"]
    damaged += [whole[:i] + bytes([whole[i] ^ 0x40]) + whole[i + 1 :] for i in range(len(whole))]
    for data in damaged:
        path.write_bytes(data)
        assert len(RecentFiles(tmp_path).load()) == 1
        assert not path.exists()
    path.write_bytes(whole)
    assert len(RecentFiles(tmp_path).load()) == 2
    (tmp_path / "note").write_bytes(b"x")
    RecentFiles(tmp_path).load()
    assert files_in(tmp_path) == sorted([path.name, other.name, "note"])


def test_a_file_of_another_layout_is_damage(tmp_path: Path) -> None:
    for numbers in ([3], [5, 0, 0, 1, 2], [-4, 9, 0], [2, -1, 0, 7, 7], [2, 1, 0, 1, 2]):
        frame = zstandard.compress(np.array(numbers, "<i4").tobytes())
        data = b"PYRP\x01" + hashlib.blake2b(frame, digest_size=16).digest() + frame
        (tmp_path / f"{1:016x}-{1:08x}.prompt").write_bytes(data)
        assert RecentFiles(tmp_path).load() == []


def test_a_list_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    log = RecentPrompts()
    full = OSError(28, "No space left on device")
    calls = FileCalls(replace=Mock(wraps=os.replace, side_effect=[full, DEFAULT]))
    files = RecentFiles(tmp_path, calls=calls)
    log.add(chat(30, 10))

    with pytest.raises(OSError, match="No space"):
        files.save(log.newest_first())
    assert files_in(tmp_path) == []
    files.save(log.newest_first())
    assert len(files_in(tmp_path)) == 1


# -- the simulation
# ----------------------------------------------------------------------------------


def test_the_simulation_counts_as_by_hand() -> None:
    row = ROW_BYTES
    state = STATE_BYTES
    fan = [chat(600, 100, seed=str(i), upto=1) for i in range(3)]

    tally = simulate(fan, DiskPolicy("auto"))
    assert (tally.requests, tally.hits, tally.cached, tally.cacheable) == (3, 1, 600, 1200)
    assert (tally.states, tally.written) == (1, 600 * row + state)

    tally = simulate(fan, DiskPolicy("full"))
    assert (tally.hits, tally.cached, tally.states, tally.written) == (
        0,
        0,
        3,
        3 * (700 * row + state),
    )

    talk = [chat(600, 100), chat(600, 100, 50, 60), chat(600, 100, 50, 60, 40, 30)]
    tally = simulate(talk, DiskPolicy("full"))
    assert (tally.hits, tally.cached, tally.cacheable) == (2, 700 + 810, 700 + 810)
    assert (tally.states, tally.written) == (3, 880 * row + 3 * state)

    tally = simulate(talk, DiskPolicy("auto"))
    assert (tally.hits, tally.cached) == (1, 810)
    assert (tally.states, tally.written) == (3, 880 * row + 3 * state)  # 600 and 810, then 880

    tally = simulate(talk, DiskPolicy.parse("650"))
    assert (tally.hits, tally.cached, tally.states, tally.written) == (
        2,
        1300,
        1,
        650 * row + state,
    )
    assert simulate(talk, DiskPolicy("off")).hits == 0


def test_auto_reaches_its_aims_and_writes_less_than_full() -> None:
    aims = {"stable_head": 0.93, "drifting_middle": 0.93, "task_state": 0.9, "recent_turns": 0.9}
    for workload in WORKLOADS:
        if workload.__name__ in aims:
            run = [prompt_of(messages) for messages in workload(Writer(0))]
            tally, full = (simulate(run, DiskPolicy(kind)) for kind in ("auto", "full"))
            assert tally.hits >= aims[workload.__name__] * tally.requests
            assert tally.cached >= 0.9 * tally.cacheable
            assert tally.written <= full.written

"""Disk policies: their syntax, the prefixes they select, and the list of prompts that `auto`
compares with.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.disk_policy import DiskPolicy, Selection
from pyctl.cache.recent import RecentPrompt, RecentPrompts
from pyctl.errors import RequestError
from pyctl.prompt import Prompt, common_prefix
from tests.unit.cache.recent_prompts import (
    boundaries,
    chat,
    matches,
    of_length,
    recents,
    tokens,
)
from tools.disk_simulation import ROW_BYTES, STATE_BYTES, WORKLOADS, Writer, prompt_of, simulate

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
        DiskPolicy("off").select(
            matches(prompt, [RecentPrompt(prompt)]), min_tokens=0, cold_max=9000
        )
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
    assert recent.closest() is not None
    policy = DiskPolicy("auto")
    assert policy.select(recent, min_tokens=50, cold_max=0).positions == (600, 1010)
    assert policy.select(recent, min_tokens=50, cold_max=0, start=600).positions == (600, 900, 1010)


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
    recent: list[RecentPrompt],
    window: int,
    minimum: int,
    data: st.DataObject,
) -> None:
    """The selection of `auto` follows from the longest common prefix with a recent prompt: it ends
    at a boundary, has the least length or is empty, and a wider window never selects less.
    """
    prompt = Prompt.from_ids(ids, at)
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
    assert chosen.eligible_len == max((cut for cut in cuts if cut <= longest), default=0)
    assert chosen.selected == (chosen.eligible_len if chosen.eligible_len >= minimum else 0)
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
        DiskPolicy.from_flag(text)


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
    policy = DiskPolicy.from_flag(text)
    assert policy.name == name
    assert policy.spill == spill
    prompt = chat(900, 40, 30)
    given = {"min_tokens": 0, "cold_max": 0}
    if name != "spill":
        kind = DiskPolicy.parse(text.lower().removesuffix(",spill"))
        assert policy.select(matches(prompt, [RecentPrompt(prompt)]), **given) == kind.select(
            matches(prompt, [RecentPrompt(prompt)]), **given
        )
    else:
        assert policy.select(matches(prompt, [RecentPrompt(prompt)]), **given) == Selection(), (
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
    assert DiskPolicy.from_request(value, DiskPolicy.from_flag(default)).name == name


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
            DiskPolicy.from_request(value, DiskPolicy.from_flag("auto,spill"))


# -- the simulation
# ----------------------------------------------------------------------------------


def test_the_simulation_counts_as_by_hand() -> None:
    """The simulated hits, tokens and bytes of each policy equal the ones computed by hand: policies
    are compared by these figures.
    """
    row = ROW_BYTES
    state = STATE_BYTES
    fan = [chat(600, 100, seed=str(i), upto=1) for i in range(3)]

    tally = simulate(fan, DiskPolicy("auto"))
    assert tally.requests == 3
    assert tally.hits == 1
    assert tally.cached == 600
    assert tally.cacheable == 1200
    assert tally.states == 1
    assert tally.written == 600 * row + state

    tally = simulate(fan, DiskPolicy("full"))
    assert tally.hits == 0
    assert tally.cached == 0
    assert tally.states == 3
    assert tally.written == 3 * (700 * row + state)

    talk = [chat(600, 100), chat(600, 100, 50, 60), chat(600, 100, 50, 60, 40, 30)]
    tally = simulate(talk, DiskPolicy("full"))
    assert tally.hits == 2
    assert tally.cached == 700 + 810
    assert tally.cacheable == 700 + 810
    assert tally.states == 3
    assert tally.written == 880 * row + 3 * state

    tally = simulate(talk, DiskPolicy("auto"))
    assert tally.hits == 1
    assert tally.cached == 810
    assert tally.states == 3
    assert tally.written == 880 * row + 3 * state

    tally = simulate(talk, DiskPolicy.parse("650"))
    assert tally.hits == 2
    assert tally.cached == 1300
    assert tally.states == 1
    assert tally.written == 650 * row + state
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

"""The model behind the benchmark of fleets agrees with real engines and caches, and is deterministic."""

from __future__ import annotations

import math
from functools import cache

import pytest

from bench.fleet import LINKS, N_ACTIVE, Asked, fleet_of, recorded, servers_of, sessions_of, spread, steps_of
from bench.fleet_model import ROUTERS, Prefix, Step, Sticky, Summary

GIB = 8.0
PROGRAM = "mini_swe"


@cache
def streams() -> list[list[Asked]]:
    return recorded([PROGRAM], 2)


@cache
def run(router: str, link: str = "none", n_servers: int = 4, lifetime: float = math.inf) -> Summary:
    mine, other = steps_of(streams())
    sessions = sessions_of([(mine, other)], 4 * n_servers)
    return fleet_of(sessions, n_servers, router, 2 * n_servers, gib=32.0, link=link, lifetime=lifetime)


def test_what_two_people_share_is_the_head_of_their_program() -> None:
    mine, other = steps_of(streams())
    common = {key for step in mine for _, key in step.places} & {key for step in other for _, key in step.places}
    shared = max(n for step in mine for n, key in step.places if key in common)
    assert 600 < shared < 1000, "the system message of 600 characters and its header"
    assert all(step.places[-1][0] == len(asked.prompt) for step, asked in zip(mine, streams()[0], strict=True))


@pytest.mark.parametrize("router", ["round robin", "sticky"])
def test_the_model_says_what_engines_do(router: str) -> None:
    turns = spread(streams(), servers_of(2, GIB, None), router)
    engines = 1 - sum(turn.n_evaluated for turn in turns) / sum(turn.n for turn in turns)
    model = fleet_of(steps_of(streams()), 2, router, N_ACTIVE, gib=GIB).hit_rate
    assert abs(model - engines) < 0.06


def test_conversations_that_stay_hit_more_and_a_store_helps_those_that_do_not() -> None:
    assert run("round robin").hit_rate + 0.1 < run("sticky").hit_rate
    assert run("round robin").hit_rate < run("round robin", "1 Gbit/s").hit_rate
    assert run("round robin", "1 Gbit/s").hit_rate < run("round robin", "loopback").hit_rate
    assert run("round robin", "loopback").quantile(0.5) < run("round robin").quantile(0.5)


def test_what_servers_lose_a_store_brings_back() -> None:
    lost = run("sticky", lifetime=300.0)
    assert lost.hit_rate + 0.03 < run("sticky").hit_rate
    assert lost.hit_rate + 0.01 < run("sticky", "10 Gbit/s", lifetime=300.0).hit_rate


@pytest.mark.parametrize("link", LINKS)
def test_a_link_moves_no_more_than_it_can(link: str) -> None:
    found = run("round robin", link)
    assert found.n == len(found.waited)
    assert found.n_prompt == run("sticky").n_prompt
    assert (found.read > 0) == (found.n_fetched > 0) == (found.written > 0) == (link != "none")
    assert max(found.read, found.written) <= LINKS[link] * (found.seconds + 120)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_same_run_is_the_same(router: str) -> None:
    first = run(router)
    run.cache_clear()
    assert run(router) == first


def step(conversation: str, *keys: str) -> Step:
    return Step(conversation, tuple((100 * (i + 1), key) for i, key in enumerate(keys)), 10)


def test_a_new_conversation_goes_where_fewest_requests_run_and_stays() -> None:
    router = Sticky()
    assert [router.choose(step(name, name), [0, 0, 0]) for name in "abcd"] == [0, 1, 2, 0]
    assert router.choose(step("e", "e"), [1, 1, 0]) == 2
    assert router.choose(step("a", "a"), [9, 0, 0]) == 0


def test_a_longer_known_beginning_wins_unless_its_server_has_much_more_to_do() -> None:
    router = Prefix()
    assert router.choose(step("a", "head", "a"), [0, 0]) == 0
    assert router.choose(step("b", "other"), [0, 0]) == 1, "the one that was sent less"
    assert router.choose(step("c", "head", "c"), [6, 0]) == 0
    assert router.choose(step("d", "head", "d"), [7, 0]) == 1
    assert router.choose(step("e", "other", *(f"new {i}" for i in range(9))), [0, 1]) == 0, "a tenth is no beginning"

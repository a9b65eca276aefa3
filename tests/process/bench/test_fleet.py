"""Routers of the benchmark of several servers, and what they choose by."""

from __future__ import annotations

from bench.fleet import Prefix, Step, Sticky, recorded, steps_of


def test_what_two_people_share_is_the_head_of_their_program() -> None:
    streams = recorded(["mini_swe"], 2)
    mine, other = steps_of(streams)
    common = {key for step in mine for _, key in step.places} & {key for step in other for _, key in step.places}
    shared = max(n for step in mine for n, key in step.places if key in common)
    assert 600 < shared < 1000, "the system message of 600 characters and its header"
    assert all(step.places[-1][0] == len(asked.prompt) for step, asked in zip(mine, streams[0], strict=True))


def step(conversation: str, *keys: str) -> Step:
    return Step(conversation, tuple((100 * (i + 1), key) for i, key in enumerate(keys)))


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

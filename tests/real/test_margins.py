"""Margins of replies, which bound where a restored reply may part from a cold one."""

from __future__ import annotations

from tests.real.conftest import Reply


def reply(*places: tuple[float, float]) -> Reply:
    """Return a reply whose tokens at each place are 0 and 1, with these log-probabilities; the
    likelier one is sampled.
    """
    tokens = []
    for logprobs in places:
        top = tuple(sorted(enumerate(logprobs), key=lambda entry: -entry[1]))
        tokens.append((*top[0], top))
    return Reply(tuple(tokens), "", "", 0, 0)


COLD = reply((-0.25, -2.25), (-0.5, -0.75))


def test_a_margin_is_that_of_the_place_where_replies_part() -> None:
    assert COLD.near_tie(COLD) is None
    assert COLD.near_tie(reply((-0.25, -2.25), (-0.75, -0.5))) == 0.25
    assert COLD.near_tie(reply((-2.25, -0.25))) == 2.0
    assert COLD.near_tie(reply((-0.25, -2.25))) == float("inf"), "it ends early"


def test_noise_is_the_largest_change_of_a_margin_up_to_where_replies_part() -> None:
    assert COLD.margin_change(COLD) == 0.0
    assert COLD.margin_change(reply((-0.5, -2.25), (-0.5, -0.75))) == 0.25
    assert COLD.margin_change(reply((-0.25, -2.25), (-0.75, -0.5))) == 0.5
    assert COLD.margin_change(reply((-2.25, -0.25), (-0.5, -9.5))) == 4.0, (
        "what follows has another text before it"
    )

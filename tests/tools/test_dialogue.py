"""The dialogues that the built-in model learned from (tools/training)."""

from __future__ import annotations

from random import Random

import pytest

from tools.training.dialogue import Dialogue, conversation, needles
from tools.training.facts import KINDS, OPEN_KINDS, Fact, new_fact
from tools.training.words import Values, held_out


def test_the_same_seed_makes_the_same_conversation() -> None:
    assert conversation(Random(1), 800) == conversation(Random(1), 800) != conversation(Random(2), 800)


def test_user_and_assistant_take_turns() -> None:
    for seed in range(50):
        roles = [message.role for message in conversation(Random(seed), 600)]
        start = roles[0] == "system"
        assert set(roles[start::2]) == {"user"}
        assert set(roles[start + 1 :: 2]) == {"assistant"}


@pytest.mark.parametrize("unseen", [False, True])
def test_training_and_tests_share_no_value(unseen: bool) -> None:
    values = Values(Random(3), unseen=unseen)
    facts = [new_fact(values, OPEN_KINDS) for _ in range(500)]
    common = sum(held_out(fact.value) is not unseen for fact in facts)
    # Training also uses some common names, which no test asks for.
    assert common == 0 if unseen else common < 25


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_whatever_tells_or_answers_has_owner_before_value(kind: object) -> None:
    values = Values(Random(4))
    for _ in range(20):
        fact = Fact(kind, kind.owner(values), kind.value(values))
        for text in (fact.told(values), fact.changed(values), fact.answered):
            head, found, _ = text.rpartition(fact.value)
            assert found
            owner = fact.owner.lower()
            assert owner == "my" or owner in head.lower() or owner.replace("my ", "your ") in head.lower()


def test_the_last_value_told_is_the_one_asked_for() -> None:
    dialogue = Dialogue(Random(5))
    for _ in range(30):
        dialogue.tell()
        dialogue.change()
    (fact,) = (fact for key, fact in dialogue.facts.items() if key == list(dialogue.facts)[-1])
    dialogue.ask(fact)
    assert fact.value in dialogue.messages[-1].text
    told = next(message.text for message in dialogue.messages if fact.value in message.text)
    assert told == dialogue.messages[-4].text


def test_needles_are_told_once_and_asked_once() -> None:
    messages, questions = needles(Random(6), 2000, 6)
    assert len({question.fact.key for question in questions}) == 6
    for question in questions:
        assert held_out(question.fact.value)
        assert question.fact.value in messages[question.told].text
        assert messages[question.index].text == question.fact.answered

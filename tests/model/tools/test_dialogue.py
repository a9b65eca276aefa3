"""The dialogues that the built-in model learned from (tools/training)."""

from __future__ import annotations

import re
from random import Random

import pytest

from tools.training.dialogue import Dialogue, conversation
from tools.training.facts import Fact, Kind, Wording
from tools.training.kinds import KINDS, OPEN_KINDS, PLAIN_KINDS, new_fact
from tools.training.needles import needles
from tools.training.phrases import CHATS, DEMANDS, RIDDLES, UNKNOWN
from tools.training.phrasing import ask_freely, tell_freely
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


def bare(text: str) -> str:
    """Without what the assistant changes in an owner."""
    words = re.findall(r"[\w'-]+", text.lower())
    return " ".join(word for word in words if word not in ("my", "your", "a", "an", "the"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_whatever_tells_a_fact_has_its_owner_and_value(kind: Kind) -> None:
    values = Values(Random(4))
    for number in range(60):
        fact = Fact(kind, kind.owner(values), kind.value(values))
        told = [fact.told(values, unseen=number % 2 == 0), fact.changed(values), tell_freely(fact, values.random)]
        for text in (*told, fact.answered):
            assert fact.value in text
            assert fact.owner == "my" or bare(fact.owner) in bare(text)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_answer_has_owner_before_value_and_needs_only_be_copied(kind: Kind) -> None:
    values = Values(Random(5))
    fact = Fact(kind, kind.owner(values), kind.value(values))
    head, found, tail = fact.answered.rpartition(fact.value)
    assert found
    assert tail in (".", " coins.", " years old.")
    assert fact.owner == "my" or bare(fact.owner) in bare(head)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_question_holds_what_it_asks_for(kind: Kind) -> None:
    values = Values(Random(6))
    for number in range(60):
        fact = Fact(kind, kind.owner(values), "VALUE")
        for text in (ask_freely(fact, values.random, unseen=number % 2 == 0), fact.asked(values)):
            assert "VALUE" not in text
            assert "{" not in text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_held_out_words_are_others_and_enough(kind: Kind) -> None:
    for wording in (kind.tell, kind.ask, kind.topic, kind.clause):
        assert not set(wording.seen) & set(wording.unseen)
    assert min(len(kind.tell.unseen), len(kind.ask.unseen)) >= 1


def test_training_never_uses_held_out_words(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[bool] = []
    choose = Wording.choose

    def spy(wording: Wording, random: Random, owner: str = "", value: str = "", **which: bool) -> str:
        chosen.append(which.get("unseen", False))
        return choose(wording, random, owner, value, **which)

    monkeypatch.setattr(Wording, "choose", spy)
    for seed in range(60):
        conversation(Random(seed), 500)
    assert len(chosen) > 500
    assert not any(chosen)
    needles(Random(1), 500, 6, paraphrased=True)
    assert any(chosen)


def test_a_paraphrased_question_or_its_frame_is_held_out() -> None:
    values = Values(Random(7))
    seen = Values(Random(8))
    for kind in KINDS:
        fact = Fact(kind, kind.owner(values), "VALUE")
        known = {ask_freely(fact, seen.random) for _ in range(2000)}
        asked = {ask_freely(fact, values.random, unseen=True) for _ in range(30)}
        assert not asked & known


def test_what_people_say_together_is_told_and_noted() -> None:
    for seed in range(40):
        dialogue = Dialogue(Random(seed), echo=True)
        dialogue.free = 1.0
        dialogue.tell(3)
        said, noted = dialogue.messages
        assert noted.text.startswith("Noted: ")
        for fact in dialogue.facts.values():
            assert fact.value in said.text
            assert fact.short in noted.text


def test_a_follow_up_asks_for_what_was_spoken_of() -> None:
    replies = set()
    for seed in range(60):
        dialogue = Dialogue(Random(seed))
        dialogue.free = 1.0
        dialogue.tell()
        (fact,) = dialogue.facts.values()
        dialogue.last = fact
        dialogue.follow_up()
        reply = dialogue.messages[-1].text
        replies.add(reply == UNKNOWN)
        (now,) = dialogue.facts.values()
        assert reply == UNKNOWN or now.answered in reply or reply == f"Noted: {now.short}."
    assert replies == {True, False}


def test_what_was_not_told_is_not_known() -> None:
    for seed in range(40):
        dialogue = Dialogue(Random(seed))
        dialogue.tell(2)
        dialogue.ask_unknown()
        assert dialogue.messages[3].text == UNKNOWN


def test_small_talk_is_answered_to_the_point() -> None:
    known = {reply for _, reply in CHATS}
    assert min(len(known), len(RIDDLES), len(DEMANDS)) > 30
    dialogue = Dialogue(Random(1))
    for _ in range(300):
        dialogue.chat()
        dialogue.riddle()
    assert not any("{" in message.text for message in dialogue.messages)


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


@pytest.mark.parametrize("paraphrased", [False, True])
def test_needles_are_told_once_and_asked_once(paraphrased: bool) -> None:
    messages, questions = needles(Random(6), 2000, 6, paraphrased=paraphrased)
    assert len({question.fact.key for question in questions}) == 6
    for question in questions:
        assert held_out(question.fact.value)
        assert paraphrased or question.fact.kind in PLAIN_KINDS
        assert question.fact.value in messages[question.told].text
        assert messages[question.index].text == question.fact.answered

"""Conversations that tell held-out facts and ask for them at the end, for examinations and tests."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tools.training.dialogue import SYSTEMS, Dialogue, Message
from tools.training.facts import Fact
from tools.training.kinds import OPEN_KINDS, PLAIN_KINDS, new_fact

__all__ = ["Question", "needles"]


@dataclass(frozen=True)
class Question:
    """A question about a needle: the indices of its answer and of where it was told, and the fact."""

    index: int
    told: int
    fact: Fact


def needles(
    random: Random, tokens: int, count: int, *, paraphrased: bool = False
) -> tuple[list[Message], list[Question]]:
    """A test conversation of about `tokens` tokens: `count` held-out facts told on the way, all asked for at the end.

    Between them are other facts of the same kinds with other owners, talk, documents and fixed phrases. `paraphrased`:
    they are told and asked in words that training never uses, and of more kinds.
    """
    dialogue = Dialogue(random, unseen=True, echo=paraphrased)
    dialogue.paraphrase, dialogue.plain = paraphrased, not paraphrased
    dialogue.free = 0.7 if paraphrased else 0.0
    dialogue.begin(random.choice(SYSTEMS) if random.random() < 0.5 else "")
    facts: dict[tuple[str, str], Fact] = {}
    while len(facts) < count:
        fact = new_fact(dialogue.told, OPEN_KINDS if paraphrased else PLAIN_KINDS)
        facts.setdefault(fact.key, fact)
    places = {}
    for number, fact in enumerate(facts.values()):
        while dialogue.tokens < tokens * number // count:
            distract(dialogue, tokens, facts)
        places[fact] = len(dialogue.messages)
        dialogue.tell(fact=fact)
    while dialogue.tokens < tokens:
        distract(dialogue, tokens, facts)
    order = list(facts.values())
    random.shuffle(order)
    questions = []
    for fact in order:
        dialogue.ask(fact)
        questions.append(Question(len(dialogue.messages) - 1, places[fact], fact))
    return dialogue.messages, questions


def distract(dialogue: Dialogue, tokens: int, avoid: dict[tuple[str, str], Fact]) -> None:
    """One turn that has nothing to do with the facts of `avoid`."""
    random = dialogue.random
    kind = random.choices(("talk", "chat", "paste", "phrase", "tell", "ask"), (1, 1, 1, 1, 2, 1))[0]
    if kind in ("tell", "ask"):
        while (fact := new_fact(dialogue.values)).key in avoid or fact.key in dialogue.facts:
            pass
        dialogue.tell(fact=fact)
        if kind == "ask":
            dialogue.ask(fact)
    elif kind == "paste":
        dialogue.paste(random.randint(3, max(4, min(tokens // 60, 100))))
    elif kind == "talk":
        dialogue.talk()
    elif kind == "chat":
        dialogue.chat()
    else:
        dialogue.phrase()

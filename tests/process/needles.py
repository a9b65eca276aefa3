"""Conversations with held-out facts and questions about them, from the generator of the training."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tools.training.facts import Fact
from tools.training.needles import needles
from tools.training.words import Values

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Question:
    """A user message, the only right answer, and where in the conversation the fact was told."""

    text: str
    answer: str
    told: int
    fact: Fact


@dataclass(frozen=True)
class Told:
    """A conversation up to the last thing told, and questions about it, in random order."""

    messages: Messages
    questions: list[Question]

    def ask(self, number: int) -> Messages:
        return [*self.messages, {"role": "user", "content": self.questions[number].text}]

    def edited(self, number: int) -> tuple[Messages, str]:
        """The same question after another value was told in the place of the right one, and its answer."""
        question = self.questions[number]
        fact, messages = question.fact, self.ask(number)
        value = fact.kind.value(Values(Random(f"{fact.value} edited"), unseen=True))
        text = messages[question.told]["content"]
        assert text.count(fact.value) == 1
        messages[question.told] = {"role": "user", "content": text.replace(fact.value, value)}
        return messages, Fact(fact.kind, fact.owner, value).answered


def told(seed: int, tokens: int, count: int, *, paraphrased: bool = False) -> Told:
    """About `tokens` tokens with `count` facts strewn in from the first to nearly the last.

    `paraphrased`: told and asked in words that the training never used.
    """
    messages, needed = needles(Random(f"{seed} needle test {tokens}"), tokens, count, paraphrased=paraphrased)
    plain = [{"role": message.role, "content": message.text} for message in messages]
    asked = [Question(plain[q.index - 1]["content"], plain[q.index]["content"], q.told, q.fact) for q in needed]
    return Told(plain[: needed[0].index - 1], asked)

"""Conversations with facts and questions about them at the end, in plain words that the built-in
model was trained on.

The training never saw the values: a checksum held them out. A right answer was copied from the
conversation.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

__all__ = ["UNKNOWN", "Fact", "Messages", "Question", "Told", "filler", "new_fact", "told"]

Messages = list[dict[str, str]]

UNKNOWN = "I don't know. You have not told me that."  # quoted
"""The model's answer to a question about a fact that was not told."""

CHARS_PER_TOKEN = 3.0

_HELD_OUT = 10
"""The ratio of all values to those held out of the training."""


def _words(text: str) -> list[str]:
    return text.split()


_ADJECTIVES = _words(
    "red blue green white old new small big north south wooden iron narrow quiet round heavy"
)
_PLACES = _words(
    "door gate cellar tower vault shed attic library workshop chapel bridge archive barn mill "
    "harbour"
)
_THINGS = _words(
    "key book lamp map box coat knife cup letter hammer rope camera guitar umbrella radio ladder"
)
_FURNITURE = _words(
    "drawer cupboard chest shelf trunk suitcase basket crate bucket desk cabinet wardrobe "
    "barrel jar"
)
_RELATIVES = _words(
    "sister brother mother father aunt uncle neighbour friend cousin teacher daughter son"
)
_ANIMALS = _words("cat dog horse parrot rabbit goat turtle hamster donkey goose")
_MONTHS = _words(
    "January February March April May June July August September October November December"
)
_DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_SYLLABLES = _words("ba dor fi gal hum jo kar len mi nox pe ral sto tri vu wim zel brak flo gre")

_TURNS = (
    ("It rained all {day}. The {thing} looked {adjective} in the light.", "I see."),
    ("I slept badly last night. The {place} needs a new roof.", "I understand."),
    (
        "The weather is fine today. There was a {animal} near the {place} this morning.",
        "Thank you for telling me.",
    ),
    ("Hello!", "Hello! Tell me something, and ask me about it later."),
    ("Thank you.", "You are welcome."),
)
_LINES = (
    "Rule {n}: valve {m} opens at noon.",
    "Step {n}: clean the {adjective} {thing} and wait {m} minutes.",
    "Page {n} shows a {adjective} {animal} beside the {place}.",
    "On {day} the {adjective} {place} stays closed.",
    "Worker {n} finished job {m}.",
)


def _name(random: Random) -> str:
    return "".join(random.choices(_SYLLABLES, k=random.choice((2, 2, 3)))).capitalize()


def _digits(random: Random) -> str:
    return "".join(random.choices("0123456789", k=random.choice((4, 4, 5))))


@dataclass(frozen=True)
class Kind:
    """A sort of fact: its sentences, with ``{o}`` for the owner and ``{v}`` for the value, and
    makers of both.
    """

    tell: tuple[str, ...]
    ask: tuple[str, ...]
    answer: str
    owner: Callable[[Random], str]
    value: Callable[[Random], str]


def _some(nouns: list[str]) -> Callable[[Random], str]:
    return lambda random: f"the {random.choice(_ADJECTIVES)} {random.choice(nouns)}"


def _person(random: Random) -> str:
    return f"my {random.choice(_RELATIVES)}"


_KINDS = (
    Kind(
        ("the code of {o} is {v}", "the code for {o} is {v}", "{o} has the code {v}"),
        ("which code opens {o}?", "what code does {o} have?", "which code do I need for {o}?"),
        "the code of {o} is {v}",
        _some(_PLACES),
        _digits,
    ),
    Kind(
        ("{o} is called {v}", "the name of {o} is {v}"),
        ("what is {o} called?", "what do we call {o}?"),
        "{o} is called {v}",
        lambda random: f"my {random.choice(_ANIMALS)}",
        _name,
    ),
    Kind(
        ("{o} lives in {v}", "{o} has a house in {v}"),
        ("where does {o} live?", "in which town does {o} live?"),
        "{o} lives in {v}",
        _person,
        _name,
    ),
    Kind(
        ("{o}'s birthday is on {v}", "the birthday of {o} is on {v}"),
        ("when is the birthday of {o}?", "when is {o}'s birthday?"),
        "{o}'s birthday is on {v}",
        _person,
        lambda random: f"{random.randint(1, 28)} {random.choice(_MONTHS)}",
    ),
    Kind(
        ("{o} is in the {v}", "I put {o} in the {v}"),
        ("where is {o}?", "where did I put {o}?"),
        "{o} is in the {v}",
        _some(_THINGS),
        lambda random: f"{random.choice(_ADJECTIVES)} {random.choice(_FURNITURE)}",
    ),
    Kind(
        ("the password of {o} is {v}", "the password for {o} is {v}"),
        ("which password opens {o}?", "which password does {o} have?"),
        "the password of {o} is {v}",
        _some(_PLACES),
        lambda random: _name(random).lower(),
    ),
)


@dataclass(frozen=True)
class Fact:
    """A fact: its kind, its owner and its value."""

    kind: Kind
    owner: str
    value: str

    def told(self, random: Random) -> str:
        """Return a sentence that states the fact."""
        return self._sentence(random.choice(self.kind.tell)) + "."

    def asked(self, random: Random) -> str:
        """Return a question about the fact."""
        return self._sentence(random.choice(self.kind.ask))

    @property
    def answered(self) -> str:
        """The only right answer."""
        own = self.owner.replace("my ", "your ")
        return Fact(self.kind, own, self.value)._sentence(self.kind.answer) + "."

    def _sentence(self, template: str) -> str:
        text = template.format(o=self.owner, v=self.value)
        return text[0].upper() + text[1:]


def new_fact(random: Random, *, unseen: bool = False) -> Fact:
    """Return a random fact, whose value was held out of the training if ``unseen``, and was not
    otherwise.
    """
    kind = random.choice(_KINDS)
    while (zlib.crc32((value := kind.value(random)).encode()) % _HELD_OUT == 0) is not unseen:
        pass
    return Fact(kind, kind.owner(random), value)


def filler(random: Random) -> tuple[str, str]:
    """Return a message of the user without a fact, and its reply: small talk or a document."""

    def filled(template: str, number: int = 0) -> str:
        words = {
            "day": _DAYS,
            "thing": _THINGS,
            "adjective": _ADJECTIVES,
            "place": _PLACES,
            "animal": _ANIMALS,
        }
        drawn = {name: random.choice(those) for name, those in words.items()}
        return template.format(n=number, m=random.randint(1, 99), **drawn)

    if random.random() < 0.6:
        say, reply = random.choice(_TURNS)
        return filled(say), reply
    lines = (filled(random.choice(_LINES), number) for number in range(1, random.randint(4, 40)))
    return "Please read this:\n" + "\n".join(lines), "I have read it."


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
        """Ask the question again after another value was told in the place of the right one, and
        its answer.
        """
        question = self.questions[number]
        fact = question.fact
        messages = self.ask(number)
        random = Random(f"{fact.value} edited")
        while (
            other := new_fact(random, unseen=True)
        ).kind is not fact.kind or other.value == fact.value:
            pass
        text = messages[question.told]["content"]
        assert text.count(fact.value) == 1
        messages[question.told] = {"role": "user", "content": text.replace(fact.value, other.value)}
        return messages, Fact(fact.kind, fact.owner, other.value).answered


def told(seed: int, tokens: int, count: int) -> Told:
    """Return a conversation of about ``tokens`` tokens, with ``count`` facts strewn in from the
    first to nearly the last, among others.
    """
    random = Random(f"{seed} needles {tokens}")
    facts: dict[tuple[Kind, str], Fact] = {}
    while len(facts) < count:
        fact = new_fact(random, unseen=True)
        if fact.value not in {other.value for other in facts.values()}:
            facts.setdefault((fact.kind, fact.owner), fact)
    messages: Messages = []
    owners = set(facts)
    questions = []

    def turn(user: str, reply: str) -> None:
        messages.extend(
            ({"role": "user", "content": user}, {"role": "assistant", "content": reply})
        )

    def talk_until(limit: int) -> None:
        while sum(len(message["content"]) + 12 for message in messages) < limit * CHARS_PER_TOKEN:
            other = new_fact(random)
            if random.random() < 0.5 and (other.kind, other.owner) not in owners:
                owners.add((other.kind, other.owner))
                turn(other.told(random), "Noted.")
            else:
                turn(*filler(random))

    for number, fact in enumerate(facts.values()):
        talk_until(tokens * number // count)
        questions.append(Question(fact.asked(random), fact.answered, len(messages), fact))
        turn(fact.told(random), "Noted.")
    talk_until(tokens)
    random.shuffle(questions)
    return Told(messages, questions)

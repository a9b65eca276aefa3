"""Facts: what can be told, asked and answered, one `Kind` per sort of fact.

In every sentence the owner stands before the value, so that what follows the owner is what must be copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.training.words import ADJECTIVES, ANIMALS, COLOURS, JOBS, PLACES, RELATIVES, THINGS, Values

__all__ = ["KINDS", "OPEN_KINDS", "Fact", "Kind", "new_fact"]


@dataclass(frozen=True)
class Kind:
    """Sentences about one sort of fact; `{o}` is the owner as the user says it, `{y}` as the assistant does.

    `open` says that values can be held out. `weight` is how often the kind is drawn.
    """

    name: str
    owner: Callable[[Values], str]
    value: Callable[[Values], str]
    tell: tuple[str, ...]
    ask: tuple[str, ...]
    answer: str
    change: tuple[str, ...]
    open: bool = True
    weight: float = 1.0


@dataclass(frozen=True)
class Fact:
    """One kind, one owner, one value."""

    kind: Kind
    owner: str
    value: str

    @property
    def key(self) -> tuple[str, str]:
        return self.kind.name, self.owner

    def _say(self, sentence: str) -> str:
        text = sentence.format(o=self.owner, y=_yours(self.owner), v=self.value)
        return text[0].upper() + text[1:]

    def told(self, values: Values) -> str:
        return self._say(values.random.choice(self.kind.tell))

    def asked(self, values: Values) -> str:
        return self._say(values.random.choice(self.kind.ask))

    def changed(self, values: Values) -> str:
        return self._say(values.random.choice(self.kind.change))

    @property
    def answered(self) -> str:
        return self._say(self.kind.answer)


def _yours(owner: str) -> str:
    return "your" + owner[2:] if owner == "my" or owner.startswith("my ") else owner


def _place(values: Values) -> str:
    return f"{values.random.choice(ADJECTIVES)} {values.random.choice(PLACES)}"


def _thing(values: Values) -> str:
    return f"{values.random.choice(ADJECTIVES)} {values.random.choice(THINGS)}"


def _person(values: Values) -> str:
    return values.name() if values.random.random() < 0.6 else f"my {values.random.choice(RELATIVES)}"


def _pet(values: Values) -> str:
    animal = values.random.choice(ANIMALS)
    style = values.random.random()
    if style < 0.4:
        return f"my {animal}"
    if style < 0.7:
        return f"my {values.random.choice(RELATIVES)}'s {animal}"
    return f"{values.name()}'s {animal}"


def _colour(values: Values) -> str:
    return values.plain(COLOURS)


def _job(values: Values) -> str:
    return values.plain(JOBS)


def _me(values: Values) -> str:
    return "my"


KINDS = (
    Kind(
        "code",
        _place,
        Values.code,
        (
            "the code of the {o} is {v}.",
            "the code for the {o} is {v}.",
            "the {o} has the code {v}.",
            "the {o} code is {v}.",
        ),
        (
            "what is the code of the {o}?",
            "what is the code for the {o}?",
            "tell me the code of the {o}.",
            "do you remember the code of the {o}?",
            "I forgot the code of the {o}.",
            "what was the {o} code?",
            "which code opens the {o}?",
            "what's the code of the {o}?",
        ),
        "the code of the {o} is {v}.",
        (
            "correction: the code of the {o} is now {v}.",
            "the code of the {o} has changed: it is now {v}.",
            "actually, the code of the {o} is {v}.",
        ),
        weight=2.5,
    ),
    Kind(
        "pet",
        _pet,
        Values.name,
        ("{o} is called {v}.", "the name of {o} is {v}.", "{o}'s name is {v}.", "we call {o} {v}."),
        (
            "what is {o} called?",
            "what is the name of {o}?",
            "how is {o} called?",
            "do you remember the name of {o}?",
            "what's {o}'s name?",
            "tell me the name of {o}.",
            "what is {o}'s name?",
        ),
        "{y} is called {v}.",
        ("correction: {o} is now called {v}.", "actually, {o} is called {v}.", "we renamed {o}: now it is called {v}."),
        weight=2.0,
    ),
    Kind(
        "me",
        _me,
        Values.name,
        ("my name is {v}.", "I am called {v}.", "you can call me {v}.", "I am {v}.", "I'm {v}."),
        ("what is my name?", "what's my name?", "do you remember my name?", "who am I?", "how am I called?"),
        "your name is {v}.",
        ("actually, my name is {v}.", "correction: my name is now {v}."),
        weight=0.7,
    ),
    Kind(
        "home",
        _person,
        Values.town,
        ("{o} lives in {v}.", "{o} has a house in {v}.", "{o} comes from {v}."),
        (
            "where does {o} live?",
            "in which town does {o} live?",
            "do you remember where {o} lives?",
            "where is the home of {o}?",
            "tell me where {o} lives.",
        ),
        "{y} lives in {v}.",
        ("{o} has moved: {o} now lives in {v}.", "actually, {o} lives in {v}.", "correction: {o} now lives in {v}."),
        weight=1.5,
    ),
    Kind(
        "job",
        _person,
        _job,
        ("{o} works as a {v}.", "{o} is a {v}."),
        ("what does {o} do for a living?", "what is the job of {o}?", "what does {o} work as?", "what is {o}'s job?"),
        "{y} works as a {v}.",
        ("{o} has a new job: {o} is now a {v}.", "actually, {o} works as a {v}."),
        open=False,
        weight=0.6,
    ),
    Kind(
        "colour",
        _person,
        _colour,
        ("the favourite colour of {o} is {v}.", "{o}'s favourite colour is {v}.", "{o} likes the colour {v} best."),
        ("what is the favourite colour of {o}?", "which colour does {o} like best?", "what is {o}'s favourite colour?"),
        "{y}'s favourite colour is {v}.",
        ("actually, {o}'s favourite colour is {v}.", "{o}'s favourite colour is now {v}."),
        open=False,
        weight=0.6,
    ),
    Kind(
        "mine",
        _me,
        _colour,
        ("my favourite colour is {v}.", "I like the colour {v} best."),
        ("what is my favourite colour?", "which colour do I like best?", "what's my favourite colour?"),
        "your favourite colour is {v}.",
        ("actually, my favourite colour is {v}.", "my favourite colour is now {v}."),
        open=False,
        weight=0.3,
    ),
    Kind(
        "myhome",
        _me,
        Values.town,
        ("I live in {v}.", "I come from {v}.", "my home is in {v}."),
        ("where do I live?", "do you remember where I live?", "in which town do I live?"),
        "you live in {v}.",
        ("I have moved: I now live in {v}.", "actually, I live in {v}."),
        weight=0.5,
    ),
    Kind(
        "birthday",
        _person,
        Values.date,
        ("the birthday of {o} is on {v}.", "{o}'s birthday is on {v}.", "{o} was born on {v}."),
        ("when is the birthday of {o}?", "when is {o}'s birthday?", "on which day was {o} born?"),
        "{y}'s birthday is on {v}.",
        ("correction: {o}'s birthday is on {v}.", "actually, {o}'s birthday is on {v}."),
    ),
    Kind(
        "phone",
        _person,
        Values.phone,
        ("the phone number of {o} is {v}.", "{o}'s phone number is {v}.", "you can reach {o} at {v}."),
        ("what is the phone number of {o}?", "what is {o}'s phone number?", "how can I reach {o}?"),
        "{y}'s phone number is {v}.",
        ("{o} has a new phone number: {v}.", "correction: {o}'s phone number is now {v}."),
    ),
    Kind(
        "spot",
        _thing,
        Values.spot,
        (
            "the {o} is in the {v}.",
            "I put the {o} in the {v}.",
            "I left the {o} in the {v}.",
            "the {o} lies in the {v}.",
        ),
        ("where is the {o}?", "where did I put the {o}?", "do you know where the {o} is?", "in what is the {o}?"),
        "the {o} is in the {v}.",
        ("I moved the {o}: it is now in the {v}.", "actually, the {o} is in the {v}."),
        weight=1.5,
    ),
    Kind(
        "meeting",
        _person,
        Values.time,
        ("the meeting with {o} is on {v}.", "I meet {o} on {v}.", "I see {o} on {v}."),
        ("when is the meeting with {o}?", "when do I meet {o}?", "on which day is the meeting with {o}?"),
        "the meeting with {y} is on {v}.",
        ("the meeting with {o} was moved to {v}.", "correction: the meeting with {o} is now on {v}."),
    ),
    Kind(
        "price",
        _thing,
        Values.amount,
        ("the {o} costs {v} coins.", "the price of the {o} is {v} coins.", "for the {o} I paid {v} coins."),
        ("how much is the {o}?", "what does the {o} cost?", "what is the price of the {o}?"),
        "the {o} costs {v} coins.",
        ("the {o} now costs {v} coins.", "correction: the price of the {o} is {v} coins."),
        weight=0.8,
    ),
    Kind(
        "password",
        _place,
        Values.word,
        ("the password of the {o} is {v}.", "the password for the {o} is {v}.", "the {o} opens with the password {v}."),
        ("what is the password of the {o}?", "what is the password for the {o}?", "tell me the password of the {o}."),
        "the password of the {o} is {v}.",
        ("the password of the {o} is now {v}.", "correction: the password of the {o} is {v}."),
        weight=1.5,
    ),
    Kind(
        "owner",
        _thing,
        Values.name,
        ("the {o} belongs to {v}.", "the owner of the {o} is {v}."),
        ("who owns the {o}?", "whose is the {o}?", "to whom does the {o} belong?", "who is the owner of the {o}?"),
        "the {o} belongs to {v}.",
        ("the {o} now belongs to {v}.", "actually, the {o} belongs to {v}."),
    ),
    Kind(
        "port",
        lambda values: values.town().lower(),
        Values.code,
        ("the server {o} listens on port {v}.", "the port of the server {o} is {v}."),
        ("on which port does the server {o} listen?", "what is the port of the server {o}?"),
        "the server {o} listens on port {v}.",
        ("the server {o} now listens on port {v}.", "correction: the port of the server {o} is {v}."),
        weight=0.7,
    ),
)

OPEN_KINDS = tuple(kind for kind in KINDS if kind.open)

_WEIGHTS = {kinds: [kind.weight for kind in kinds] for kinds in (KINDS, OPEN_KINDS)}


def new_fact(values: Values, kinds: tuple[Kind, ...] = KINDS) -> Fact:
    """A random fact of one of `KINDS` or `OPEN_KINDS`."""
    (kind,) = values.random.choices(kinds, _WEIGHTS[kinds])
    return Fact(kind, kind.owner(values), kind.value(values))

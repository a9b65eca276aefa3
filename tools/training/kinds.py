"""The sorts of facts. In every answer the owner stands before the value, which then need only be copied."""

from __future__ import annotations

from collections.abc import Callable

from tools.training.facts import Fact, Kind, wording
from tools.training.sentences import sections
from tools.training.words import (
    ADJECTIVES,
    ANIMALS,
    ATTRIBUTES,
    COLOURS,
    DAYS,
    EVENTS,
    FOODS,
    JOBS,
    PLACES,
    RELATIVES,
    RIDES,
    THINGS,
    Values,
)

__all__ = ["KINDS", "OPEN_KINDS", "PLAIN_KINDS", "new_fact"]


def _noun(values: Values, nouns: list[str]) -> str:
    """A noun with or without an adjective, or a nonsense word."""
    random = values.random
    noun = values.noun() if random.random() < 0.08 else random.choice(nouns)
    return noun if random.random() < 0.3 else f"{random.choice(ADJECTIVES)} {noun}"


def _owned(values: Values, nouns: list[str]) -> str:
    style = values.random.random()
    if style < 0.78:
        return f"the {_noun(values, nouns)}"
    if style < 0.93:
        return f"my {_noun(values, nouns)}"
    return f"{_person(values)}'s {values.random.choice(nouns)}"


def _place(values: Values) -> str:
    return _owned(values, PLACES)


def _thing(values: Values) -> str:
    return _owned(values, THINGS)


def _person(values: Values) -> str:
    return values.name() if values.random.random() < 0.6 else _relative(values)


def _relative(values: Values) -> str:
    return f"my {values.random.choice(RELATIVES)}"


def _pet(values: Values) -> str:
    animal = values.random.choice(ANIMALS)
    style = values.random.random()
    if style < 0.4:
        return f"my {animal}"
    if style < 0.7:
        return f"my {values.random.choice(RELATIVES)}'s {animal}"
    return f"{values.name()}'s {animal}"


def _attribute(values: Values) -> str:
    random = values.random
    noun = values.noun() if random.random() < 0.1 else random.choice(ATTRIBUTES)
    style = random.random()
    if style < 0.4:
        return f"my {noun}"
    if style < 0.55:
        return f"{values.name()}'s {noun}"
    if style < 0.65:
        return f"my {random.choice(RELATIVES)}'s {noun}"
    if style < 0.8:
        return f"the {noun}"
    return f"the {noun} of {_owned(values, random.choice((PLACES, THINGS)))}"


def _anything(values: Values) -> str:
    random = values.random
    makers = (values.name, values.code, values.word, values.town, values.amount, values.date, values.spot, values.clock)
    if not values.unseen and random.random() < 0.35:
        return random.choice(
            (values.noun(), *(random.choice(words) for words in (COLOURS, ADJECTIVES, FOODS, THINGS, DAYS)))
        )
    return random.choice(makers)()


def _ride(values: Values) -> str:
    return f"the {values.random.choice(RIDES)} to {values.town()}"


def _event(values: Values) -> str:
    return f"{values.random.choice(('the', 'the', 'my'))} {values.random.choice(EVENTS)}"


def _colour(values: Values) -> str:
    return values.plain(COLOURS)


def _job(values: Values) -> str:
    return values.plain(JOBS)


def _food(values: Values) -> str:
    return values.plain(FOODS)


def _age(values: Values) -> str:
    return str(values.random.randint(2, 99))


def _server(values: Values) -> str:
    return f"the server {values.town().lower()}"


def _me(values: Values) -> str:
    return "my"


def _kind(
    name: str,
    owner: Callable[[Values], str],
    value: Callable[[Values], str],
    weight: float = 1.0,
    *,
    open: bool = True,
    new: bool = False,
) -> Kind:
    texts = _TEXTS[name]
    tell, ask, topic, clause, change = (wording(texts[field]) for field in ("tell", "ask", "topic", "clause", "change"))
    (answer,), bare = texts["answer"], texts.get("bare", ())
    return Kind(name, owner, value, answer, tell, ask, topic, clause, change, bare, open, new, weight)


_TEXTS = sections("kinds.txt")

KINDS = (
    _kind("code", _place, Values.code, 2.5),
    _kind("pet", _pet, Values.name, 2.0),
    _kind("relative", _relative, Values.name, 1.2, new=True),
    _kind("me", _me, Values.name, 1.5),
    _kind("home", _person, Values.town, 1.5),
    _kind("job", _person, _job, 0.6, open=False),
    _kind("colour", _person, _colour, 0.6, open=False),
    _kind("mine", _me, _colour, 0.4, open=False),
    _kind("myhome", _me, Values.town, 0.8),
    _kind("birthday", _person, Values.date),
    _kind("phone", _person, Values.phone),
    _kind("spot", _thing, Values.spot, 1.5),
    _kind("meeting", _person, Values.time),
    _kind("price", _thing, Values.amount, 0.8),
    _kind("password", _place, Values.word, 1.5),
    _kind("owner", _thing, Values.name),
    _kind("port", _server, Values.code, 0.7),
    _kind("attribute", _attribute, _anything, 4.0, new=True),
    _kind("age", _person, _age, 0.7, open=False, new=True),
    _kind("myage", _me, _age, 0.5, open=False, new=True),
    _kind("myjob", _me, _job, 0.5, open=False, new=True),
    _kind("mybirthday", _me, Values.date, 0.4, new=True),
    _kind("likes", _person, _food, 0.5, open=False, new=True),
    _kind("mylikes", _me, _food, 0.5, open=False, new=True),
    _kind("ride", _ride, Values.clock, 0.7, new=True),
    _kind("event", _event, Values.time, new=True),
)

PLAIN_KINDS = tuple(kind for kind in KINDS if kind.open and not kind.new)
"""Those of the plain test conversations."""
OPEN_KINDS = tuple(kind for kind in KINDS if kind.open)

_WEIGHTS = {kinds: [kind.weight for kind in kinds] for kinds in (KINDS, OPEN_KINDS, PLAIN_KINDS)}


def new_fact(values: Values, kinds: tuple[Kind, ...] = KINDS) -> Fact:
    """A random fact of one of `KINDS`, `OPEN_KINDS` or `PLAIN_KINDS`."""
    (kind,) = values.random.choices(kinds, _WEIGHTS[kinds])
    return Fact(kind, kind.owner(values), kind.value(values))

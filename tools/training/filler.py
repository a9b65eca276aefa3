"""Text that holds nothing to be asked about: small talk, logs, manuals and diaries of any length."""

from __future__ import annotations

from collections.abc import Callable

from tools.training.words import ADJECTIVES, ANIMALS, DAYS, FOODS, PLACES, RELATIVES, THINGS, Values

__all__ = ["document", "fill", "small_talk"]

_TALK = (
    "It rained all {day}.",
    "The {thing} looked {adj} in the light.",
    "I had {food} and {food} for breakfast.",
    "Yesterday I walked past the {adj} {place}.",
    "My {relative} talks a lot about the {thing}.",
    "The weather is fine today.",
    "I slept badly last night.",
    "There was a {animal} near the {place} this morning.",
    "I read a story about a {adj} {animal}.",
    "On {day} we want to paint the {place}.",
    "{name} told me a joke about a {animal}.",
    "The bus was late again.",
    "I am a bit tired.",
    "We had guests on {day}.",
    "The {place} needs a new roof.",
    "I like the smell of {food}.",
    "{name} and {name} went to the {place} together.",
    "Nobody found the {adj} {thing}.",  # quoted
)

_LINES = (
    "Rule {n}: valve {m} opens at noon.",
    "Step {n}: clean the {adj} {thing} and wait {m} minutes.",
    "Entry {n}: {m} {food} came in, {k} went out.",
    "{h}:{mm} the {place} was checked, all quiet.",
    "{h}:{mm} sensor {n} reads {m}.",
    "Page {n} shows a {adj} {animal} beside the {place}.",
    "Item {n}: one {adj} {thing}, {k} kilos.",
    "On {day} the {adj} {place} stays closed.",
    "{name} carried the {thing} to the {place}.",
    "The {animal} of {name} slept near the {place}.",
    "Note {n}: ask {name} about the {adj} {thing}.",
    "{word} {word} {word} {word}.",
    "Worker {n} finished job {m} in {k} seconds.",
)


def fill(values: Values, sentence: str, *replies: str) -> list[str]:
    """A sentence with words put in for its fields, and its replies with the same words.

    `{f}` is a food, `{a}` an animal, `{p}` a place, `{t}` a thing, `{d}` a day, `{n}` a name, `{w}` a word without
    meaning, `{r}` a relative, `{j}` an adjective, `{k}` a number.
    """
    random = values.random
    drawn = {
        "f": random.choice(FOODS),
        "a": random.choice(ANIMALS),
        "p": random.choice(PLACES),
        "t": random.choice(THINGS),
        "d": random.choice(DAYS),
        "n": values.name(),
        "w": values.noun(),
        "r": random.choice(RELATIVES),
        "j": random.choice(ADJECTIVES),
        "k": str(random.randint(2, 99)),
    }
    return [text.format(**drawn) for text in (sentence, *replies)]


def _fill(values: Values, sentence: str, number: int) -> str:
    random = values.random
    makers: dict[str, Callable[[], str]] = {
        "day": lambda: random.choice(DAYS),
        "thing": lambda: random.choice(THINGS),
        "adj": lambda: random.choice(ADJECTIVES),
        "place": lambda: random.choice(PLACES),
        "animal": lambda: random.choice(ANIMALS),
        "food": lambda: random.choice(FOODS),
        "relative": lambda: random.choice(RELATIVES),
        "name": values.name,
        "word": values.word,
        "n": lambda: str(number),
        "m": lambda: str(random.randint(1, 99)),
        "k": lambda: str(random.randint(1, 40)),
        "h": lambda: str(random.randint(0, 23)),
        "mm": lambda: f"{random.randint(0, 59):02}",
    }
    pieces = sentence.split("{")
    text = pieces[0]
    for piece in pieces[1:]:
        field, rest = piece.split("}", 1)
        text += makers[field]() + rest
    return text


def small_talk(values: Values) -> str:
    """One sentence of no consequence."""
    return _fill(values, values.random.choice(_TALK), 0)


def document(values: Values, lines: int) -> list[str]:
    """Lines of a log, a manual, a diary or a mixture of them."""
    random = values.random
    style = random.random()
    if style < 0.4:
        sentences: tuple[str, ...] = (random.choice(_LINES),)
    elif style < 0.7:
        sentences = tuple(random.sample(_LINES, 3))
    else:
        sentences = _LINES + _TALK
    start = random.randint(1, 50)
    return [_fill(values, random.choice(sentences), start + i) for i in range(lines)]

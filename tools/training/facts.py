"""Facts: what can be told, asked and answered. Their sorts are in kinds.py, ways of putting them in phrasing.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.training.words import Values

__all__ = ["Fact", "Kind", "Wording", "wording"]


_PLAIN = 3
"""So many templates of a kind, the first, are the plain ones."""


@dataclass(frozen=True)
class Wording:
    """Templates that training uses, and others that it never does.

    `{o}` is the owner as the user says it ("my old box"), `{v}` the value. `{n}` is the owner without its "the" and
    fits only owners with one, `{a}` is a "my" owner with "a" or "an" instead and fits no "my sister's".
    """

    seen: tuple[str, ...]
    unseen: tuple[str, ...] = ()

    def choose(
        self, random: Random, owner: str = "", value: str = "", *, unseen: bool = False, plain: bool = False
    ) -> str:
        """One that fits owner and value; a held-out one if `unseen`, one of the first if `plain`."""
        templates = self.unseen if unseen else self.seen[:_PLAIN] if plain else self.seen
        while True:
            template = random.choice(templates)
            if template.startswith("{v}") and value[:1].islower():
                continue  # a capital letter would change it
            if "{n}" in template and not owner.startswith("the "):
                continue
            if "{a}" in template and (not owner.startswith("my ") or "'s" in owner):
                continue
            return template


def wording(templates: tuple[str, ...]) -> Wording:
    """Of templates, where a leading `*` holds one out."""
    seen = tuple(text for text in templates if not text.startswith("*"))
    return Wording(seen, tuple(text[1:] for text in templates if text.startswith("*")))


@dataclass(frozen=True)
class Kind:
    """One sort of fact.

    `tell` are statements, `ask` whole questions, `topic` what is asked for as a noun ("the code of {o}"), `clause` the
    same as a clause ("where {o} lives"), `change` statements of a new value, `answer` what the assistant says (`{y}`:
    the owner as it says it). `bare` are topics that need no owner if only one such fact was told. `open` says that
    values can be held out, `weight` how often the kind is drawn; `new` kinds are not in the plain test conversations.
    """

    name: str
    owner: Callable[[Values], str]
    value: Callable[[Values], str]
    answer: str
    tell: Wording
    ask: Wording
    topic: Wording
    clause: Wording
    change: Wording
    bare: tuple[str, ...] = ()
    open: bool = True
    new: bool = False
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

    def fill(self, template: str) -> str:
        """The sentence of a template, as it is."""
        noun = self.owner.partition(" ")[2]
        article = "an" if noun[:1] in tuple("aeiou") else "a"
        return template.format(o=self.owner, y=yours(self.owner), v=self.value, n=noun, a=f"{article} {noun}")

    def told(self, values: Values, *, unseen: bool = False) -> str:
        """A sentence that tells it."""
        return sentence(self.fill(self.kind.tell.choose(values.random, self.owner, self.value, unseen=unseen)), ".")

    def changed(self, values: Values) -> str:
        """A sentence that tells it after another value was told."""
        return sentence(self.fill(self.kind.change.choose(values.random, self.owner, self.value)), ".")

    def asked(self, values: Values, *, plain: bool = False) -> str:
        """A question about it."""
        return sentence(self.fill(self.kind.ask.choose(values.random, self.owner, plain=plain)), "?")

    @property
    def answered(self) -> str:
        return sentence(self.fill(self.kind.answer), ".")

    @property
    def short(self) -> str:
        """The answer as a part of a longer sentence."""
        text = self.answered[:-1]
        return text if text.startswith(self.owner[:1]) and self.owner[:1].isupper() else text[0].lower() + text[1:]


def sentence(text: str, end: str) -> str:
    """With a capital letter and an end mark, unless it has one."""
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".?!" else text + end


def yours(owner: str) -> str:
    """The owner as the assistant says it."""
    mine = {"my": "your", "our": "your"}
    return " ".join(mine.get(word, word) for word in owner.split(" "))

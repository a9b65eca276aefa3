"""Ways of putting a statement or a question, whatever it is about."""

from __future__ import annotations

from random import Random

from tools.training.facts import Fact, sentence, wording
from tools.training.sentences import sections

__all__ = ["ask_bare", "ask_freely", "follow_up", "join", "rough", "tell_freely"]

_FRAMES = {field: wording(texts) for field, texts in sections("frames.txt")["frames"].items()}
_FOLLOW_UP = sections("frames.txt")["follow-up"]


def tell_freely(fact: Fact, random: Random, *, unseen: bool = False) -> str:
    """A statement, mostly within a longer sentence. `unseen`: in words that training never uses."""
    text = fact.fill(fact.kind.tell.choose(random, fact.owner, fact.value, unseen=unseen))
    return _frame("tell", random, unseen=unseen and random.random() < 0.5).format(s=text)


def ask_freely(fact: Fact, random: Random, *, unseen: bool = False) -> str:
    """A question of any form. `unseen`: either what it says of the fact or the frame around it is held out."""
    kind = fact.kind
    style = random.random()
    if style < 0.4:
        new = unseen and bool(kind.ask.unseen)
        frame = _frame("ask", random, unseen=unseen and (not new or random.random() < 0.3))
        return frame.format(q=fact.fill(kind.ask.choose(random, fact.owner, unseen=new)))
    form = "topic" if style < 0.75 else "clause"
    words = kind.topic if style < 0.75 else kind.clause
    new = unseen and bool(words.unseen) and random.random() < 0.5
    frame = _frame(form, random, unseen=unseen and not new)
    text = fact.fill(words.choose(random, fact.owner, unseen=new))
    return frame.format(t=text, c=text)


def _frame(form: str, random: Random, *, unseen: bool = False) -> str:
    frames = _FRAMES[form]
    return frames.choose(random, unseen=unseen)


def follow_up(form: str, random: Random) -> str:
    """A turn that only makes sense after the one before; `form` is a field of the file's section."""
    return random.choice(_FOLLOW_UP[form])


def ask_bare(topic: str, random: Random) -> str:
    """A question for "the code" where there is one only."""
    return _frame("topic", random).format(t=topic)


def join(statements: list[str], random: Random) -> str:
    """Several statements in one breath."""
    if random.random() < 0.4:
        return random.choice((". ", ". ", "; ", "! ")).join(
            text[0].upper() + text[1:] if random.random() < 0.8 else text for text in statements
        )
    last = random.choice((" and ", " and ", " and ", ", and ", ", also ", " and also ", ". And "))
    return ", ".join(statements[:-1]) + last + statements[-1]


def rough(text: str, end: str, random: Random) -> str:
    """As people type: sometimes without capital, mark or apostrophe."""
    if random.random() < 0.6:
        text = sentence(text, end)
    elif random.random() < 0.5:
        text = text.rstrip(".?")
    if random.random() < 0.1:
        for short, plain in (
            ("what's", "whats"),
            ("don't", "dont"),
            ("can't", "cant"),
            ("I'm", "im"),
            ("where's", "wheres"),
        ):
            text = text.replace(short, plain)
    if random.random() < 0.12:
        text = text.replace(" I ", " i ")
    return text

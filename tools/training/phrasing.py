"""Ways of putting a statement or a question, whatever it is about."""

from __future__ import annotations

from random import Random

from tools.training.facts import Fact, sentence, wording
from tools.training.sentences import sections

__all__ = ["ask_bare", "ask_freely", "follow_up", "join", "rough", "tell_freely"]

_TEXTS = sections("frames.txt")
_FRAMES = {field: wording(texts) for field, texts in _TEXTS["frames"].items()}
_FOLLOW_UP, _WORDS = _TEXTS["follow-up"], _TEXTS["words"]
_ANY = sorted({word for form in _FRAMES.values() for text in form.seen for word in text.split() if "{" not in word})


def garble(template: str, random: Random) -> str:
    """A template as a hasty person types it: small words missing or too many."""
    words = template.split(" ")
    if sum("{" not in word for word in words) >= 4:
        words = [word for word in words if word not in _WORDS["small"] or random.random() < 0.8]
    while random.random() < 0.3:
        place = random.randrange(len(words))
        if "{v}" not in words[place]:
            words.insert(place, random.choice(_WORDS["filler"]))
    return " ".join(words)


def chatter(text: str, random: Random) -> str:
    """A statement or a question among words that mean nothing."""
    noise = " ".join(random.choice(_ANY) for _ in range(random.randint(1, 4)))
    if random.random() < 0.75:
        return noise + random.choice((", ", ": ", " ", " ", " - ", "... ")) + text
    return text + random.choice((", ", " - ", "... ")) + noise


def tell_freely(fact: Fact, random: Random, *, unseen: bool = False) -> str:
    """A statement, mostly within a longer sentence. `unseen`: in words that training never uses."""
    template = fact.kind.tell.choose(random, fact.owner, fact.value, unseen=unseen)
    text = fact.fill(template if unseen or random.random() < 0.7 else garble(template, random))
    if not unseen and random.random() < 0.15:
        return chatter(text, random)
    return _frame("tell", random, unseen=unseen and random.random() < 0.5).format(s=text)


def ask_freely(fact: Fact, random: Random, *, unseen: bool = False) -> str:
    """A question of any form. `unseen`: either what it says of the fact or the frame around it is held out."""
    kind = fact.kind
    style = random.random()
    if not unseen and style < 0.25:
        words = random.choice((kind.ask, kind.ask, kind.topic, kind.clause))
        text = fact.fill(garble(words.choose(random, fact.owner), random))
        return chatter(text, random) if random.random() < 0.4 else text
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

"""Synthetic conversations: facts told in passing and asked for later, among talk, documents, lists and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tools.training.facts import KINDS, OPEN_KINDS, Fact, new_fact
from tools.training.filler import document, small_talk
from tools.training.phrases import ACKNOWLEDGED, PHRASES, READ, TALKED, UNKNOWN
from tools.training.tools import TOOLS, call_text, result_text, system_text, use
from tools.training.words import FOODS, Values

__all__ = ["Dialogue", "Message", "Question", "conversation", "needles"]

CHARS_PER_TOKEN = 3.0

_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You remember what the user tells you.",
    "You are the keeper of a long manual.",
    "Be polite and short.",
)
_LISTS = ("shopping list", "packing list", "wish list", "to-do list", "guest list")


@dataclass(frozen=True)
class Message:
    """`text` is as the template renders it; `thought` goes between think marks before an assistant's text."""

    role: str
    text: str
    thought: str | None = None


@dataclass(frozen=True)
class Question:
    """A question about a needle: the indices of its answer and of where it was told, and the fact."""

    index: int
    told: int
    fact: Fact


class Dialogue:
    """One growing conversation, with what was told so far."""

    def __init__(self, random: Random, *, unseen: bool = False, echo: bool | None = None) -> None:
        self.random = random
        self.values = Values(random)
        self.told = Values(random, unseen=unseen)
        self.messages: list[Message] = []
        self.facts: dict[tuple[str, str], Fact] = {}
        self.lists: dict[str, list[str]] = {}
        self.tools: list[str] = []
        self.thinking = False
        self.echo = random.random() < 0.6 if echo is None else echo
        self.chars = 0

    @property
    def tokens(self) -> int:
        """About how many tokens there are."""
        return int(self.chars / CHARS_PER_TOKEN)

    def say(self, role: str, text: str, thought: str | None = None) -> None:
        if role != "assistant" or not self.thinking:
            thought = None
        self.messages.append(Message(role, text, thought))
        self.chars += len(text) + len(thought or "") + 12

    def turn(self, user: str, reply: str, thought: str = "I answer at once.") -> None:
        self.say("user", user)
        self.say("assistant", reply, thought)

    def begin(self, system: str = "", tools: list[str] | None = None) -> None:
        """The system message, if there is anything in it."""
        self.tools = tools or []
        text = system_text([TOOLS[name] for name in self.tools], system) if self.tools else system
        if text:
            self.say("system", text)

    def tell(self, count: int = 1, *, fact: Fact | None = None) -> None:
        facts = [fact or new_fact(self.told) for _ in range(count)]
        sentences = [self._learn(one) for one in facts]
        if self.random.random() < 0.25:
            sentences.insert(self.random.randint(0, len(sentences)), small_talk(self.values))
        if self.random.random() < 0.1:
            sentences.insert(0, self.random.choice(("Please remember:", "By the way:", "Note this:", "Remember this:")))
        reply = ACKNOWLEDGED
        if count == 1 and self.echo:
            answer = facts[0].answered
            reply = "Noted: " + (answer if answer[0] == facts[0].owner[:1] else answer[0].lower() + answer[1:])
        self.turn(" ".join(sentences), reply, "The user tells me something. I will remember it.")

    def change(self) -> None:
        old = self.random.choice(list(self.facts.values()))
        self.tell(fact=Fact(old.kind, old.owner, old.kind.value(self.told)))

    def ask(self, fact: Fact | None = None) -> None:
        fact = fact or self.random.choice(list(self.facts.values()))
        thought = f"The user asks for something told before. {fact.answered}"
        self.turn(fact.asked(self.values), fact.answered, thought)

    def ask_unknown(self) -> None:
        """A question about something that was not told, often close to something that was."""
        for _ in range(10):
            fact = new_fact(self.values)
            if self.facts and self.random.random() < 0.6:
                near = self.random.choice(list(self.facts.values()))
                kinds = [kind for kind in KINDS if kind.owner is near.kind.owner]
                fact = Fact(self.random.choice(kinds), near.owner, "")
            if fact.key not in self.facts:
                self.turn(fact.asked(self.values), UNKNOWN, "The user asks for something that was not told.")
                return

    def talk(self) -> None:
        count = self.random.choice((1, 1, 2, 3))
        self.turn(" ".join(small_talk(self.values) for _ in range(count)), self.random.choice(TALKED))

    def phrase(self) -> None:
        questions, answer = self.random.choice(PHRASES)
        self.turn(self.random.choice(questions), answer)

    def repeat(self) -> None:
        text = " ".join(
            self.values.word() if self.random.random() < 0.5 else self.values.name()
            for _ in range(self.random.randint(1, 6))
        )
        self.turn(self.random.choice(("Repeat: {}", "Say: {}", "Please repeat: {}")).format(text), text)

    def listing(self) -> None:
        """Make a list, add to it, or ask for it."""
        name = self.random.choice(_LISTS)
        items = self.lists.get(name)
        if items is None:
            items = self.lists[name] = self.random.sample(FOODS, self.random.randint(2, 6))
            words = ", ".join(items[:-1]) + " and " + items[-1]
            user = self.random.choice((f"My {name}: {', '.join(items)}.", f"Put {words} on my {name}."))
        elif len(items) < 8 and self.random.random() < 0.4:
            items.append(self.random.choice([food for food in FOODS if food not in items]))
            user = self.random.choice((f"Add {items[-1]} to my {name}.", f"Put {items[-1]} on my {name}, too."))
        else:
            user = self.random.choice((f"What is on my {name}?", f"Read me my {name}.", f"Show my {name}."))
        self.turn(user, f"Your {name}: {', '.join(items)}.")

    def paste(self, lines: int, *, facts: int = 0) -> None:
        """A document from the user, with facts strewn in."""
        head = self.random.choice(("Please read this:", "Here is my log:", "Read this:", "My notes:"))
        self.turn(head + "\n" + self.text(lines, facts), READ)

    def text(self, lines: int, facts: int = 0) -> str:
        listing = document(self.values, lines)
        for _ in range(facts):
            listing.insert(self.random.randint(0, len(listing)), self._learn(new_fact(self.told)))
        return self.random.choice(("\n", "\n", " ")).join(listing)

    def call_tool(self) -> None:
        name = self.random.choice(self.tools)
        door = None
        if name == "open_door":
            codes = [fact for fact in self.facts.values() if fact.kind.name == "code"]
            if codes and self.random.random() < 0.7:
                fact = self.random.choice(codes)
                door = fact.owner, fact.value
        call = use(self.told, name, door=door)
        self.turn(call.question, call_text(call), "I need a tool for this.")
        self.turn(result_text(call), call.answer, "Now I know it.")

    def _learn(self, fact: Fact) -> str:
        known = fact.key in self.facts
        self.facts.pop(fact.key, None)
        self.facts[fact.key] = fact
        return fact.changed(self.values) if known else fact.told(self.values)


def conversation(random: Random, tokens: int) -> list[Message]:
    """A training conversation of about `tokens` tokens, or a little more."""
    dialogue = Dialogue(random)
    dialogue.thinking = random.random() < 0.06
    system = random.choice(_SYSTEMS) if random.random() < 0.4 else ""
    if random.random() < 0.15:
        lines = random.randint(3, max(4, tokens // 60))
        system = f"{random.choice(_SYSTEMS)} " + dialogue.text(lines, facts=random.randint(0, 4))
    tools = random.sample(list(TOOLS), random.randint(1, 3)) if random.random() < 0.15 else None
    dialogue.begin(system, tools)
    weights = {
        "tell": random.uniform(0.5, 4),
        "ask": random.uniform(2, 6),
        "unknown": 0.35,
        "change": random.choice((0.2, 0.8)),
        "talk": random.choice((0.3, 0.3, 2)),
        "phrase": random.choice((0.3, 0.3, 1)),
        "repeat": random.choice((0.1, 0.5)),
        "listing": random.choice((0.0, 0.3, 0.6)),
        "paste": random.choice((0.0, 0.1, 0.4)),
        "tool": 1.0 if tools else 0.0,
    }
    kinds, chances = list(weights), list(weights.values())
    if random.random() < 0.3:
        dialogue.phrase()
    while dialogue.tokens < tokens:
        (kind,) = random.choices(kinds, chances)
        if kind == "tell" or (kind in ("ask", "change") and not dialogue.facts):
            dialogue.tell(random.choice((1, 1, 1, 2, 3)))
        elif kind == "ask":
            dialogue.ask()
        elif kind == "unknown":
            dialogue.ask_unknown()
        elif kind == "change":
            dialogue.change()
        elif kind == "paste":
            longest = max(4, min(tokens // 40, 150))
            dialogue.paste(random.randint(3, longest), facts=random.choice((0, 0, 1, 3)))
        elif kind == "tool":
            dialogue.call_tool()
        else:
            {"talk": dialogue.talk, "phrase": dialogue.phrase, "repeat": dialogue.repeat, "listing": dialogue.listing}[
                kind
            ]()
    return dialogue.messages


def needles(random: Random, tokens: int, count: int) -> tuple[list[Message], list[Question]]:
    """A test conversation of about `tokens` tokens: `count` held-out facts told on the way, all asked for at the end.

    Between them are other facts of the same kinds with other owners, talk, documents and fixed phrases.
    """
    dialogue = Dialogue(random, unseen=True, echo=False)
    dialogue.begin(random.choice(_SYSTEMS) if random.random() < 0.5 else "")
    facts: dict[tuple[str, str], Fact] = {}
    while len(facts) < count:
        fact = new_fact(dialogue.told, OPEN_KINDS)
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
    kind = random.choices(("talk", "paste", "phrase", "tell", "ask"), (2, 1, 1, 2, 1))[0]
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
    else:
        dialogue.phrase()

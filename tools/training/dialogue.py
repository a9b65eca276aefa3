"""Synthetic conversations: facts told in passing and asked for later, among talk, documents, lists and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tools.training.facts import Fact, sentence
from tools.training.filler import document, fill, small_talk
from tools.training.kinds import KINDS, new_fact
from tools.training.phrases import (
    ACKNOWLEDGED,
    CHATS,
    DEMANDS,
    PHRASES,
    READ,
    REFUSED,
    RIDDLES,
    TALKED,
    UNKNOWN,
)
from tools.training.phrasing import ask_bare, ask_freely, follow_up, join, rough, tell_freely
from tools.training.tools import TOOLS, call_text, result_text, system_text, use
from tools.training.words import FOODS, Values

__all__ = ["SYSTEMS", "Dialogue", "Message", "conversation"]

CHARS_PER_TOKEN = 3.0

SYSTEMS = (
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


class Dialogue:
    """One growing conversation, with what was told so far.

    `unseen`: what is told has held-out values. `echo`: what is told is repeated instead of only acknowledged.
    """

    def __init__(self, random: Random, *, unseen: bool = False, echo: bool | None = None) -> None:
        self.random = random
        self.values = Values(random)
        self.told = Values(random, unseen=unseen)
        self.messages: list[Message] = []
        self.facts: dict[tuple[str, str], Fact] = {}
        self.lists: dict[str, list[str]] = {}
        self.tools: list[str] = []
        self.thinking = False
        self.free = 0.0
        """Share of what is told and asked in free words."""
        self.paraphrase = False
        """Whether facts that the caller gives are told and asked in words that training never uses."""
        self.plain = False
        """Whether all are told and asked in the plainest words."""
        self.echo = random.random() < 0.8 if echo is None else echo
        self.last: Fact | None = None
        """What was asked for last, if the next turn may refer to it."""
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
        self.last = None

    def begin(self, system: str = "", tools: list[str] | None = None) -> None:
        """The system message, if there is anything in it."""
        self.tools = tools or []
        text = system_text([TOOLS[name] for name in self.tools], system) if self.tools else system
        if text:
            self.say("system", text)

    def tell(self, count: int = 1, *, fact: Fact | None = None) -> None:
        facts = [fact] if fact else self._new_facts(count)
        statements = [self._learn(one, new=fact is not None) for one in facts]
        if self.free and self.random.random() < self.free:
            text = statements[0] if len(statements) == 1 else join(statements, self.random)
            if self.random.random() < 0.15:
                (chat,) = fill(self.values, self.random.choice(self.random.choice(CHATS)[0]))
                text = f"{chat} {text[0].upper() + text[1:]}"
            user = rough(text, ".", self.random)
        else:
            statements = [sentence(statement, ".") for statement in statements]
            if self.random.random() < 0.25:
                statements.insert(self.random.randint(0, len(statements)), small_talk(self.values))
            if self.random.random() < 0.1:
                statements.insert(0, self.random.choice(("Please remember:", "By the way:", "Note this:")))
            user = " ".join(statements)
        self.turn(user, self._noted(facts), "The user tells me something. I will remember it.")
        if len(facts) == 1 and fact is None:
            self.last = facts[0]

    def change(self) -> None:
        old = self.random.choice(list(self.facts.values()))
        self.tell(fact=Fact(old.kind, old.owner, old.kind.value(self.told)))

    def ask(self, fact: Fact | None = None) -> None:
        """Ask for a fact, by chance for two at once, unless it is given."""
        given, fact = fact, fact or self.random.choice(list(self.facts.values()))
        questions, answers = [self._question(fact, new=given is not None)], [fact.answered]
        if self.free and given is None and self.random.random() < 0.06:
            other = self.random.choice(list(self.facts.values()))
            if other != fact:
                questions.append(self._question(other))
                answers.append(other.answered)
        user = questions[0]
        if len(questions) > 1:
            second = questions[1]
            first = user.rstrip(".?")
            user = self.random.choice((f"{user} {second}", f"{first} and {second[0].lower() + second[1:]}"))
        thought = f"The user asks for something told before. {' '.join(answers)}"
        self.turn(user, " ".join(answers), thought)
        if len(questions) == 1 and given is None:
            self.last = fact

    def follow_up(self) -> None:
        """A turn that only makes sense after the one before."""
        fact, random = self.last, self.random
        if fact is None:
            return
        kind, style = fact.kind, random.random()
        if style < 0.4:
            others = [other for other in self.facts.values() if other.kind is kind and other.owner != fact.owner]
            if kind.owner(self.values) == "my":
                return
            if others and random.random() < 0.8:
                other = random.choice(others)
                reply = other.answered
            else:
                other = Fact(kind, kind.owner(self.values), "")
                reply = UNKNOWN
                if other.key in self.facts:
                    return
            user = other.fill(follow_up("another", random))
            self.turn(rough(user, "?", random), reply, f"The user asks for more. {reply}")
            if reply is not UNKNOWN:
                self.last = other
        elif style < 0.65:
            self.turn(rough(follow_up("again", random), "?", random), fact.answered, f"Once more. {fact.answered}")
            self.last = fact
        elif style < 0.8:
            self.turn(rough(follow_up("sure", random), "?", random), f"Yes. {fact.answered}", f"I am. {fact.answered}")
            self.last = fact
        else:
            new = Fact(kind, fact.owner, kind.value(self.told))
            user = rough(new.fill(follow_up("correction", random)), ".", random)
            self._learn(new)
            self.turn(user, f"Noted: {new.short}.", f"It has changed. {new.answered}")
            self.last = new

    def recount(self) -> None:
        """Ask for all that was told."""
        if len(self.facts) > 4:
            return
        user = rough(follow_up("recount", self.random), "?", self.random)
        told = "; ".join(fact.short for fact in self.facts.values())
        self.turn(user, f"You told me: {told}." if told else "You have not told me anything yet.")

    def ask_unknown(self) -> None:
        """A question about something that was not told, often close to what was; sometimes it is told then."""
        for _ in range(10):
            fact = new_fact(self.values)
            if self.facts and self.random.random() < 0.6:
                near = self.random.choice(list(self.facts.values()))
                kinds = [kind for kind in KINDS if kind.owner is near.kind.owner]
                fact = Fact(self.random.choice(kinds), near.owner, "")
            if fact.key not in self.facts:
                self.turn(self._question(fact), UNKNOWN, "The user asks for something that was not told.")
                if self.free and self.random.random() < 0.3:
                    fact = Fact(fact.kind, fact.owner, fact.kind.value(self.told))
                    user = rough(fact.fill(follow_up("teach", self.random)), ".", self.random)
                    self._learn(fact)
                    self.turn(user, f"Noted: {fact.short}.", f"Now I know it. {fact.answered}")
                    self.last = fact
                return

    def riddle(self) -> None:
        """A question that no fact answers, or a wish that the assistant cannot fulfil."""
        texts, reply = (RIDDLES, UNKNOWN) if self.random.random() < 0.7 else (DEMANDS, REFUSED)
        (text,) = fill(self.values, self.random.choice(texts))
        if reply is REFUSED and self.random.random() < 0.4:
            text = self.random.choice(("please {}", "can you {}?", "could you {}?", "I want you to {}")).format(text)
        self.turn(rough(text, ".", self.random), reply, "I do not know this.")

    def chat(self) -> None:
        """Small talk with an answer to it."""
        says, reply = self.random.choice(CHATS)
        user, reply = fill(self.values, self.random.choice(says), reply)
        if self.random.random() < 0.25:
            user = rough(
                user[0].lower() + user[1:] if self.random.random() < 0.5 else user.rstrip(".!?"), "", self.random
            )
        self.turn(user, reply)

    def talk(self) -> None:
        """A few sentences of no consequence."""
        count = self.random.choice((2, 2, 3))
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
            listing.insert(self.random.randint(0, len(listing)), sentence(self._learn(new_fact(self.told)), "."))
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

    def _new_facts(self, count: int) -> list[Fact]:
        """New facts, at most one for each thing."""
        facts: dict[tuple[str, str], Fact] = {}
        for _ in range(count):
            fact = new_fact(self.told)
            facts.setdefault(fact.key, fact)
        return list(facts.values())

    def _noted(self, facts: list[Fact]) -> str:
        if not self.echo or len(facts) > 4:
            return ACKNOWLEDGED
        return f"Noted: {'; '.join(fact.short for fact in facts)}."

    def _question(self, fact: Fact, *, new: bool = False) -> str:
        unseen = self.paraphrase and new
        if not unseen and not (self.free and self.random.random() < self.free):
            return fact.asked(self.values, plain=self.plain)
        if not unseen and fact.kind.bare and self.random.random() < 0.15:
            alike = [other for other in self.facts.values() if other.kind is fact.kind]
            if alike == [fact]:
                return rough(ask_bare(self.random.choice(fact.kind.bare), self.random), "?", self.random)
        return rough(ask_freely(fact, self.random, unseen=unseen), "?", self.random)

    def _learn(self, fact: Fact, *, new: bool = False) -> str:
        """Put down a fact; the statement that tells it."""
        known = fact.key in self.facts
        self.facts.pop(fact.key, None)
        self.facts[fact.key] = fact
        if known:
            return fact.fill(fact.kind.change.choose(self.random, fact.owner, fact.value))
        if self.paraphrase and new:
            return tell_freely(fact, self.random, unseen=True)
        if self.random.random() < self.free:
            return tell_freely(fact, self.random)
        return fact.fill(fact.kind.tell.choose(self.random, fact.owner, fact.value, plain=self.plain))


def conversation(random: Random, tokens: int) -> list[Message]:
    """A training conversation of about `tokens` tokens, or a little more."""
    dialogue = Dialogue(random)
    dialogue.thinking = random.random() < 0.06
    dialogue.free = random.choice((0.0, 0.5, 0.9, 0.95))
    system = random.choice(SYSTEMS) if random.random() < 0.4 else ""
    if random.random() < 0.12:
        lines = random.randint(3, max(4, tokens // 60))
        system = f"{random.choice(SYSTEMS)} " + dialogue.text(lines, facts=random.randint(0, 4))
    tools = random.sample(list(TOOLS), random.randint(1, 3)) if random.random() < 0.15 else None
    dialogue.begin(system, tools)
    weights = {
        "tell": random.uniform(0.5, 4),
        "ask": random.uniform(2, 6),
        "unknown": random.choice((0.3, 0.8)),
        "riddle": random.choice((0.1, 0.4)),
        "change": random.choice((0.2, 0.8)),
        "follow": 1.0 if dialogue.free else 0.0,
        "recount": 0.2 if dialogue.free else 0.0,
        "chat": random.choice((0.2, 0.6, 2)),
        "talk": random.choice((0.0, 0.1, 0.5)),
        "phrase": random.choice((0.2, 0.2, 1)),
        "repeat": random.choice((0.1, 0.3)),
        "listing": random.choice((0.0, 0.2, 0.5)),
        "paste": random.choice((0.0, 0.1, 0.4)),
        "tool": 1.0 if tools else 0.0,
    }
    turns = {
        "unknown": dialogue.ask_unknown,
        "riddle": dialogue.riddle,
        "follow": dialogue.follow_up,
        "recount": dialogue.recount,
        "chat": dialogue.chat,
        "talk": dialogue.talk,
        "phrase": dialogue.phrase,
        "repeat": dialogue.repeat,
        "listing": dialogue.listing,
        "tool": dialogue.call_tool,
    }
    kinds, chances = list(weights), list(weights.values())
    if random.random() < 0.3:
        dialogue.phrase()
    while dialogue.tokens < tokens:
        (kind,) = random.choices(kinds, chances)
        if kind == "tell" or (kind in ("ask", "change") and not dialogue.facts):
            dialogue.tell(random.choice((1, 1, 1, 1, 2, 2, 3, 4)))
        elif kind == "ask":
            dialogue.ask()
        elif kind == "change":
            dialogue.change()
        elif kind == "paste":
            longest = max(4, min(tokens // 40, 150))
            dialogue.paste(random.randint(3, longest), facts=random.choice((0, 0, 1, 3)))
        else:
            turns[kind]()
        if dialogue.last and dialogue.free and random.random() < 0.15:
            dialogue.follow_up()
    return dialogue.messages

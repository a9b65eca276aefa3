"""Policies of the disk tier on synthetic prompts, for a server that restarts before every request.

Tokens are random, messages and boundaries are real. A request restores the deepest stored boundary
of its prompt, and can store states only past it, where it evaluates. "Cacheable" is the deepest
boundary up to which an earlier prompt was the same. "Written" are the rows since the deepest stored
ancestor and one state for each stored prefix, for a 27B model with an f16 cache.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pyctl.cache.disk_policy import DiskPolicy, Selection
from pyctl.cache.recent import RecentPrompts
from pyctl.prompt import Prompt, common_prefix

__all__ = ["ROW_BYTES", "STATE_BYTES", "WORKLOADS", "Tally", "Writer", "prompt_of", "simulate"]

ROW_BYTES = 65_536
STATE_BYTES = 156_893_184
MIN_TOKENS = 512
COLD_MAX = 10_240

Message = list[int]


class Writer:
    """Draws messages; all of one seed differ from their first token of content."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def message(self, n: int, spread: float = 0.3) -> Message:
        """Return a message of about ``n`` tokens: a header of 3, the content and an end of 2."""
        length = round(n * self.random.uniform(1 - spread, 1 + spread))
        return [
            1,
            5,
            2,
            *(self.random.randrange(10, 150_000) for _ in range(max(length - 5, 1))),
            3,
            4,
        ]

    def exact(self, n: int) -> Message:
        return self.message(n, 0)

    def turn(self) -> list[Message]:
        """Return a reply and the message after it."""
        return [self.message(120), self.message(80)]


def prompt_of(messages: Sequence[Message]) -> Prompt:
    """Return the prompt of the messages and the generation header."""
    parts = [*messages, [1, 6, 2, 7]]
    starts = np.cumsum([len(part) for part in parts])[:-1]
    return Prompt.from_ids([token for part in parts for token in part], starts)


def stable_head(w: Writer) -> Iterator[list[Message]]:
    head = w.exact(1432)
    for _ in range(30):
        yield [head, w.message(300)]


def drifting_middle(w: Writer) -> Iterator[list[Message]]:
    """Yield conversations with notes between head and question: mostly a new one at their end,
    every fourth time an old one rewritten.
    """
    head = w.exact(1452)
    notes = [w.message(90) for _ in range(6)]
    for _ in range(30):
        yield [head, *notes, w.message(200)]
        if w.random.random() < 0.25:
            notes[w.random.randrange(len(notes))] = w.message(90)
        else:
            notes.append(w.message(40))


def task_state(w: Writer) -> Iterator[list[Message]]:
    """Yield conversations with tasks of five tool calls; the state of the task is the last message,
    another one in each request.
    """
    head = w.exact(1049)
    for _ in range(4):
        steps = [w.message(150)]
        for _ in range(5):
            yield [head, *steps, w.message(120)]
            steps += [w.message(60), w.message(350)]


def recent_turns(w: Writer) -> Iterator[list[Message]]:
    """Yield a conversation of which the client sends the newest turns, shortened to half when they
    are too many.
    """
    head = w.exact(869)
    turns = [[w.message(80)]]
    for _ in range(20):
        yield [head, *(message for turn in turns for message in turn)]
        turns.append([w.message(250), w.message(100)])
        if len(turns) > 8:
            del turns[:4]


def conversations(w: Writer) -> Iterator[list[Message]]:
    """Yield four conversations on one head, of which a random one goes on."""
    head = w.exact(900)
    opened = [[head, w.message(100)] for _ in range(4)]
    for _ in range(30):
        conversation = w.random.choice(opened)
        yield list(conversation)
        conversation += w.turn()


def rewritten_middle(w: Writer) -> Iterator[list[Message]]:
    """Yield conversations with eight notes between head and question, in each request another one
    of them rewritten.
    """
    head = w.exact(1452)
    notes = [w.exact(135) for _ in range(8)]
    for _ in range(30):
        yield [head, *notes, w.message(200)]
        notes[w.random.randrange(8)] = w.exact(135)


WORKLOADS: tuple[Callable[[Writer], Iterator[list[Message]]], ...] = (
    stable_head,
    drifting_middle,
    task_state,
    recent_turns,
    conversations,
    rewritten_middle,
)


@dataclass
class Tally:
    """Counts of requests and tokens; ``written`` is in bytes."""

    requests: int = 0
    hits: int = 0
    cached: int = 0
    cacheable: int = 0
    states: int = 0
    written: int = 0


def simulate(prompts: Sequence[Prompt], policy: DiskPolicy) -> Tally:
    """Run ``prompts`` through ``policy``."""
    tally = Tally()
    log = RecentPrompts()
    stored = set[bytes]()
    earlier: list[Prompt] = []
    for prompt in prompts:
        probed = {*prompt.boundaries, select(policy, prompt, log).selected}
        start = max((n for n in probed if key(prompt, n) in stored), default=0)
        positions = [n for n in select(policy, prompt, log, start).positions if n > start]
        for parent, n in zip((start, *positions), positions, strict=False):
            stored.add(key(prompt, n))
            tally.states += 1
            tally.written += (n - parent) * ROW_BYTES + STATE_BYTES
        tally.requests += 1
        tally.hits += start > 0
        tally.cached += start
        tally.cacheable += max((shared_boundary(prompt, other) for other in earlier), default=0)
        earlier.append(prompt)
        log.add(prompt)
    return tally


def select(policy: DiskPolicy, prompt: Prompt, log: RecentPrompts, start: int = 0) -> Selection:
    return policy.select(log.compare(prompt), min_tokens=MIN_TOKENS, cold_max=COLD_MAX, start=start)


def key(prompt: Prompt, n: int) -> bytes:
    return hashlib.blake2b(prompt.tokens[:n].tobytes(), digest_size=16).digest()


def shared_boundary(prompt: Prompt, other: Prompt) -> int:
    shared = common_prefix(other.tokens, prompt.tokens)
    return max((boundary for boundary in prompt.boundaries if boundary <= shared), default=0)

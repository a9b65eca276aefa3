"""The source ``cache``: what followed where the last tokens stood before, in anything that the cache remembers.

Agents write again what they have just read: files with changes, arguments of calls, quotes. A request that may use the
cache drafts from all prompts that the cache remembers, of all clients, and from replies, its own included; one that
may not, from its own text alone, which no other client sees. Drafts never choose a token, but like cached prefixes they
show in how fast tokens come.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread
from typing import NamedTuple

from pyctl.cache import RecentPrompts
from pyctl.engine.draft.source import DraftJob
from pyctl.engine.draft.token_index import CONTEXT, MAX_TOKENS, TokenIndex
from pyctl.prompt import Tokens, as_tokens

__all__ = ["BESIDE_MODEL", "CacheDrafts"]

BLOCK = 512
"""A prompt is taken in by blocks of so many tokens, each known by all tokens up to its end: what is there stays."""

OVERLAP = 32
"""Tokens before a new block that are taken in again, so that what leads there is found with what follows."""

HAND_OVER = 16
"""Generated tokens that are handed over together."""

LONGEST = 64
"""Tokens of the longest draft."""

BESIDE_MODEL = 7
"""Tokens that have to agree where a draft model could draft instead: with fewer it is right more often."""

TRUST = 2
"""Drafts for each token that agreed."""

LONGEST_CHANGE, MOST_CHANGES = 8, 4
"""Tokens of a change that is expected again where the text is as it was there; how many that begin with one token."""


class _Text(NamedTuple):
    """An errand: add ``tokens``, which stand from ``start`` on in the text that begins with ``prompt``.

    They go into the ``private`` index, if there is one.
    """

    prompt: Tokens
    start: int
    tokens: Tokens
    private: TokenIndex | None = None


FORGET = _Text(as_tokens([]), 0, as_tokens([]))
"""The errand to forget everything."""


class _Keeper:
    """Adds what is handed over to an index; everything here runs on its thread."""

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # by digest: up to which count of added tokens it was
        self._tail: tuple[Tokens | None, int] = (None, 0)  # whose text the index ends with, and where in it

    def run(self, queue: SimpleQueue[_Text | Event | None]) -> None:
        while (text := queue.get()) is not None:
            if isinstance(text, Event):
                text.set()
            elif text is FORGET:
                self._index.clear()
                self._blocks.clear()
                self._tail = None, 0
            elif text.private is not None:
                text.private.add(text.tokens)
            elif text.start:
                self._continue(text)
            else:
                self._remember(text.tokens)

    def _remember(self, prompt: Tokens) -> None:
        """Add those blocks of a prompt that are not there, or not any more."""
        digest = hashlib.blake2b(digest_size=16)
        data = memoryview(prompt.astype("<i4", copy=False).tobytes())
        for start in range(0, prompt.size, BLOCK):
            digest.update(data[4 * start : 4 * (start + BLOCK)])
            block, name = prompt[start : start + BLOCK], digest.digest()
            if self._index.n_added - self._blocks.get(name, -self._index.capacity) < self._index.capacity - 2 * BLOCK:
                continue
            self._continue(_Text(prompt, start, block))
            self._blocks[name] = self._index.n_added
            self._blocks.move_to_end(name)
            while len(self._blocks) > self._index.capacity // BLOCK:
                self._blocks.popitem(last=False)

    def _continue(self, text: _Text) -> None:
        whose, end = self._tail
        if whose is not text.prompt or end != text.start:
            self._index.begin()
            self._index.add(text.prompt[max(text.start - OVERLAP, 0) : text.start])
        self._index.add(text.tokens)
        self._tail = text.prompt, text.start + text.tokens.size


@dataclass(eq=False)
class _Change:
    """Where the text that is followed has ``first`` to ``last``, ``span`` tokens, the new one had ``instead``."""

    first: int
    last: int
    span: int
    instead: tuple[int, ...]
    n_right: int = 0
    n_wrong: int = 0


class _Expected(NamedTuple):
    """A token, and the place to go on from behind it; if it is due to a ``change``, whether that ends with it."""

    token: int
    place: int
    change: _Change | None = None
    ends: bool = True


@dataclass(eq=False)
class _Course:
    """Where a request is: ``n_known`` tokens were looked at, ``n_given`` handed over.

    The next tokens are expected at ``place``, after ``length`` that agreed and the rest of a change that has ``begun``.
    Without a place, ``parted`` is where the text left the one it had followed, and ``since`` what came instead.
    """

    prompt: Tokens
    index: TokenIndex | None = None
    n_known: int = 0
    n_given: int = 0
    place: int = 0
    length: int = 0
    begun: list[_Expected] = field(default_factory=list)
    parted: int = 0
    since: list[int] = field(default_factory=list)
    changes: dict[int, list[_Change]] = field(default_factory=dict)  # by the first token, the newest first

    def expect(self, index: TokenIndex, n: int) -> list[_Expected]:
        """The next ``n`` tokens, if the text goes on as the one it follows, with the changes that it had so far."""
        expected = list(self.begun)
        place = expected[-1].place if expected else self.place
        text = index.read(place, 2 * (n + LONGEST_CHANGE))
        i, left_out = 0, None
        while i < len(text) and len(expected) < n:
            change, span = self._change_at(text, i) if text[i] in self.changes else (None, 1)
            if change is None:
                expected.append(_Expected(text[i], place + i + 1, left_out))
                left_out = None
            elif change.instead:
                expected += [_Expected(token, place + i, change, False) for token in change.instead[:-1]]
                expected.append(_Expected(change.instead[-1], place + i + span, change))
            else:
                left_out = change
            i += span
        return expected[:n]

    def part(self, fresh: list[int]) -> None:
        """The text is at an end or goes on otherwise, with ``fresh``."""
        done: tuple[int, ...] = ()
        if self.begun and (change := self.begun[0].change) is not None:
            done = change.instead[: len(change.instead) - len(self.begun)]
        self.since = [*done, *fresh]
        self.parted, self.place, self.length, self.begun = self.place, 0, 0, []

    def _change_at(self, text: list[int], i: int) -> tuple[_Change | None, int]:
        for change in self.changes.get(text[i], ()):
            if change.n_right <= 2 * change.n_wrong:
                continue
            if change.span == 1:
                return change, 1
            for span in range(2, change.span + 3):
                if i + span <= len(text) and text[i + span - 1] == change.last:
                    return change, span
        return None, 1

    def learn(self, old: list[int], instead: tuple[int, ...]) -> None:
        """Remember that ``old`` became ``instead``."""
        changes = self.changes.setdefault(old[0], [])
        for change in changes:
            if change.last == old[-1] and change.instead == instead:
                change.n_right += 1
                changes.remove(change)
                break
        else:
            change = _Change(old[0], old[-1], len(old), instead, n_right=1)
        changes.insert(0, change)
        del changes[MOST_CHANGES:]


def _rest(expected: list[_Expected], n: int) -> list[_Expected]:
    """What is still to come of the change within which the first ``n`` end."""
    rest: list[_Expected] = []
    while not expected[n - 1].ends and not (rest and rest[-1].ends):
        rest.append(expected[n + len(rest)])
    return rest


class CacheDrafts:
    """Copies drafts of at most ``longest`` tokens; ``capacity`` tokens are remembered, a power of two.

    Where fewer than ``least`` tokens agree it leaves drafting to the next source.
    The engine's thread calls it and waits for nothing: texts are handed over to a thread that takes them in.
    """

    name = "cache"

    def __init__(self, capacity: int = MAX_TOKENS, longest: int = LONGEST, least: int = 1) -> None:
        self.index = TokenIndex(capacity)
        self.most = longest
        self._least = least
        self._courses: dict[int, _Course] = {}
        self._queue: SimpleQueue[_Text | Event | None] = SimpleQueue()
        keeper = _Keeper(self.index)
        Thread(target=keeper.run, args=(self._queue,), name="pyctl-drafts", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    @property
    def n_bytes(self) -> int:
        """What is remembered takes about so many bytes, with what requests that share nothing have of their own."""
        private = [course.index for course in self._courses.values() if course.index not in (None, self.index)]
        return self.index.n_bytes + sum(index.n_bytes for index in private if index is not None)

    def follow(self, recent: RecentPrompts) -> None:
        """Remember what ``recent`` does: its prompts of before a restart, and each that comes."""
        newest: list[Tokens] = []
        n_tokens = 0
        for one in recent.newest_first():
            n_tokens += len(one.prompt)
            if n_tokens > self.index.capacity // 2:
                break
            newest.append(one.prompt.tokens)
        for tokens in reversed(newest):
            self.remember(tokens)
        recent.listener = self.remember

    def remember(self, tokens: Tokens) -> None:
        """Take in a prompt that others may draft from."""
        self._queue.put(_Text(tokens, 0, tokens))

    def forget(self) -> None:
        """Forget all texts but what requests that share nothing have of their own."""
        self._queue.put(FORGET)

    def flush(self) -> None:
        """Wait until what was handed over is taken in: for tests and measurements."""
        done = Event()
        self._queue.put(done)
        done.wait()

    # -- as a source -------------------------------------------------------------------------------------------------

    def begin(self, key: int, prompt: Tokens) -> None:
        self._courses[key] = _Course(prompt)

    def propose(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        return [tuple(self._draft(job)) if job.key in self._courses else () for job in jobs]

    def learn(self, key: int, n_drafted: int, n_accepted: int) -> None:
        pass  # the next tokens tell

    def end(self, key: int) -> None:
        self._courses.pop(key, None)

    def _draft(self, job: DraftJob) -> list[int]:
        course = self._courses[job.key]
        n = job.seq.n + len(job.sure)
        if course.index is None:
            course.index = self._index_for(job, course.prompt)
            course.n_given = course.prompt.size
            course.n_known = n - 1
        index = course.index
        text = [*job.seq.tokens[max(job.seq.n - CONTEXT, 0) :].tolist(), *job.sure]
        if n - course.n_known > len(text):  # not asked for long
            course.part([])
            course.n_known, course.parted = n, 0
        fresh = text[len(text) - (n - course.n_known) :]
        course.n_known = n
        self._hand_over(job, course)
        self._keep_up(course, index, fresh)
        if not course.place:
            self._anchor(course, index, text)
        if not course.place or course.length < self._least:
            return []
        draft = course.expect(index, min(job.most, self.most, TRUST * course.length))
        if not draft:
            course.part([])
        return [expected.token for expected in draft]

    def _index_for(self, job: DraftJob, prompt: Tokens) -> TokenIndex:
        if job.seq.facts.cached:
            return self.index
        private = TokenIndex(1 << max(2 * prompt.size, 2**15).bit_length())
        self._queue.put(_Text(prompt, 0, prompt, private))
        return private

    def _hand_over(self, job: DraftJob, course: _Course) -> None:
        """What was generated, in pieces."""
        if job.seq.n - course.n_given >= HAND_OVER:
            private = None if course.index is self.index else course.index
            tokens = as_tokens(job.seq.tokens[course.n_given :])
            self._queue.put(_Text(course.prompt, course.n_given, tokens, private))
            course.n_given = job.seq.n

    def _keep_up(self, course: _Course, index: TokenIndex, fresh: list[int]) -> None:
        if not course.place:
            course.since += fresh
            return
        course.length += len(fresh)
        while True:
            expected = course.expect(index, len(fresh) + LONGEST_CHANGE)
            n = 0
            while n < min(len(fresh), len(expected)) and expected[n].token == fresh[n]:
                n += 1
            for each in expected[:n]:
                if each.change is not None and each.ends:
                    each.change.n_right += 1
            if n:
                course.place, course.begun = expected[n - 1].place, _rest(expected, n)
                fresh = fresh[n:]
            if not fresh:
                return
            wrong = expected[n].change if n < len(expected) else None
            if wrong is None:
                break
            wrong.n_wrong += 1
            n = 0 if course.begun else index.follow(course.place, fresh)
            if not n:
                break
            course.place += n  # nothing was changed here
            fresh = fresh[n:]
        course.part(fresh)

    def _anchor(self, course: _Course, index: TokenIndex, text: list[int]) -> None:
        """Find the place to go on from: near where the text parted from what it followed, or anywhere."""
        place, length = index.near(course.parted, course.since) if course.parted else (0, 0)
        if place:
            self._compare(course, index, place - length, course.since[:-length])
        else:
            place, length = index.find(text, course.parted)
        course.place, course.length = place, length

    def _compare(self, course: _Course, index: TokenIndex, place: int, instead: list[int]) -> None:
        """What the text had followed goes on at ``place``, and had something else before, or nothing."""
        n = place - course.parted
        if 0 <= n <= LONGEST_CHANGE and len(instead) <= LONGEST_CHANGE:
            old = index.read(course.parted, max(n, 1))
            if len(old) == max(n, 1) and (n or instead):
                course.learn(old, (*instead, *old[n:]))

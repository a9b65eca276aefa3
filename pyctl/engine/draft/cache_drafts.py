"""The source ``cache``: drafts the continuation of earlier occurrences of the last tokens, in all
remembered texts.

Agents often repeat text they have read: edited files, arguments of calls, quotes. A request that
may use the cache drafts from all remembered prompts and replies, of all clients; others draft
nothing, and their texts stay private. Drafts never change a token, but like cached prefixes they
affect the speed that clients observe.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from queue import SimpleQueue
from threading import Event, Thread
from typing import NamedTuple, TypeAlias

from pyctl.engine.draft.draft_settings import LONGEST
from pyctl.engine.draft.source import NO_MATCH, DraftJob, Match
from pyctl.engine.draft.token_index import AHEAD, CONTEXT, MAX_TOKENS, TokenIndex
from pyctl.prompt import Tokens, as_tokens

__all__ = ["CacheDrafts"]

BLOCK = 512
"""Tokens of a block. Prompts are added by block, identified by the digest of its prefix; known
blocks are skipped.
"""

OVERLAP = 32
"""Tokens before a new block that are added again, so that matches can span its start."""

HAND_OVER = 32
"""Generated tokens passed to the index's thread at a time."""

LONGEST_EDIT = 8
MAX_EDITS = 4
"""Most tokens of a change that is predicted again; most changes with the same first token."""


_Job: TypeAlias = Callable[[], object]


class _IndexWriter:
    """Adds texts to ``index``; its methods are called on one thread."""

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self._blocks: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # by digest: `n_added` after the block
        self._tail: tuple[Tokens | None, int] = (
            None,
            0,
        )  # the last text in the index, and the position there

    @staticmethod
    def run(queue: SimpleQueue[_Job | None]) -> None:
        """Call the functions of the queue until one is None."""
        while (job := queue.get()) is not None:
            job()

    def forget(self) -> None:
        """Drop all texts."""
        self._index.clear()
        self._blocks.clear()
        self._tail = None, 0

    def remember(self, prompt: Tokens) -> None:
        """Add the blocks of a prompt that the index lacks or has overwritten."""
        digest = hashlib.blake2b(digest_size=16)
        data = memoryview(prompt.astype("<i4", copy=False).tobytes())
        for start in range(0, prompt.size, BLOCK):
            digest.update(data[4 * start : 4 * (start + BLOCK)])
            block = prompt[start : start + BLOCK]
            name = digest.digest()
            if (
                self._index.n_added - self._blocks.get(name, -self._index.capacity)
                < self._index.capacity - 2 * BLOCK
            ):
                continue
            self.add(prompt, start, block)
            self._blocks[name] = self._index.n_added
            self._blocks.move_to_end(name)
            while len(self._blocks) > self._index.capacity // BLOCK:
                self._blocks.popitem(last=False)

    def add(self, prompt: Tokens, start: int, tokens: Tokens) -> None:
        """Add ``tokens`` at position ``start`` of the text that starts with ``prompt``."""
        whose, end = self._tail
        if whose is not prompt or end != start:
            self._index.begin()
            self._index.add(prompt[max(start - OVERLAP, 0) : start])
        self._index.add(tokens)
        self._tail = prompt, start + tokens.size


@dataclass(eq=False)
class _Edit:
    """A replacement of the source text's ``span`` tokens from ``first`` to ``last`` by
    ``instead``.
    """

    first: int
    last: int
    span: int
    instead: tuple[int, ...]
    n_right: int = 0
    n_wrong: int = 0


class _Expected(NamedTuple):
    """A predicted token and the source place after it; with an ``edit``, whether the token ``ends``
    it.
    """

    token: int
    place: int
    edit: _Edit | None = None
    ends: bool = True


@dataclass(eq=False)
class _Alignment:
    """The state of a request: ``n_known`` tokens compared with the source, -1 before; ``n_given``
    passed to the index.

    The source continues at ``place``, after ``length`` matching tokens and the rest of a change
    that has ``begun``. With ``place`` 0, ``parted`` is the source place where the text diverged,
    and ``since`` the tokens after that.
    """

    prompt: Tokens
    n_given: int
    n_known: int = -1
    place: int = 0
    length: int = 0
    begun: list[_Expected] = field(default_factory=list)
    parted: int = 0
    since: list[int] = field(default_factory=list)
    edits: dict[int, list[_Edit]] = field(
        default_factory=dict
    )  # by the first token, the newest first

    def expect(self, index: TokenIndex, n: int) -> Iterator[_Expected]:
        """Predict the next tokens, ``n`` and more: the source text with the changes learnt so
        far.
        """
        yield from self.begun
        place = self.begun[-1].place if self.begun else self.place
        text = index.read(place, 2 * (n + LONGEST_EDIT))
        i = 0
        left_out = None
        while i < len(text):
            edit, span = self._edit_at(text, i) if text[i] in self.edits else (None, 1)
            if edit is None:
                yield _Expected(text[i], place + i + 1, left_out)
                left_out = None
            elif edit.instead:
                yield from (_Expected(token, place + i, edit, False) for token in edit.instead[:-1])
                yield _Expected(edit.instead[-1], place + i + span, edit)
            else:
                left_out = edit
            i += span

    def part(self, fresh: list[int]) -> None:
        """Leave the source: it has ended, or the text diverges with ``fresh``."""
        done: tuple[int, ...] = ()
        if self.begun and (edit := self.begun[0].edit) is not None:
            done = edit.instead[: len(edit.instead) - len(self.begun)]
        self.since = [*done, *fresh]
        self.parted = self.place
        self.place = 0
        self.length = 0
        self.begun = []

    def _edit_at(self, text: list[int], i: int) -> tuple[_Edit | None, int]:
        for edit in self.edits.get(text[i], ()):
            if edit.n_right <= 2 * edit.n_wrong:
                continue
            if edit.span == 1:
                return edit, 1
            for span in range(2, edit.span + 3):
                if i + span <= len(text) and text[i + span - 1] == edit.last:
                    return edit, span
        return None, 1

    def learn(self, old: list[int], instead: tuple[int, ...]) -> None:
        """Record the replacement of ``old`` by ``instead``."""
        edits = self.edits.setdefault(old[0], [])
        for edit in edits:
            if edit.last == old[-1] and edit.instead == instead:
                edit.n_right += 1
                edits.remove(edit)
                break
        else:
            edit = _Edit(old[0], old[-1], len(old), instead, n_right=1)
        edits.insert(0, edit)
        del edits[MAX_EDITS:]


def _rest(expected: list[_Expected], n: int) -> list[_Expected]:
    """Return the remaining tokens of the change within which the first ``n`` end."""
    rest: list[_Expected] = []
    while not expected[n - 1].ends and not (rest and rest[-1].ends):
        rest.append(expected[n + len(rest)])
    return rest


class CacheDrafts:
    """Copies drafts of up to ``longest`` tokens from the last ``capacity`` tokens, a power of two.

    Calls never block: another thread adds the texts.
    """

    name = "cache"

    def __init__(self, capacity: int = MAX_TOKENS, longest: int = LONGEST) -> None:
        self.index = TokenIndex(capacity)
        self.maximum = longest
        self._alignments: dict[int, _Alignment] = {}
        self._writer = _IndexWriter(self.index)
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        Thread(
            target=_IndexWriter.run, args=(self._queue,), name="pyctl-drafts", daemon=True
        ).start()
        weakref.finalize(self, self._queue.put, None)

    @property
    def n_bytes(self) -> int:
        """Approximate bytes of the index."""
        return self.index.n_bytes

    def remember_all(self, newest_first: Iterable[Tokens]) -> None:
        """Add the newest of these prompts, up to half of the index."""
        newest: list[Tokens] = []
        for tokens in newest_first:
            if sum(each.size for each in (*newest, tokens)) > self.index.capacity // 2:
                break
            newest.append(tokens)
        for tokens in reversed(newest):
            self.remember(tokens)

    def remember(self, tokens: Tokens) -> None:
        """Add a prompt to the index."""
        self._queue.put(partial(self._writer.remember, tokens))

    def forget(self) -> None:
        """Drop all texts."""
        self._queue.put(self._writer.forget)

    def flush(self) -> None:
        """Wait until all texts are added, for tests and measurements."""
        done = Event()
        self._queue.put(done.set)
        done.wait()

    # -- as a source
    # ----------------------------------------------------------------------------------

    def begin(self, key: int, prompt: Tokens) -> None:
        self._alignments[key] = _Alignment(prompt, prompt.size)

    def end(self, key: int) -> None:
        self._alignments.pop(key, None)

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        if job.key not in self._alignments or not job.seq.facts.cached:
            return NO_MATCH
        index, (alignment, text) = self.index, self._followed(job)
        if alignment.place:
            expected = (each.token for each in alignment.expect(index, len(draft) + self.maximum))
            if tuple(islice(expected, len(draft))) == draft:
                return Match(
                    alignment.length + len(draft),
                    lambda n: tuple(islice(expected, min(n, self.maximum))),
                )
        if not draft:
            return NO_MATCH
        place, length = index.find([*text, *draft][-CONTEXT:], alignment.place or alignment.parted)
        return Match(length, lambda n: tuple(index.read(place, min(n, self.maximum))))

    def _followed(self, job: DraftJob) -> tuple[_Alignment, list[int]]:
        """Return the state of the request up to its last sure token, and the last CONTEXT
        tokens.
        """
        alignment = self._alignments[job.key]
        n = job.seq.n + len(job.sure)
        if alignment.n_known < 0:
            alignment.n_known = n - 1
        text = [*job.seq.tokens[max(job.seq.n - CONTEXT, 0) :].tolist(), *job.sure]
        if n == alignment.n_known:  # this step has asked before
            return alignment, text
        if n - alignment.n_known > len(text):  # not called for more than CONTEXT tokens
            alignment.part([])
            alignment.n_known = n
            alignment.parted = 0
        fresh = text[len(text) - (n - alignment.n_known) :]
        alignment.n_known = n
        self._hand_over(job, alignment)
        self._keep_up(alignment, fresh)
        if not alignment.place:
            self._anchor(alignment, text)
        return alignment, text

    def _hand_over(self, job: DraftJob, alignment: _Alignment) -> None:
        """Pass generated tokens to the index's thread, HAND_OVER or more at a time."""
        if job.seq.n - alignment.n_given >= HAND_OVER:
            tokens = as_tokens(job.seq.tokens[alignment.n_given :])
            self._queue.put(partial(self._writer.add, alignment.prompt, alignment.n_given, tokens))
            alignment.n_given = job.seq.n

    def _keep_up(self, alignment: _Alignment, fresh: list[int]) -> None:
        if not alignment.place:
            alignment.since += fresh
            return
        alignment.length += len(fresh)
        while True:
            maximum = len(fresh) + LONGEST_EDIT
            expected = list(islice(alignment.expect(self.index, maximum), maximum))
            n = 0
            while n < min(len(fresh), len(expected)) and expected[n].token == fresh[n]:
                n += 1
            for each in expected[:n]:
                if each.edit is not None and each.ends:
                    each.edit.n_right += 1
            if n:
                alignment.place, alignment.begun = expected[n - 1].place, _rest(expected, n)
                fresh = fresh[n:]
            if not fresh:
                return
            wrong = expected[n].edit if n < len(expected) else None
            if wrong is None:
                break
            wrong.n_wrong += 1
            n = 0 if alignment.begun else self.index.follow(alignment.place, fresh)
            if not n:
                break
            alignment.place += n  # the text follows the source here, without the change
            fresh = fresh[n:]
        alignment.part(fresh)

    def _anchor(self, alignment: _Alignment, text: list[int]) -> None:
        """Find a source place for the end of ``text``: near the divergence, else anywhere."""
        is_near = alignment.parted and len(alignment.since) <= AHEAD
        place, length = self.index.near(alignment.parted, alignment.since) if is_near else (0, 0)
        if place:
            self._compare(alignment, place - length, alignment.since[:-length])
        else:
            place, length = self.index.find(text, alignment.parted)
        alignment.place = place
        alignment.length = length

    def _compare(self, alignment: _Alignment, place: int, instead: list[int]) -> None:
        """Learn the change between the divergence and ``place``: the source's tokens there became
        ``instead``.
        """
        n = place - alignment.parted
        if 0 <= n <= LONGEST_EDIT and len(instead) <= LONGEST_EDIT:
            old = self.index.read(alignment.parted, max(n, 1))
            if len(old) == max(n, 1) and (n or instead):
                alignment.learn(old, (*instead, *old[n:]))

"""The source ``cache``: drafts the continuation of earlier occurrences of the last tokens, in all
remembered texts.

Agents often repeat text they have read: edited files, arguments of calls, quotes. A request that
may use the cache drafts from all remembered prompts and replies, of all clients; others draft
nothing, and their texts stay private. Drafts never change a token, but like cached prefixes they
affect the speed that clients observe.

The engine's thread looks texts up (`CacheDrafts.match`) and never waits. A thread of the source
adds texts to the index; both share the index without locks, see `token_index`.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import TypeAlias

from pyctl.engine.draft.ngram_settings import LONGEST
from pyctl.engine.draft.source import NO_MATCH, DraftJob, Match
from pyctl.engine.draft.token_index import MAX_TOKENS, TokenIndex
from pyctl.engine.draft.tracked_reply import TrackedReply
from pyctl.prompt import Tokens, as_tokens

__all__ = ["CacheDrafts"]

BLOCK = 512
"""Tokens of a block. Prompts are added by block, identified by the digest of its prefix; known
blocks are skipped.
"""

OVERLAP = 32
"""Tokens before a new block that are added again, so that matches can span its start."""

INDEX_STEP = 32
"""Generated tokens passed to the index's thread at a time."""

_Job: TypeAlias = Callable[[], object]


class _IndexWriter:
    """Adds texts to ``index``; its methods are called on one thread."""

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self._n_added_by_block: OrderedDict[bytes, int] = OrderedDict()  # after it, by its digest
        # The last text in the index, and the position at which it ends there.
        self._last_prompt: Tokens | None = None
        self._last_end = 0

    @staticmethod
    def run(queue: SimpleQueue[_Job | None]) -> None:
        """Call the functions of the queue until one is None."""
        while (job := queue.get()) is not None:
            job()

    def forget(self) -> None:
        """Drop all texts."""
        self._index.clear()
        self._n_added_by_block.clear()
        self._last_prompt = None
        self._last_end = 0

    def remember(self, prompt: Tokens) -> None:
        """Add the blocks of a prompt that the index lacks or has overwritten."""
        digest = hashlib.blake2b(digest_size=16)
        data = memoryview(prompt.astype("<i4", copy=False).tobytes())
        for start in range(0, prompt.size, BLOCK):
            end = start + BLOCK
            digest.update(data[4 * start : 4 * end])
            name = digest.digest()
            if not self._has_block(name):
                self.add(prompt, start, prompt[start:end])
                self._record_block(name)

    def _has_block(self, name: bytes) -> bool:
        """Return whether the index has the block, and will not overwrite it soon."""
        n_added = self._n_added_by_block.get(name)
        if n_added is None:  # never added, or forgotten since
            return False
        n_since = self._index.n_added - n_added
        return n_since < self._index.capacity - 2 * BLOCK

    def _record_block(self, name: bytes) -> None:
        self._n_added_by_block[name] = self._index.n_added
        self._n_added_by_block.move_to_end(name)
        max_blocks = self._index.capacity // BLOCK
        while len(self._n_added_by_block) > max_blocks:
            self._n_added_by_block.popitem(last=False)

    def add(self, prompt: Tokens, start: int, tokens: Tokens) -> None:
        """Add ``tokens`` at position ``start`` of the text that starts with ``prompt``."""
        if self._last_prompt is not prompt or self._last_end != start:
            overlap = max(start - OVERLAP, 0)
            self._index.begin()
            self._index.add(prompt[overlap:start])
        self._index.add(tokens)
        self._last_prompt = prompt
        self._last_end = start + tokens.size


class _Reply:
    """A request between `CacheDrafts.begin` and `CacheDrafts.end`: ``n_indexed`` of its tokens were
    passed to the index's thread.
    """

    def __init__(self, prompt: Tokens, tracked: TrackedReply) -> None:
        self.prompt = prompt
        self.tracked = tracked
        self.n_indexed = prompt.size


class CacheDrafts:
    """Copies drafts of up to ``longest`` tokens from the last ``capacity`` tokens, a power of two.

    Calls never block: another thread adds the texts.
    """

    name = "cache"

    def __init__(self, capacity: int = MAX_TOKENS, longest: int = LONGEST) -> None:
        self.index = TokenIndex(capacity)
        self.maximum = longest
        self._replies: dict[int, _Reply] = {}
        self._writer = _IndexWriter(self.index)
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        thread = Thread(
            target=_IndexWriter.run,
            args=(self._queue,),
            name="pyctl-drafts",
            daemon=True,
        )
        thread.start()
        weakref.finalize(self, self._queue.put, None)

    @property
    def n_bytes(self) -> int:
        """Approximate bytes of the index."""
        return self.index.n_bytes

    def remember_all(self, newest_first: Iterable[Tokens]) -> None:
        """Add the newest of these prompts, up to half of the index."""
        max_tokens = self.index.capacity // 2
        newest: list[Tokens] = []
        n_tokens = 0
        for tokens in newest_first:
            n_tokens += tokens.size
            if n_tokens > max_tokens:
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
        tracked = TrackedReply(self.index, self.maximum)
        self._replies[key] = _Reply(prompt, tracked)

    def end(self, key: int) -> None:
        self._replies.pop(key, None)

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        reply = self._replies.get(job.key)
        if reply is None or not job.seq.facts.cached:
            return NO_MATCH
        self._pass_to_index(reply, job)
        return reply.tracked.match(job, draft)

    def _pass_to_index(self, reply: _Reply, job: DraftJob) -> None:
        """Pass generated tokens to the index's thread, INDEX_STEP or more at a time."""
        first = reply.n_indexed
        if job.seq.n - first < INDEX_STEP:  # too few to be worth a call
            return
        tokens = as_tokens(job.seq.tokens[first:])
        self._queue.put(partial(self._writer.add, reply.prompt, first, tokens))
        reply.n_indexed = job.seq.n

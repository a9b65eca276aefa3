"""Random conversations, edits, branches, cancels and failures: every reply equals that of an engine
without a cache.

The fake backend's tokens depend on every row, on the state and on how batches were cut, so any
wrong restore shows.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyctl.cache.plan import batch_ends
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Prefix
from pyctl.chat.boundaries import boundaries, headers
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings, PrewarmDelays
from pyctl.engine.handle import RequestHandle
from pyctl.engine.pool_plan import PoolPlan
from pyctl.engine.request import Request
from pyctl.files.image_file import ImageFile
from pyctl.prompt import ImageSpan, Prompt, Tokens, as_tokens, common_prefix
from tests.effort import examples
from tests.fake import FakeBackend
from tests.unit.engine.drive import ask, cold, collect, request
from tests.unit.engine.scheduling import check_held

N_CTX = 4096

NO_FILE = ImageFile(b"", "png", 1, 1)

Message = tuple[int, int]
"""(seed, length)"""

messages = st.tuples(st.integers(0, 30), st.sampled_from([3, 17, 40, 100, 170, 300]))


def render(conversation: list[Message]) -> Prompt:
    """Each message begins with token 63, so that boundaries are a function of the tokens, as with a
    real template; the assistant's begin with 63, 61. Every fourth has an image within, of more than
    a batch if it is long.
    """
    ids: list[int] = []
    pictures: list[ImageSpan] = []
    for i, (seed, n) in enumerate(conversation):
        text = np.random.default_rng(seed).integers(1, 60, n).tolist()
        ids += [63, 61 if i % 2 == 0 and i else 60, *text[: n // 2]]
        if seed % 4 == 1:
            pictures.append(ImageSpan(bytes([seed, n % 256]), n // 10 + 1, 9, NO_FILE, len(ids)))
            ids += pictures[-1].tokens.tolist()
        ids += text[n // 2 :]
    tokens = as_tokens([*ids, 63, 61, 62])
    found = boundaries(tokens, [63])
    return Prompt(tokens, found, headers=headers(tokens, found, [63, 61]), pictures=tuple(pictures))


def shortened(conversation: list[Message]) -> list[Message]:
    """Leave ``conversation`` what has room in the context, with two more messages and a reply;
    returns it.
    """
    while len(render([*conversation, (7, 40), (8, 40)])) > N_CTX - 10:
        del conversation[-1]
    return conversation


class SeeingBackend(FakeBackend):
    """It knows where there are images, and that none can be cut."""

    def evaluate(
        self,
        seq: int,
        tokens: Tokens,
        start: int,
        *,
        output: bool = True,
        picture: ImageSpan | None = None,
    ) -> None:
        assert tokens.min() >= 0 or len(set(np.sign(tokens))) == 1, "text and an image in one batch"
        if picture is not None:
            assert picture.start <= start < start + tokens.size <= picture.end
            self.__dict__.setdefault("images", {}).setdefault(seq, []).append(picture)
        super().evaluate(seq, tokens, start, output=output, picture=picture)

    def rewind(self, seq: int, n: int) -> None:
        held = self.__dict__.setdefault("images", {}).setdefault(seq, [])
        assert not any(picture.start < n < picture.end for picture in held), "an image was cut"
        held[:] = [picture for picture in held if picture.end <= n]
        super().rewind(seq, n)

    def clear(self, seq: int) -> None:
        self.__dict__.setdefault("images", {}).pop(seq, None)
        super().clear(seq)


class Conversations(RuleBasedStateMachine):
    @initialize(
        kind=st.sampled_from(["hybrid", "hybrid", "attention", "opaque"]),
        n_slots=st.sampled_from([1, 2, 3, 8, 32]),
        budget=st.sampled_from([None, None, 6_000, 20_000]),
        exact=st.sampled_from([True, True, False]),
        min_step=st.sampled_from([0, 128, 8192]),
        n_seqs=st.sampled_from([1, 1, 2]),
        batch=st.sampled_from([(64, 0), (64, 50), (256, 120)]),
        can_hold=st.sampled_from([True, True, False]),
        n_cells=st.sampled_from([N_CTX, 6000, 8192]),
        pool=st.sampled_from([None, None, None, PoolPlan.for_layers(2, N_CTX, 4, 1000)]),
    )
    def start(
        self,
        kind: str,
        n_slots: int,
        budget: int | None,
        exact: bool,
        min_step: int,
        n_seqs: int,
        batch: tuple[int, int],
        can_hold: bool,
        n_cells: int,
        pool: PoolPlan | None,
    ) -> None:
        """Make the engine and its backend, and one conversation."""
        if pool is not None:
            n_seqs = 1
            n_cells = N_CTX
        self.new = partial(SeeingBackend, kind, n_ctx=N_CTX, n_ubatch=batch[0], batch_cost=batch[1])
        self.kind = kind
        self.backend = self.new(n_seqs=n_seqs, n_cells=n_cells, can_hold=can_hold, pool=pool)
        self.engine = Engine(
            self.backend,
            RamCache(n_slots, budget),
            EngineSettings(exact=exact, min_step=min_step, prewarm=PrewarmDelays(0.0, 0.0, 0)),
        )
        self.conversations: list[list[Message]] = [[(0, 300)]]
        self.exact = exact
        self.n_failed = 0
        self.pinned: set[Prefix] = set()

    @rule(head=st.integers(0, 2), first=messages)
    def begin(self, head: int, first: Message) -> None:
        self.conversations = [*self.conversations[-5:], [(head, 300), first]]

    @rule(data=st.data(), added=st.lists(messages, min_size=1, max_size=3))
    def extend(self, data: st.DataObject, added: list[Message]) -> None:
        conversation = data.draw(st.sampled_from(self.conversations))
        if len(conversation) < 12:
            conversation.extend(added)
        self.check(shortened(conversation))

    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        self.check(data.draw(st.sampled_from(self.conversations)))

    @rule(data=st.data(), at=st.integers(0, 11), message=messages)
    def edit(self, data: st.DataObject, at: int, message: Message) -> None:
        conversation = data.draw(st.sampled_from(self.conversations))
        conversation[at % len(conversation)] = message
        self.check(shortened(conversation))

    @rule(data=st.data(), at=st.integers(1, 11))
    def shorten(self, data: st.DataObject, at: int) -> None:
        conversation = data.draw(st.sampled_from(self.conversations))
        del conversation[at % len(conversation) + 1 :]
        self.check(conversation)

    @rule(data=st.data(), message=messages)
    def branch(self, data: st.DataObject, message: Message) -> None:
        stem = data.draw(st.sampled_from(self.conversations))
        self.conversations = [
            *self.conversations[-5:],
            shortened([*stem[: max(1, len(stem) - 1)], message]),
        ]
        self.check(self.conversations[-1])

    @rule(data=st.data(), steps=st.integers(0, 25))
    def cancel(self, data: st.DataObject, steps: int) -> None:
        ask(self.engine, render(data.draw(st.sampled_from(self.conversations))), cancel_after=steps)

    @rule(data=st.data(), steps=st.integers(0, 6), is_next=st.booleans())
    def make_ready(self, data: st.DataObject, steps: int, is_next: bool) -> None:
        """Submit a background request that evaluates a prompt or a next turn; a client's request
        follows after ``steps``.
        """
        conversation = data.draw(st.sampled_from(self.conversations))
        asked = request(render(conversation), 6)
        before = RequestHandle(asked)
        self.engine.submit(before)
        while not before.is_over:
            self.engine.step()
        wanted = render([*conversation, (7, 40), (8, 40)])
        after = asked if is_next else None
        handle = RequestHandle(Request(wanted, max_tokens=0, background=True, after=after))
        self.engine.submit(handle)
        for _ in range(steps):
            self.engine.step()
        prompt = render(data.draw(st.sampled_from(self.conversations)))
        reply = ask(self.engine, prompt, 6)
        assert reply.error is None
        if self.exact:
            assert reply.tokens == cold(self.new(), prompt, 6).tokens
        assert collect(handle).error is None

    @rule(count=st.integers(1, 3))
    def fail(self, count: int) -> None:
        self.backend.fail_loads = count

    @rule(data=st.data(), pinned=st.booleans())
    @precondition(lambda self: self.engine.prefix_cache.cache.snapshots())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        snapshot = data.draw(st.sampled_from(self.engine.prefix_cache.cache.snapshots()))
        if not pinned or not self.engine.prefix_cache.cache.index.pinned:
            self.engine.prefix_cache.cache.pin(snapshot.prefix.name, pinned)
        self.pinned = {each.prefix for each in self.engine.prefix_cache.cache.index.pinned}

    @rule()
    def clear(self) -> None:
        self.engine.prefix_cache.cache.clear()

    @rule()
    def sleep(self) -> None:
        """Move held rows without a copy to RAM, as far as there is room."""
        cache = self.engine.prefix_cache.cache
        for seq in self.engine.sequences:
            self.engine.prefix_cache.park(
                seq
            )  # which may take the slot of another snapshot, if there are few
        before = {snapshot.prefix for snapshot in cache.snapshots()}
        self.engine.sleep()
        assert all(segment.held is None for segment in cache.segments())
        assert cache.budget.limit is not None or before <= {
            snapshot.prefix for snapshot in cache.snapshots()
        }
        self.engine.wake()

    @rule()
    def copy(self) -> None:
        """Do the work of an idle moment."""
        cache = self.engine.prefix_cache.cache
        before = cache.snapshots()
        while self.engine.prefix_cache.device.copies.copy_one():
            pass
        assert cache.snapshots() == before

    def check(self, conversation: list[Message]) -> None:
        prompt = render(conversation)
        deepest = self.deepest(prompt)
        failing = self.backend.fail_loads > 0
        before = self.backend.n_evaluated
        reply = ask(self.engine, prompt, 6)
        assert reply.error is None
        stats = reply.done.stats
        assert stats.n_cached + stats.n_evaluated == stats.n_prompt == len(prompt)
        n_decoded = reply.done.timings.n_predicted - 1
        assert self.backend.n_evaluated - before == stats.n_evaluated + n_decoded
        if not failing:
            assert stats.n_cached >= deepest, f"position {deepest} could have been restored"
        if self.exact:
            assert reply.tokens == cold(self.new(), prompt, 6).tokens

    def deepest(self, prompt: Prompt) -> int:
        """Return the restorable position by a plain search over all stored snapshots."""
        ends = batch_ends(
            prompt, self.backend.facts.n_ubatch, batch_cost=self.backend.facts.batch_cost
        )
        best = 0
        for snapshot in self.engine.prefix_cache.cache.snapshots():
            stored = snapshot.last_tokens(snapshot.n)
            n = common_prefix(stored, prompt.tokens)
            if n == snapshot.n < len(prompt) and (not self.exact or n in ends):
                best = max(best, n)
            elif self.kind == "attention":
                inside = [
                    end
                    for end in snapshot.batch_ends
                    if end in ends and end <= min(n, len(prompt) - 1)
                ]
                best = max([best, *inside])
        return best

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "engine"):
            cache = self.engine.prefix_cache.cache
            check_held(self.engine, self.backend)
            if (
                self.engine.prefix_cache.totals.failed_restores == self.n_failed
            ):  # what does not load is given up
                assert self.pinned == {snapshot.prefix for snapshot in cache.index.pinned}
            self.n_failed = self.engine.prefix_cache.totals.failed_restores
            self.pinned = {snapshot.prefix for snapshot in cache.index.pinned}
            assert not self.engine.running
            for seq in self.engine.sequences:
                held = self.backend.seqs[seq.id]
                assert len(held.rows) == seq.n
                assert seq.n_exact <= seq.n


TestConversations = Conversations.TestCase
TestConversations.settings = settings(max_examples=examples(100), stateful_step_count=40)

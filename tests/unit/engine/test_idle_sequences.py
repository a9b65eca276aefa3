"""Which idle sequence a request takes, and which one is emptied: the choice loses the fewest
expected seconds.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import PromptMatch
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.request import Done
from pyctl.prompt import Prompt
from tests.effort import examples
from tests.fake import FakeBackend
from tests.unit.engine.drive import Reply, ask, chat, collect, run_all
from tests.unit.engine.scheduling import ENDLESS, KINDS, alone, check_at_rest, submit

HEAD = (1, 224)


class Clients:
    """Conversations with one head, each of which goes on where its last reply ended, and short side
    requests.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.messages: dict[int, list[tuple[int, int]]] = {}

    def prompt(self, who: int, n: int) -> Prompt:
        """Return the next turn of conversation ``who``, longer by ``n`` tokens."""
        told = self.messages.setdefault(who, [HEAD])
        told.append((100 * who + len(told), n))
        return chat(*told)

    def turn(self, who: int, n: int, **fields: object) -> Reply:
        return ask(self.engine, self.prompt(who, n), 1, **fields)

    def title(self, seed: int, n: int = 6) -> Reply:
        """Return the reply to a request that shares no more than the beginning of every prompt."""
        return ask(self.engine, chat((1000 + seed, n)), 4)

    def live(self, who: int) -> bool:
        """Return whether all that was evaluated of a conversation is in a sequence."""
        prompt = chat(*self.messages[who])
        return any(seq.shared(prompt.tokens) == len(prompt) for seq in self.engine.sequences)


def engine_of(
    kind: str = "hybrid", n_seqs: int = 4, n_ctx: int = 16384, **options: object
) -> Engine:
    backend = FakeBackend(kind, n_ctx=n_ctx, n_seqs=n_seqs)
    return Engine(backend, RamCache(0, None), EngineSettings(**{"clear_idle": False, **options}))


def test_agents_with_one_head_take_a_sequence_each() -> None:
    """The head is held for all of them: it is evaluated once, and no agent's sequence is emptied
    for it.
    """
    engine = engine_of()
    clients = Clients(engine)
    first = clients.turn(1, 300)
    assert [clients.turn(who, 300).done.stats.n_cached for who in (2, 3, 4)] == [224] * 3
    assert [clients.live(who) for who in (1, 2, 3, 4)] == [True] * 4
    assert first.done.stats.n_cached == 0
    for who in (1, 2, 3, 4):
        assert clients.turn(who, 40).done.stats.source == "live"


def test_request_spares_a_numbered_sequence_if_it_fits_elsewhere() -> None:
    """Also where a request that is served alone has all others parked."""
    engine = engine_of(n_ctx=2048, clear_idle=True)
    clients = Clients(engine)
    clients.turn(1, 1000, seq=0)
    for seed in range(3):
        clients.title(seed)
    ask(engine, chat((9, 30)), 1, seq=1)
    assert clients.live(1)
    ask(engine, chat((9, 1500)), 1, seq=1)
    assert engine.sequences[0].n == 0, "there is no room for both"


def test_beside_a_long_reply_titles_leave_conversations_where_they_are() -> None:
    """A title beside a long reply leaves conversations in their sequences. With the default, idle
    sequences are parked for a request that runs alone; here no request does.
    """
    engine = engine_of(clear_idle=True)
    clients = Clients(engine)
    long = submit(engine, chat((50, 300)), 4000, sampling=ENDLESS)
    engine.step()

    def beside(prompt: Prompt) -> RequestStats:
        handle = submit(engine, prompt, 2)
        for _ in range(200):
            engine.step()
            if (
                done := next((each for each in handle.drain() if isinstance(each, Done)), None)
            ) is not None:
                return done.stats
        raise AssertionError("it never ends")

    beside(clients.prompt(1, 1000))
    beside(clients.prompt(2, 600))
    n_kept = len(engine.prefix_cache.cache.snapshots())
    for seed in range(8):
        beside(chat((1000 + seed, 6)))
    assert clients.live(1) is True
    assert clients.live(2) is True
    assert len(engine.prefix_cache.cache.snapshots()) == n_kept
    n_loaded = engine.backend.n_loaded
    assert [beside(clients.prompt(who, 40)).source for who in (1, 2)] == ["live", "live"]
    assert engine.backend.n_loaded == n_loaded
    assert engine.running, "the long reply still goes on"
    long.cancel()
    run_all(engine)


def held_of(engine: Engine, prompt: Prompt) -> set[bool]:
    """Return whether the device still holds the rows of each snapshot of a prompt, as a set."""
    match = PromptMatch(prompt.tokens)
    found = engine.prefix_cache.cache.lookup(match, len(prompt))
    return {segment.held is not None for snapshot in found for segment in snapshot.chain}


@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_long_unused_rows_are_evicted_before_recently_used_ones(kind: str) -> None:
    engine = engine_of(kind, n_seqs=2, n_ctx=2048)
    old = chat((1, 600))
    new = chat((2, 600))
    ask(engine, old, 1, seq=0)
    for _ in range(12):
        ask(engine, new, 1, seq=1)
    ask(engine, chat((3, 40)), 1, seq=1)
    assert engine.prefix_cache.device.n_cells >= 600, "the conversation was left and is held"
    ask(engine, chat((4, 900)), 1, seq=1)
    assert held_of(engine, new) == {True}
    assert engine.sequences[0].n == 0
    assert held_of(engine, old) != {True}, "its cells were needed"
    assert ask(engine, new, 1).done.stats.n_evaluated <= 1


def test_what_is_recent_stays_and_held_rows_leave() -> None:
    engine = engine_of(n_seqs=2, n_ctx=2048)
    old = chat((1, 600))
    new = chat((2, 600))
    ask(engine, old, 1, seq=1)
    ask(engine, chat((3, 40)), 1, seq=1)
    for _ in range(12):
        ask(engine, new, 1, seq=0)
    ask(engine, chat((4, 900)), 1, seq=1)
    assert engine.sequences[0].shared(new.tokens) == len(new)
    assert held_of(engine, old) != {True}


def test_a_small_one_makes_way_where_that_is_enough() -> None:
    engine = engine_of(n_seqs=4, n_ctx=4096)
    conversation = chat((1, 3000))
    title = chat((2, 300))
    ask(engine, conversation, 1, seq=0)
    ask(engine, title, 1, seq=1)
    ask(engine, chat((3, 900)), 1, seq=2)
    assert [seq.n > 0 for seq in engine.sequences] == [True, False, True, False]
    ask(engine, chat((4, 2000)), 1, seq=3)
    assert [seq.n > 0 for seq in engine.sequences[::3]] == [False, True], "now the large one does"


def test_a_conversation_that_makes_way_late_is_no_younger_for_it() -> None:
    engine = engine_of(n_seqs=2)
    cache = engine.prefix_cache.cache
    prompt = chat((1, 600))
    said = ask(engine, prompt, 80, seq=0, sampling=ENDLESS).tokens
    turn = cache.turn
    for seed in range(10):
        ask(engine, chat((10 + seed, 40)), 1, seq=1)
    ask(engine, chat((2, 600)), 1, seq=0)
    parked = cache.lookup(PromptMatch(Prompt.from_ids([*prompt.tokens, *said]).tokens), 10_000)[0]
    assert parked.n > len(prompt)
    assert cache.index.tree[parked].used == turn


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.integers(1, 3), st.sampled_from([40, 300])),
        st.tuples(st.just("title"), st.integers(0, 3), st.sampled_from([5, 60])),
        st.tuples(st.just("both"), st.integers(1, 3), st.sampled_from([5, 60])),
    ),
    min_size=4,
    max_size=12,
)


@settings(max_examples=examples(60))
@given(
    kind=st.sampled_from(KINDS),
    n_seqs=st.sampled_from([2, 3, 4]),
    actions=ACTIONS,
    exact=st.booleans(),
)
def test_side_requests_leave_conversations_where_they_are(
    kind: str, n_seqs: int, actions: list[tuple[str, int, int]], exact: bool
) -> None:
    """A side request takes no conversation's sequence as long as there is a sequence for each
    conversation and one more.

    What is ``exact`` has all to itself, and replies as if it were alone.
    """
    engine = engine_of(kind, n_seqs, 8192, exact=exact)
    clients = Clients(engine)
    for number, (action, value, n) in enumerate(actions):
        n_held = sum(seq.n > 0 for seq in engine.sequences)
        others = [
            who
            for who in clients.messages
            if clients.live(who) and (action == "title" or who != value)
        ]
        asked = [(chat((1000 + number, n)), 4)] if action != "turn" else []
        if action != "title":
            asked.append((clients.prompt(value, n if value in clients.messages else 600), 3))
        handles = [submit(engine, *each) for each in asked]
        run_all(engine)
        for (prompt, n_reply), handle in zip(asked, handles, strict=True):
            reply = collect(handle)
            assert reply.error is None
            assert not exact or reply.tokens == alone(prompt, n_reply, kind, 8192).tokens
        check_at_rest(engine, engine.backend)
        if not exact:
            assert sum(seq.n > 0 for seq in engine.sequences) >= n_held, "there are cells for all"
            assert len(clients.messages) + len(asked) > n_seqs or all(map(clients.live, others))

"""The draft source `cache`: the texts that it copies from, and how it continues after a change."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import PromptFacts
from pyctl.engine.draft.cache_drafts import BLOCK, OVERLAP, CacheDrafts
from pyctl.engine.draft.source import NO_MATCH, DraftJob
from pyctl.prompt import Tokens, as_tokens

FILE = as_tokens(np.random.default_rng(1).permutation(5000)[:700])
OTHER = as_tokens(10_000 + np.random.default_rng(2).permutation(5000)[:700])


class Talk:
    """A request that decodes: its prompt, then tokens as the model says them."""

    def __init__(
        self, source: CacheDrafts, key: int, prompt: Tokens, *, cached: bool = True
    ) -> None:
        self.source = source
        self.key = key
        self.seq = LiveSequence(0, 10_000, facts=PromptFacts(cached=cached))
        self.seq.reset(prompt)
        if cached:
            source.remember(prompt)
        source.begin(key, prompt)
        source.flush()
        self.sure: int | None = None

    def say(self, *tokens: int) -> None:
        for token in tokens:
            if self.sure is not None:
                self.seq.append_one(self.sure)
            self.sure = token

    def job(self, maximum: int = 64, *, key: int | None = None) -> DraftJob:
        return DraftJob(self.key if key is None else key, self.seq, (self.sure,), maximum)

    def draft(self, maximum: int = 64) -> list[int]:
        return list(self.source.match(self.job(maximum)).read(maximum))

    def says(self, tokens: Sequence[int]) -> list[list[int]]:
        """Say them one by one; the drafts after each."""
        drafts = []
        for token in tokens:
            self.say(int(token))
            drafts.append(self.draft())
            self.source.flush()
        return drafts


@pytest.fixture
def source() -> CacheDrafts:
    return CacheDrafts(2**14)


def starts(draft: list[int], expected: Sequence[int]) -> bool:
    return bool(draft) and draft == [int(token) for token in expected[: len(draft)]]


def test_a_file_that_was_read_is_written_again(source: CacheDrafts) -> None:
    talk = Talk(source, 1, as_tokens([*OTHER[:50], *FILE, *OTHER[50:90]]))
    drafts = talk.says(FILE[:60].tolist())
    assert drafts[0] == drafts[1] == []
    for i in range(5, 60):
        assert starts(drafts[i], FILE[i + 1 :])
    assert len(drafts[40]) == 64
    assert len(talk.draft(5)) == 5


def test_it_says_how_much_matches(source: CacheDrafts) -> None:
    talk = Talk(source, 1, FILE)
    for i in range(20):
        talk.say(int(FILE[i]))
        assert source.match(talk.job()).n == (i + 1 if i > 2 else 0)
    talk.says([555_555, *FILE[21:30].tolist()])
    assert source.match(talk.job()).n == 9, "since it goes on"
    assert source.match(talk.job(), tuple(FILE[30:33].tolist())).n == 12, "drafts that agree count"
    assert source.match(talk.job(), tuple(FILE[100:110].tolist())).n == 10, "found by the draft"
    assert source.match(talk.job(), (555_555, 555_556)).n == 0
    assert source.match(talk.job(key=9)).n == 0


def test_where_a_text_ends_another_place_is_looked_for(source: CacheDrafts) -> None:
    Talk(source, 1, FILE[:100])
    talk = Talk(source, 2, as_tokens([*OTHER[:100].tolist(), *FILE[90:200].tolist()]))
    talk.says(FILE[:100].tolist())
    drafts = talk.says(FILE[100:110].tolist())
    assert starts(drafts[-1], FILE[110:])


def test_a_draft_of_another_source_is_continued(source: CacheDrafts) -> None:
    """Tokens that another source drafts extend the match, so that both drafts together are longer
    than either. They do not count as part of the reply afterwards.
    """
    talk = Talk(source, 1, FILE)
    talk.says(FILE[:20].tolist())
    talk.says([555_555, *FILE[21:23].tolist()])
    head = tuple(FILE[23:26].tolist())
    assert starts([*source.match(talk.job(), head).read(8)], FILE[26:]), "the head expects the same"
    assert len(source.match(talk.job(), head).read(8)) == 8
    assert source.match(talk.job(), (555_555, 555_555)).read(8) == (), (
        "nothing was seen behind that"
    )
    assert source.match(talk.job(key=9), head).read(8) == ()
    elsewhere = tuple(FILE[100:110].tolist())
    assert starts([*source.match(talk.job(), elsewhere).read(8)], FILE[110:]), (
        "found by the draft alone"
    )
    # None of these is taken for the reply.
    talk.says(FILE[23:33].tolist())
    assert starts(talk.draft(), FILE[33:])


def test_drafts_come_from_other_conversations(source: CacheDrafts) -> None:
    Talk(source, 1, FILE)
    source.end(1)
    talk = Talk(source, 2, OTHER)
    assert starts(talk.says(FILE[:20].tolist())[-1], FILE[20:])


def test_who_does_not_share_neither_gives_nor_gets(source: CacheDrafts) -> None:
    secret = Talk(source, 1, FILE, cached=False)
    shared = Talk(source, 2, OTHER)
    assert not any(shared.says(FILE[:40].tolist()))
    secret.says(range(20_000, 20_100))
    assert not any(secret.says(OTHER[240:280].tolist()))
    assert not any(shared.says(range(20_000, 20_050)))
    assert not any(secret.says(FILE[100:120].tolist()))
    assert starts(shared.says(OTHER[100:120].tolist())[-1], OTHER[120:])


def test_the_own_reply(source: CacheDrafts) -> None:
    talk = Talk(source, 1, OTHER)
    talk.says(FILE[:100].tolist())
    talk.says(range(20_000, 20_020))
    assert starts(talk.says(FILE[10:30].tolist())[-1], [*FILE[30:100], *range(20_000, 20_020)])


@pytest.mark.parametrize(("change", "back"), [([555, 556], 63), ([557], 61), ([], 80)])
def test_on_after_a_change(source: CacheDrafts, change: list[int], back: int) -> None:
    """Tokens replaced, put in and left out: two that agree again are enough, although both are
    everywhere.
    """
    lines = as_tokens([token for i in range(60) for token in (i + 100, 7, 8, 9, 3)])
    talk = Talk(source, 1, as_tokens([*OTHER[:100], *lines, *OTHER[100:]]))
    talk.says([*lines[:61].tolist(), *change])
    drafts = talk.says(lines[back : back + 3].tolist())
    line = lines[back + 2 :].tolist()
    assert starts(drafts[1][:2], line) or drafts[1][:1] == line[:1] == [113]


def rewritten(text: Sequence[int], change: Callable[[list[int]], list[int]]) -> list[int]:
    """Return ``text`` with a change in each line, which ends with 3."""
    lines: list[list[int]] = [[]]
    for token in text:
        lines[-1].append(int(token))
        if token == 3:
            lines.append([])
    return [token for line in lines for token in change(line)]


@pytest.mark.parametrize(
    "change",
    [
        lambda line: [
            1001 if token == 3 else token for token in line
        ],  # an end of line is another token
        lambda line: [
            piece for token in line for piece in ((1001, 1002) if token == 3 else (token,))
        ],  # or two
        lambda line: [1001, *line],  # a mark before each line
        lambda line: line[4:],  # without its number: other digits each time, then a tab
        lambda line: [1005 if token == 50 else token for token in line],  # a name
    ],
)
def test_a_change_is_made_everywhere(
    source: CacheDrafts, change: Callable[[list[int]], list[int]]
) -> None:
    """A replacement, insertion or deletion made twice is expected at the next such place."""
    rng = np.random.default_rng(5)
    text = [
        token
        for i in range(60)
        for token in (
            4,
            10 + i // 10,
            10 + i % 10,
            5,
            *(300 + rng.permutation(600)[:9]).tolist(),
            50,
            51,
            3,
        )
    ]
    talk = Talk(source, 1, as_tokens([*OTHER[:100].tolist(), *text, *OTHER[100:].tolist()]))
    reply = rewritten(text, change)
    drafts = talk.says(reply)
    late = range(len(reply) // 2, len(reply) - 64)
    right = [starts(drafts[i], reply[i + 1 :]) for i in late]
    assert sum(right) > 0.9 * len(right)


def test_a_change_that_was_made_once_is_not_insisted_on(source: CacheDrafts) -> None:
    text = [token for i in range(40) for token in (50, *(300 + 10 * i + np.arange(9)).tolist())]
    talk = Talk(source, 1, as_tokens([*OTHER[:100].tolist(), *text, *OTHER[100:].tolist()]))
    reply = [*text[:40], 1001, *text[41:]]
    drafts = talk.says(reply)
    wrong = [
        i for i in range(50, len(reply) - 64) if drafts[i] and not starts(drafts[i], reply[i + 1 :])
    ]
    # The draft before it is known, and those that were made when it still seemed likely.
    assert all(i < 72 for i in wrong)


def test_not_asked_for_a_while(source: CacheDrafts) -> None:
    talk = Talk(source, 1, FILE)
    talk.says(FILE[:20].tolist())
    talk.say(*FILE[20:300].tolist())
    assert starts(talk.draft(), FILE[300:])
    talk.say(*FILE[400:420].tolist())
    assert starts(talk.draft(), FILE[420:])


def test_several_sure_tokens(source: CacheDrafts) -> None:
    talk = Talk(source, 1, FILE)
    talk.say(*FILE[:20].tolist())
    talk.draft()
    sure = tuple(FILE[19:23].tolist())
    draft = source.match(DraftJob(1, talk.seq, sure, 64)).read(64)
    assert starts(list(draft), FILE[23:])


def test_a_longer_prompt_adds_what_is_new(source: CacheDrafts) -> None:
    long = as_tokens(np.random.default_rng(3).integers(0, 5000, 4000))
    for n in (2000, 2000, 3000, 4000):
        before = source.index.n_added
        source.remember(long[:n])
        source.flush()
        assert (
            source.index.n_added - before
            <= (1000 if n > 2000 or before else 2000) + BLOCK + OVERLAP
        )
    # Where two parts were added at different times nothing is missing.
    talk = Talk(source, 1, OTHER)
    drafts = talk.says(long[2900:3100].tolist())
    assert sum(starts(draft, long[2901 + i :]) for i, draft in enumerate(drafts)) > 180


def test_what_was_forgotten_comes_again() -> None:
    source = CacheDrafts(2**12)
    source.remember(FILE)
    for seed in range(10):
        source.remember(as_tokens(np.random.default_rng(seed).integers(0, 9000, 600)))
    talk = Talk(source, 1, FILE)
    assert starts(talk.says(FILE[:30].tolist())[-1], FILE[30:])
    assert source.n_bytes <= 2**12 * 4 * 9


def test_recent_prompts_are_remembered_as_far_as_there_is_room(source: CacheDrafts) -> None:
    tiny = CacheDrafts(2**9)
    for each in (tiny, source):
        each.remember_all([as_tokens(OTHER), as_tokens(FILE)])
        each.flush()
    assert tiny.n_bytes == 0  # half of its room is for what comes
    talk = Talk(source, 1, as_tokens(range(20_000, 20_100)))
    assert starts(talk.says(FILE[:20].tolist())[-1], FILE[20:])
    assert starts(talk.says(OTHER[:20].tolist())[-1], OTHER[20:])


def test_forgetting(source: CacheDrafts) -> None:
    talk = Talk(source, 1, FILE)
    assert any(talk.says(FILE[:40].tolist()))
    assert source.n_bytes > 0
    source.forget()
    source.flush()
    assert source.index.n_bytes == 0
    assert (source.index.ring < 0).all()
    assert not any(talk.says(FILE[100:140].tolist()))
    again = Talk(source, 3, FILE)
    assert any(again.says(FILE[:40].tolist()))


def test_whoever_asks_waits_for_nobody(source: CacheDrafts) -> None:
    """A text that is being added to the index on another thread does not delay a draft: drafting
    runs between two steps of the engine.
    """
    talk = Talk(source, 1, FILE)
    talk.says(FILE[:20].tolist())
    hangs = threading.Event()
    goes_on = threading.Event()

    def hang(tokens: Tokens) -> None:
        hangs.set()
        goes_on.wait()

    source.index.add = hang
    source.remember(OTHER)
    assert hangs.wait(60)
    for i in range(20, 120):
        talk.say(int(FILE[i]))
        assert starts(talk.draft(), FILE[i + 1 :])
    source.begin(2, OTHER)
    source.end(2)
    source.end(1)
    goes_on.set()


def test_requests_end(source: CacheDrafts) -> None:
    talk = Talk(source, 1, FILE)
    talk.says(FILE[:10].tolist())
    source.end(1)
    source.end(1)
    assert source.match(DraftJob(1, talk.seq, (1,), 5)) == NO_MATCH


def test_thread_ends_with_the_source() -> None:
    source = CacheDrafts(2**12)
    thread = next(
        thread for thread in reversed(threading.enumerate()) if thread.name == "pyctl-drafts"
    )
    del source
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()

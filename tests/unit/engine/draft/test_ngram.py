"""Drafts from n-grams continue earlier text of the same request, never of another."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pyctl.cache.sequence import LiveSequence
from pyctl.engine.draft import ngram
from pyctl.engine.draft.ngram import NgramSource, ngram_sources
from pyctl.engine.draft.ngram_settings import NgramSettings
from pyctl.engine.draft.source import DraftJob
from pyctl.prompt import as_tokens

NAMES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod")


class Request:
    """A reply that is known in advance, and what ``sources`` drafts of it."""

    def __init__(
        self, sources: list[NgramSource], prompt: list[int], reply: list[int], key: int = 0
    ) -> None:
        self.sources = sources
        self.key = key
        self.reply = reply
        self.n_prompt = len(prompt)
        self.seq = LiveSequence(0, len(prompt) + len(reply))
        self.seq.append(as_tokens(prompt), exact=True)
        for source in sources:
            source.begin(key, self.seq.tokens)
        self.n_sure = 1  # of the reply, tokens that are sampled and not yet evaluated

    @property
    def n_sampled(self) -> int:
        return self.seq.n - self.n_prompt + self.n_sure

    def propose(self, maximum: int) -> tuple[int, ...]:
        sure = tuple(self.reply[self.n_sampled - self.n_sure : self.n_sampled])
        for source in self.sources:
            if draft := source.match(DraftJob(self.key, self.seq, sure, maximum)).read(maximum):
                return draft
        return ()

    def accept(self, draft: tuple[int, ...]) -> int:
        """Evaluate what is sure and ``draft``; how much of that was right."""
        right = 0
        rest = self.reply[self.n_sampled :]
        while right < min(len(draft), len(rest) - 1) and draft[right] == rest[right]:
            right += 1
        for token in self.reply[self.n_sampled - self.n_sure : self.n_sampled + right]:
            self.seq.append_one(token)
        self.n_sure = 1
        return right


def test_what_followed_last_time_is_drafted() -> None:
    said = list(range(3, 60))
    source = ngram_sources(["ngram-simple"], NgramSettings(simple_size_n=4, simple_size_m=5))[0]
    assert Request([source], [*said, 70, 4, 6], [8]).propose(9) == (), "70 4 6 8 never stood there"
    assert Request([source], [*said, *said[:9]], [12, 13]).propose(9) == (13, 14, 15, 16, 17)
    again = Request([source], [*said, 4, 5, 6, 7, 90, 4, 5, 6], [7, 8])
    assert again.propose(9)[:1] == (90,), "not what followed the time before"


@pytest.mark.parametrize("name", NAMES)
def test_what_one_request_said_is_never_drafted_for_another(name: str) -> None:
    source = ngram_sources([name], NgramSettings())[0]
    said = random.Random(0).sample(range(3, 2000), 200)
    one = Request([source], said * 2, said, 1)
    assert any(one.accept(one.propose(64)) for _ in range(20))
    other = Request([source], said[:130], said[130:], 2)
    assert [other.propose(64) or other.accept(()) for _ in range(60)] == [0] * 60


@pytest.mark.parametrize("name", NAMES)
def test_a_request_that_ended_leaves_nothing(name: str) -> None:
    source = ngram_sources([name], NgramSettings())[0]
    request = Request([source], [5] * 100, [6] * 10)
    request.propose(3)
    source.end(request.key)
    source.end(request.key)
    assert not source.running


def test_drafts_are_cut_to_what_may_follow() -> None:
    source = ngram_sources(["ngram-mod"], NgramSettings())[0]
    request = Request([source], list(range(3, 90)) * 3, list(range(3, 90)))
    assert [len(request.propose(maximum)) for maximum in (64, 7, 0)] == [64, 7, 0]


def plain_draft(text: list[int], n: int, maximum: int) -> tuple[int, ...]:
    """Return the tokens that followed the last place of the last ``n`` tokens, and so on with the
    tokens found.
    """
    latest = {tuple(text[i : i + n]): i for i in range(len(text) - n)}
    found = text[-n:]
    while len(found) < n + maximum and (at := latest.get(tuple(found[-n:]))) is not None:
        found.append(text[at + n])
    return tuple(found[n:])


@pytest.mark.parametrize(("n", "n_kinds"), [(5, 6), (24, 2)])
def test_drafts_are_what_a_plain_search_finds_however_the_text_came(n: int, n_kinds: int) -> None:
    rng = np.random.default_rng(n)
    tokens = rng.integers(0, n_kinds, 25_000).astype(np.int32)
    tokens[12_000:16_000] = tokens[2_000:6_000]
    source = NgramSource("ngram-mod", n, 40)
    seq = LiveSequence(0, tokens.size)
    seq.append(tokens[:9_000], exact=True)
    source.begin(1, seq.tokens)
    n_found = 0
    while seq.n < 24_000:
        seq.append(tokens[seq.n : seq.n + int(rng.choice([1, 2, 8, 9, 70, 700]))], exact=True)
        sure = (int(tokens[seq.n]),)
        draft = source.match(DraftJob(1, seq, sure, 40)).read(40)
        assert draft == plain_draft([*seq.tokens.tolist(), *sure], n, 40)
        n_found += len(draft)
    assert n_found > 500


@pytest.mark.parametrize("name", NAMES)
def test_a_step_costs_the_same_after_a_long_text(name: str) -> None:
    """Counted in tokens that are hashed one by one or looked at, not in time."""
    settings = NgramSettings(simple_size_m=12, map_k_size_m=12, map_k4v_size_m=12, mod_max=12)

    def max_put(n_prompt: int) -> int:
        """Return the most tokens that one step hashes after a prompt of ``n_prompt`` tokens."""
        source = ngram_sources([name], settings)[0]
        tokens = np.random.default_rng(2).integers(3, 9_000, n_prompt).tolist()
        request = Request([source], tokens, tokens[:200])
        request.propose(12)
        request.accept(())
        seen: list[int] = []
        put = ngram.HashedPositions.put

        def counting(self: ngram.HashedPositions, text: ngram.Text, last: int) -> None:
            seen.append(last - self._n_put)
            put(self, text, last)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ngram.HashedPositions, "put", counting)
            while request.n_sampled < 150:
                request.accept(request.propose(12))
        return max(seen, default=0)

    assert max_put(50_000) <= max_put(500) <= 64


def test_sources_come_in_the_order_of_llama_server() -> None:
    assert [
        source.name for source in ngram_sources(["ngram-mod", "ngram-simple"], NgramSettings())
    ] == [
        "ngram-simple",
        "ngram-mod",
    ]
    assert not ngram_sources(["draft-mtp"], NgramSettings())

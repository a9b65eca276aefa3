"""A draft model's rows and state are restored with a conversation: it then drafts as after a cold run.

The fake's drafts depend on every row and on the state of its draft model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pyctl.cache.ram import RamCache
from pyctl.engine.draft.source import DraftJob
from pyctl.engine.draft.speculation import Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.draft_server import ENDLESS, WAYS, DraftServer, RememberedDrafts, Turn
from tests.unit.engine.drive import collect, request
from tests.unit.engine.test_engine import KINDS, chat

OTHER = chat((7777, 200))


def server_of(kind: str, directory: Path, *, exact: bool = True, draft_type: str = "draft-mtp") -> DraftServer:
    return DraftServer(FakeBackend(kind, draft_type=draft_type), directory, OTHER, exact=exact)


def digest(server: DraftServer) -> bytes:
    assert isinstance(server.backend, FakeBackend)
    return server.backend.draft_digest(0)


def conversation() -> list[Prompt]:
    messages = [(1, 300)]
    prompts = []
    for turn in range(3):
        messages += [(100 + turn, 100), (200 + turn, 40)]
        prompts.append(chat(*messages))
    return prompts


BRANCHES = [chat((1, 300), (2, 100)), chat((1, 300), (3, 100)), chat((1, 300), (2, 100), (4, 100))]

COLD: dict[tuple[str, bytes], tuple[Turn, bytes]] = {}


def cold(kind: str, prompt: Prompt, directory: Path) -> tuple[Turn, bytes]:
    """The reply of a server without a cache, and its draft model's memory then; computed once in a process."""
    key = kind, prompt.tokens.tobytes()
    if key not in COLD:
        server = server_of(kind, directory / f"cold {len(prompt)} {hash(key)}")
        COLD[key] = server.ask(prompt), digest(server)
        server.close()
    return COLD[key]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompts", [conversation(), BRANCHES], ids=["conversation", "branches"])
def test_drafts_are_those_of_the_cold_run(tmp_path: Path, kind: str, way: str, prompts: list[Prompt]) -> None:
    server = server_of(kind, tmp_path / "cache")
    for turn, prompt in enumerate(prompts):
        if turn:
            WAYS[way](server)
        found = server.ask(prompt)
        assert (found, digest(server)) == cold(kind, prompt, tmp_path)
        assert found.drafts or kind == "opaque"
        if turn and prompts is not BRANCHES:
            assert server.restored == {"disk": "disk"}.get(way, server.restored) != "none"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["ram", "sleep", "disk"])
def test_a_conversation_that_is_put_away_drafts_as_one_that_stays(tmp_path: Path, kind: str, way: str) -> None:
    """Here the next prompt begins with the reply as it was generated, so that the end of that is restored."""
    found: dict[str, list[tuple[Turn, bytes]]] = {"live": [], way: []}
    for each, turns in found.items():
        server = server_of(kind, tmp_path / each, exact=False)
        tokens: list[int] = []
        for turn in range(3):
            if turn:
                WAYS[each](server)
            tokens += chat((turn, 96)).tokens.tolist()
            turns.append((server.ask(Prompt.of(tokens), 90), digest(server)))
            tokens += turns[-1][0].tokens[:-1]
            if turn:
                assert server.restored == {"live": "live", "disk": "disk"}.get(each, "ram")
    assert found[way] == found["live"]


class DigestedDrafts(RememberedDrafts):
    """Remembers also what the drafts depended on."""

    def __init__(self, backend: FakeBackend) -> None:
        super().__init__(backend)
        self.fake = backend
        self.digests: dict[int, dict[int, bytes]] = {}

    def propose(self, jobs: Sequence[DraftJob], n: int = 0) -> list[tuple[int, ...]]:
        for job in jobs:
            self.digests.setdefault(job.key, {})[job.seq.n] = self.fake.draft_digest(job.seq.id)
        return super().propose(jobs, n)


@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_a_suspended_reply_drafts_as_one_alone(kind: str) -> None:
    def run(n_seqs: int, prompts: list[Prompt]) -> tuple[dict[int, dict[int, bytes]], int]:
        backend = FakeBackend(kind, n_ctx=1024, n_seqs=n_seqs, draft_type="draft-mtp")
        source = DigestedDrafts(backend)
        options = EngineSettings(exact=True, clear_idle=False)
        engine = Engine(backend, RamCache(32, None), options, None, Speculation(model=source))
        handles = [RequestHandle(request(prompt, 400, sampling=ENDLESS)) for prompt in prompts]
        for handle in handles:
            engine.submit(handle)
        while engine.step():
            pass
        assert [len(collect(handle).tokens) for handle in handles] == [400] * len(prompts)
        return source.digests, engine.counters.n_suspended

    prompts = [chat((seed, 100), (seed + 10, 46)) for seed in (1, 2, 3)]
    together, n_suspended = run(3, prompts)
    assert n_suspended > 0
    for key, prompt in enumerate(prompts, 1):
        alone = run(1, [prompt])[0][1]
        both = together[key].keys() & alone.keys()
        assert len(both) > 50
        assert {n: together[key][n] for n in both} == {n: alone[n] for n in both}


def check_plain(server: DraftServer, kind: str, prompt: Prompt, directory: Path) -> bool:
    """The reply is right, whatever the drafts were; whether what the draft model has is that of a cold run."""
    turn = server.ask(prompt)
    assert server.engine.prefix_cache.totals.failed_restores == 0
    assert server.tier.store.damaged == 0
    expected, at_end = cold(kind, prompt, directory)
    assert turn.tokens == expected.tokens
    assert turn.drafts or kind == "opaque" or not server.backend.facts.draft_type
    return digest(server) == at_end


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_type", ["", "draft-simple"])
def test_a_cache_goes_on_with_and_without_a_draft_model(tmp_path: Path, kind: str, draft_type: str) -> None:
    """First this one, then none or another, then this one again: what is restored is restored each time."""
    prompts = conversation()
    first = server_of(kind, tmp_path / "cache")
    assert check_plain(first, kind, prompts[0], tmp_path)
    first.close()
    second = server_of(kind, tmp_path / "cache", draft_type=draft_type)
    check_plain(second, kind, prompts[1], tmp_path)
    assert second.restored == "disk"
    second.close()
    third = server_of(kind, tmp_path / "cache")
    assert not check_plain(third, kind, prompts[2], tmp_path)
    assert third.restored == "disk"
    assert isinstance(third.backend, FakeBackend)
    rows = third.backend.seqs[0].draft_rows
    assert 0 < sum(not row for row in rows) < len(rows) / 2, "only what was evaluated without it"
    third.close()

"""What a draft model has of a conversation survives with it: after every kind of restore it drafts as if cold.

The fake's drafts depend on every row and on the state of its draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from pyctl.cache.disk.store import DiskStore
from pyctl.cache.disk_tier import DiskTier
from pyctl.cache.persist import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.draft.source import DraftJob
from pyctl.engine.draft.speculation import Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.fake import FakeBackend
from pyctl.engine.handle import RequestHandle
from pyctl.engine.sampling import Sampling
from pyctl.engine.snapshotter import block_sizes
from pyctl.errors import UnavailableError
from pyctl.prompt import Prompt, Tokens
from tests.cache.checks import check_invariants
from tests.engine.drive import ask, collect, request
from tests.engine.test_engine import KINDS, chat

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)

OTHER = chat((7777, 200))


class ModelDrafts:
    """Three drafts of the draft model each time; remembers them by request and position, and what they depend on."""

    name = "draft-mtp"

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.drafts: dict[int, dict[int, tuple[int, ...]]] = {}
        self.digests: dict[int, dict[int, bytes]] = {}

    def begin(self, key: int, prompt: Tokens) -> None:
        self.drafts[key], self.digests[key] = {}, {}

    def propose(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        items = [SequenceTokens(job.seq.id, job.sure, job.seq.n, len(job.sure)) for job in jobs]
        found = self.backend.draft(items, 3)
        for job, draft in zip(jobs, found, strict=True):
            self.drafts[job.key][job.seq.n] = draft
            self.digests[job.key][job.seq.n] = self.backend.draft_digest(job.seq.id)
        return found

    def learn(self, key: int, n_drafted: int, n_accepted: int) -> None:
        pass

    def end(self, key: int) -> None:
        pass


class Turn(NamedTuple):
    """What one request got."""

    tokens: list[int]
    drafts: dict[int, tuple[int, ...]]
    digest: bytes


class Server:
    """An engine that drafts, with a cache in RAM and on disk; ``restart`` leaves what is on disk."""

    def __init__(self, kind: str, directory: Path, *, draft_type: str = "draft-mtp", exact: bool = True) -> None:
        self.kind, self.directory, self.draft_type, self.exact = kind, directory, draft_type, exact
        self.start()

    def start(self) -> None:
        self.backend = FakeBackend(self.kind, draft_type=self.draft_type)
        store = DiskStore(self.directory, "fake", None, min_tokens=32, sizes=block_sizes(self.backend))
        self.tier = DiskTier(store, DiskPolicy.parse("full"), cold_max=10240)
        self.source = ModelDrafts(self.backend)
        self.engine = Engine(
            self.backend,
            RamCache(32, None),
            EngineSettings(exact=self.exact),
            self.tier,
            Speculation([self.source] if self.draft_type else []),
        )

    def ask(self, prompt: Prompt, n: int = 24) -> Turn:
        reply = ask(self.engine, prompt, n, sampling=ENDLESS)
        assert reply.error is None
        assert reply.done is not None
        self.restored = reply.done.stats.source
        check_invariants(self.engine.snapshotter.cache)
        drafts = self.source.drafts[max(self.source.drafts)] if self.source.drafts else {}
        return Turn(reply.tokens, drafts, self.backend.draft_digest(0))

    def go_on(self) -> None:
        """Nothing happens to the conversation: it is still there."""

    def leave(self) -> None:
        """Another conversation takes the only sequence."""
        self.ask(OTHER)

    def sleep(self) -> None:
        self.engine.sleep()
        self.engine.wake()

    def restart(self) -> None:
        self.engine.sleep()  # what was generated goes to the cache
        self.engine.wake()
        self.engine.close(UnavailableError("the end"))
        self.start()
        self.tier.flush(60)


WAYS = {"live": Server.go_on, "ram": Server.leave, "sleep": Server.sleep, "disk": Server.restart}


def conversation() -> list[Prompt]:
    messages = [(1, 300)]
    prompts = []
    for turn in range(3):
        messages += [(100 + turn, 100), (200 + turn, 40)]
        prompts.append(chat(*messages))
    return prompts


def cold(kind: str, prompt: Prompt, directory: Path) -> Turn:
    server = Server(kind, directory / f"cold {len(prompt)} {hash(prompt.tokens.tobytes())}")
    turn = server.ask(prompt)
    server.engine.close(UnavailableError("the end"))
    return turn


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_drafts_are_those_of_the_cold_run(tmp_path: Path, kind: str, way: str) -> None:
    server = Server(kind, tmp_path / "cache")
    for turn, prompt in enumerate(conversation()):
        if turn:
            WAYS[way](server)
        found = server.ask(prompt)
        assert found == cold(kind, prompt, tmp_path)
        assert found.drafts or kind == "opaque"
        if turn:
            assert server.restored == {"disk": "disk"}.get(way, server.restored) != "none"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["ram", "sleep", "disk"])
def test_a_conversation_that_is_put_away_drafts_as_one_that_stays(tmp_path: Path, kind: str, way: str) -> None:
    """Here the next prompt begins with the reply as it was generated, so that the end of that is restored."""
    found: dict[str, list[Turn]] = {"live": [], way: []}
    for each, turns in found.items():
        server = Server(kind, tmp_path / each, exact=False)
        tokens: list[int] = []
        for turn in range(4):
            if turn:
                WAYS[each](server)
            tokens += chat((turn, 96)).tokens.tolist()
            turns.append(server.ask(Prompt.of(tokens), 90))
            tokens += turns[-1].tokens[:-1]
            if turn and (each != "disk" or turn > 1):
                assert server.restored == {"live": "live", "disk": "disk"}.get(each, "ram")
    assert found[way] == found["live"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_branch_drafts_as_the_cold_run(tmp_path: Path, kind: str, way: str) -> None:
    server = Server(kind, tmp_path / "cache")
    for prompt in (chat((1, 300), (2, 100)), chat((1, 300), (3, 100)), chat((1, 300), (2, 100), (4, 100))):
        assert server.ask(prompt) == cold(kind, prompt, tmp_path)
        WAYS[way](server)


@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_a_suspended_reply_drafts_as_one_alone(tmp_path: Path, kind: str) -> None:
    prompts = [chat((seed, 100), (seed + 10, 46)) for seed in (1, 2, 3)]
    alone = []
    for prompt in prompts:
        server = Server(kind, tmp_path / "alone")
        server.ask(prompt, 400)
        alone.append(server.source.digests[1])
    backend = FakeBackend(kind, n_ctx=1024, n_seqs=3, draft_type="draft-mtp")
    source = ModelDrafts(backend)
    engine = Engine(
        backend, RamCache(32, None), EngineSettings(exact=True, clear_idle=False), None, Speculation([source])
    )
    handles = [RequestHandle(request(prompt, 400, sampling=ENDLESS)) for prompt in prompts]
    for handle in handles:
        engine.submit(handle)
    while engine.step():
        pass
    assert engine.counters.n_suspended > 0
    for key, (handle, expected) in enumerate(zip(handles, alone, strict=True), 1):
        assert len(collect(handle).tokens) == 400
        found = source.digests[key]
        both = found.keys() & expected.keys()
        assert len(both) > 50
        assert {n: found[n] for n in both} == {n: expected[n] for n in both}


def check_plain(server: Server, prompt: Prompt, tmp_path: Path) -> Turn:
    turn = server.ask(prompt)
    assert server.engine.snapshotter.totals.failed_restores == 0
    assert server.tier.store.damaged == 0
    assert turn.tokens == cold(server.kind, prompt, tmp_path).tokens
    return turn


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_type", ["", "draft-simple"])
def test_a_cache_goes_on_with_and_without_a_draft_model(tmp_path: Path, kind: str, draft_type: str) -> None:
    """First this one, then none or another, then this one again: what is restored is restored each time."""
    prompts = conversation()
    server = Server(kind, tmp_path / "cache")
    check_plain(server, prompts[0], tmp_path)
    server.draft_type = draft_type
    server.restart()
    middle = check_plain(server, prompts[1], tmp_path)
    assert server.restored == "disk"
    assert middle.digest != cold(kind, prompts[1], tmp_path).digest
    server.draft_type = "draft-mtp"
    server.restart()
    last = check_plain(server, prompts[2], tmp_path)
    assert server.restored == "disk"
    rows = server.backend._seqs[0].draft_rows
    missing = [n for n, row in enumerate(rows) if not row]
    assert 0 < len(missing) < len(rows) / 2, "only what was evaluated without it"
    assert last.drafts or kind == "opaque"
    server.engine.close(UnavailableError("the end"))


Change = Callable[[pytest.MonkeyPatch], None]


def no_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeBackend, "load_draft_rows", lambda self, seq, first, spans: None)


def rows_of_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeBackend, "_author", property(lambda self: id(self).to_bytes(16, "little")))


@pytest.mark.parametrize("change", [no_rows, rows_of_another])
def test_the_fake_notices_what_is_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    prompt = conversation()[0]
    expected = cold("hybrid", prompt, tmp_path)
    change(monkeypatch)
    server = Server("hybrid", tmp_path / "cache")
    server.ask(prompt)
    server.restart()
    found = server.ask(prompt)
    assert found.tokens == expected.tokens
    assert found.digest != expected.digest
    assert found.drafts != expected.drafts

"""Real models with a head: after every kind of restore they draft what the cold run drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pyctl.engine.backend import Backend
from pyctl.engine.handle import RequestHandle
from pyctl.llama.loader import Loaded
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.prompt import Prompt
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.draft_server import ENDLESS, WAYS, DraftServer, Turn
from tests.unit.engine.drive import chat, collect, request

MTP = DraftSettings(draft_types=("draft-mtp",))


OTHER = chat((7777, 200))

Opener = Callable[..., Backend]


@pytest.fixture
def open_drafting(open_model: Callable[..., Loaded]) -> Opener:
    """open_drafting("tiny-hybrid-nextn", ...) -> an empty backend whose head drafts, or with
    ``drafts`` of None not.
    """
    return lambda name, drafts=MTP, **fields: open_model(name, drafts=drafts, **fields).backend


def conversation() -> list[Prompt]:
    messages = [(1, 150)]
    prompts = []
    for turn in range(3):
        messages += [(100 + turn, 70), (200 + turn, 40)]
        prompts.append(chat(*messages))
    return prompts


def kept(server: DraftServer) -> tuple[bytes, bytes]:
    """Return the head's part of the live conversation: its rows, and the hidden row for the next
    one.
    """
    backend = server.backend
    n = server.engine.sequences[0].n
    rows = backend.memory.save_rows(0, 0, n).draft
    hidden = backend.memory.save_state(0, n).draft
    backend.memory.synchronize()
    return rows.tobytes(), hidden.tobytes()


def cold_and_kept(
    backend: Backend, prompt: Prompt, directory: Path
) -> tuple[Turn, tuple[bytes, bytes]]:
    """Return the reply of a cold server, and the state of its head afterwards."""
    server = DraftServer(backend, directory / f"cold {hash(prompt.tokens.tobytes())}", OTHER)
    found = server.ask(prompt, 40), kept(server)
    server.close()
    return found


def ask_all(server: DraftServer, way: str) -> Iterator[tuple[int, Turn]]:
    """Yield the turns of the conversation; before each but the first happens what ``way`` names,
    and it is restored.
    """
    for turn, prompt in enumerate(conversation()):
        if turn:
            WAYS[way](server)
        yield turn, server.ask(prompt, 40)
        if turn:
            assert server.restored == {"disk": "disk"}.get(way, server.restored) != "none"
    server.close()


def cold(backend: Backend, prompt: Prompt, directory: Path) -> Turn:
    return cold_and_kept(backend, prompt, directory)[0]


MODELS = ["tiny-hybrid-nextn", "tiny-moe-nextn"]

READERS = tuple(
    f"tiny-hybrid-{kind}" for kind in ("eagle3", "dflash", "dflash2", "dspark", "dflash-window")
)
"""Files that read layers of their target; of these the first and the last keep more than rows."""


@pytest.mark.parametrize(
    ("name", "type_kv", "draft"),
    [
        *((name, type_kv, "") for name in MODELS for type_kv in ("f16", "q8_0")),
        *(("tiny-hybrid-nextn", "f16", draft) for draft in READERS),
        ("tiny-dense", "q8_0", "tiny-dense-dspark"),
    ],
)
def test_drafts_are_those_of_the_cold_run(
    open_drafting: Opener,
    model_path: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    type_kv: str,
    draft: str,
) -> None:
    """After every kind of restore the head's rows, its hidden row and its drafts are those of a
    cold run to the bit: a head without its rows drafts worse, and no other test would notice.
    """
    drafts = DraftSettings(draft_path=str(model_path(draft))) if draft else MTP
    backend = open_drafting(name, drafts, type_k=type_kv, type_v=type_kv)
    expected = [cold_and_kept(backend, prompt, tmp_path) for prompt in conversation()]
    has_state = not draft or draft.endswith(("eagle3", "window"))
    assert all(
        len(rows) > 64 * 100 and (len(hidden) > 64) == has_state for _, (rows, hidden) in expected
    )
    for way in WAYS:
        server = DraftServer(backend, tmp_path / way, OTHER)
        for turn, found in ask_all(server, way):
            reply, head = expected[turn]
            assert found == reply, way
            assert kept(server) == head, f"{way}: to the bit"
    firsts = [
        (turn.tokens[i + 1 :][:1], draft[:1])
        for turn, _ in expected
        for i, draft in at_tokens(turn)
    ]
    assert any(token == [*first] for token, first in firsts), (
        "a head that is never right would not notice"
    )


def at_tokens(turn: Turn) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each draft with the number of the reply's token that it follows."""
    first = min(turn.drafts)
    for position, draft in turn.drafts.items():
        yield position - first, draft


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("tiny-hybrid", "tiny-draft"),
        ("tiny-hybrid", "tiny-hybrid-draft"),
        ("tiny-dense", "tiny-draft"),
    ],
)
def test_a_draft_model_of_its_own_drafts_what_it_drafts_cold(
    open_drafting: Opener, model_path: Callable[[str], Path], tmp_path: Path, name: str, draft: str
) -> None:
    backend = open_drafting(
        name, DraftSettings(draft_types=("draft-simple",), draft_path=str(model_path(draft)))
    )
    expected = [cold(backend, prompt, tmp_path) for prompt in conversation()]
    assert all(len(turn.drafts) > 5 for turn in expected)
    for way in WAYS:
        server = DraftServer(backend, tmp_path / way, OTHER)
        for turn, found in ask_all(server, way):
            assert found == expected[turn], way
            n_bytes = backend.memory.shape.sizes.draft_rows(0, server.engine.sequences[0].n)
            assert len(kept(server)[0]) == n_bytes, (
                f"{way}: it has followed from the first token on"
            )


@pytest.mark.parametrize("way", ["live", "ram"])
@pytest.mark.parametrize("draft", ["tiny-dense-eagle3", "tiny-dense-dflash-window"])
def test_cut_models_may_draft_unlike_the_cold_run(
    open_drafting: Opener, model_path: Callable[[str], Path], tmp_path: Path, draft: str, way: str
) -> None:
    """They need what the model made of the token before the cut, or a window, which only a
    snapshot's end keeps.
    """
    backend = open_drafting("tiny-dense", DraftSettings(draft_path=str(model_path(draft))))
    prompts = conversation()
    expected = [cold_and_kept(backend, prompt, tmp_path) for prompt in prompts]
    server = DraftServer(backend, tmp_path / "cache", OTHER)
    for prompt, (turn, _) in zip(prompts, expected, strict=True):
        found = server.ask(prompt, 40)
        WAYS[way](server)
        assert found.tokens == turn.tokens
        same = [found.drafts.get(at) == draft for at, draft in turn.drafts.items()]
        assert sum(same) > len(same) // 2
    server.close()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["ram", "sleep", "disk"])
def test_a_conversation_that_is_put_away_drafts_as_one_that_stays(
    open_drafting: Opener, tmp_path: Path, name: str, way: str
) -> None:
    """The next prompt begins with the reply as it was generated; its end is saved while wrong
    drafts are taken back.
    """
    backend = open_drafting(name)
    found: dict[str, list[Turn]] = {"live": [], way: []}
    for each, turns in found.items():
        server = DraftServer(backend, tmp_path / each, OTHER, exact=False)
        tokens: list[int] = []
        for turn in range(3):
            if turn:
                WAYS[each](server)
            tokens += chat((turn, 70)).tokens.tolist()
            turns.append(server.ask(Prompt.from_ids(tokens), 85 + turn))
            tokens += turns[-1].tokens[:-1]
            if turn:
                assert server.restored == {"live": "live", "disk": "disk"}.get(each, "ram")
        server.close()
    assert found[way] == found["live"]


@pytest.mark.parametrize(
    "draft", ["", "tiny-hybrid-eagle3", "tiny-hybrid-dflash2", "tiny-hybrid-dflash-window"]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_branch_drafts_as_the_cold_run(
    open_drafting: Opener, model_path: Callable[[str], Path], tmp_path: Path, way: str, draft: str
) -> None:
    drafts = DraftSettings(draft_path=str(model_path(draft))) if draft else MTP
    backend = open_drafting("tiny-hybrid-nextn", drafts)
    prompts = [
        chat((1, 150), (2, 100)),
        chat((1, 150), (3, 100)),
        chat((1, 150), (2, 100), (4, 100)),
    ]
    expected = [cold(backend, prompt, tmp_path) for prompt in prompts]
    server = DraftServer(backend, tmp_path / "cache", OTHER)
    for prompt, turn in zip(prompts, expected, strict=True):
        assert server.ask(prompt, 40) == turn
        WAYS[way](server)
    server.close()


@pytest.mark.parametrize("name", [*MODELS, *READERS])
def test_a_reply_that_is_suspended_after_every_step_drafts_as_the_cold_run(
    open_drafting: Opener, model_path: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Suspending a sequence after each step loses nothing of the head's state: tokens and drafts
    are those of an undisturbed reply.
    """
    drafts = DraftSettings(draft_path=str(model_path(name))) if name in READERS else MTP
    backend = open_drafting("tiny-hybrid-nextn" if name in READERS else name, drafts, n_seqs=2)
    prompt = conversation()[1]
    expected = cold(backend, prompt, tmp_path)
    server = DraftServer(backend, tmp_path / "cache", OTHER)
    engine = server.engine
    handle = RequestHandle(request(prompt, 40, sampling=ENDLESS))
    engine.submit(handle)
    while engine.step():
        for active in list(engine.running):
            if active.pending is not None:
                engine.scheduler.suspend(active)
    assert engine.counters.n_suspended > 10
    assert Turn(collect(handle).tokens, server.source.drafts[1]) == expected
    check_invariants(engine.prefix_cache.cache)
    server.close()


@pytest.mark.parametrize("other", ["", "tiny-draft", "tiny-hybrid-eagle3", "tiny-hybrid-dspark"])
def test_a_cache_goes_on_with_another_draft_model_and_without(
    open_drafting: Opener, model_path: Callable[[str], Path], tmp_path: Path, other: str
) -> None:
    """A cache directory outlives a change of the draft model: the trunk's rows are restored,
    foreign draft blocks are ignored, and no file counts as damaged.
    """
    with_head = open_drafting("tiny-hybrid-nextn")
    drafts = DraftSettings(draft_path=str(model_path(other))) if other else None
    prompts = conversation()
    expected = [cold(with_head, prompt, tmp_path) for prompt in prompts]
    backends = [with_head, open_drafting("tiny-hybrid-nextn", drafts), with_head]
    for turn, backend in enumerate(backends):
        server = DraftServer(backend, tmp_path / "cache", OTHER)
        found = server.ask(prompts[turn], 40)
        assert server.restored == ("disk" if turn else "none")
        assert server.engine.prefix_cache.totals.failed_restores == 0
        assert server.tier.reader.n_damaged == 0
        if backend is with_head:
            assert found.tokens == expected[turn].tokens
            assert found.drafts
        server.close()


def test_blocks_of_another_head_are_not_used(open_drafting: Opener, tmp_path: Path) -> None:
    """The same model, the head's K and V in another type: rows of the trunk are restored, and
    drafts are made.
    """
    backend = open_drafting("tiny-hybrid-nextn")
    other = open_drafting(
        "tiny-hybrid-nextn", replace(MTP, draft_type_k="q8_0", draft_type_v="q8_0")
    )
    prompts = conversation()
    expected = cold(other, prompts[1], tmp_path)
    for turn, each in enumerate((backend, other)):
        server = DraftServer(each, tmp_path / "cache", OTHER)
        found = server.ask(prompts[turn], 40)
        assert (
            server.tier.reader.n_damaged == server.engine.prefix_cache.totals.failed_restores == 0
        )
        server.close()
    assert server.restored == "disk"
    assert found.tokens == expected.tokens
    assert found.drafts.keys()


@pytest.mark.parametrize("name", MODELS)
def test_what_follows_a_prompt_from_before_the_head_is_remembered(
    open_drafting: Opener, tmp_path: Path, name: str
) -> None:
    """Rows of the head begin where it was switched on; they come back as they were although none
    are before them.
    """
    plain = open_drafting(name, None)
    backend = open_drafting(name)
    prompts = conversation()
    found = {}
    for way, happens in WAYS.items():
        server = DraftServer(plain, tmp_path / way, OTHER)
        server.ask(prompts[0], 40)
        server.close()
        backend.memory.clear(0)
        server = DraftServer(backend, tmp_path / way, OTHER)
        turns = [server.ask(prompts[1], 40)]
        first = server.n_cached
        assert server.restored == "disk"
        assert first > 100
        happens(server)
        turns.append(server.ask(prompts[2], 40))
        assert server.n_cached > first + 50
        n = server.engine.sequences[0].n
        rows = backend.memory.save_rows(0, first, n).draft
        backend.memory.synchronize()
        assert rows.size == backend.memory.shape.sizes.draft_rows(first, n)
        assert not backend.memory.save_rows(0, first - 1, n).draft.size
        found[way] = turns, rows.tobytes()
        server.close()
    assert found["ram"] == found["sleep"] == found["disk"] == found["live"]

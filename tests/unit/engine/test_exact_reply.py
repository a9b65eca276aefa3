"""Which replies are recorded as exact, and what of them."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from pyctl.cache.ram import RamCache
from pyctl.engine.draft.speculation import Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.exact_reply import ExactReply
from pyctl.engine.request import Request
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.draft.guesses import Guesses
from tests.unit.engine.drive import Reply, ask, chat, cold

FIRST = chat((1, 150))
OTHER_QUESTION = chat((1, 150), (2, 40))


class Recorder:
    """Keeps the replies that it is given; the id is their number."""

    def __init__(self) -> None:
        self.replies: list[ExactReply] = []
        self.is_open = True

    def accepts(self, request: Request) -> bool:
        return self.is_open

    def record(self, reply: ExactReply) -> int:
        self.replies.append(reply)
        return len(self.replies)


class Recorded:
    """An engine on the fake model whose replies are recorded."""

    def __init__(
        self,
        *,
        exact: bool,
        n_seqs: int = 1,
        speculation: Speculation | None = None,
        clear_idle: bool = True,
    ) -> None:
        self.recorder = Recorder()
        self.engine = Engine(
            FakeBackend("hybrid", n_seqs=n_seqs),
            RamCache(32, None),
            EngineSettings(exact=exact, clear_idle=clear_idle),
            speculation=speculation,
        )
        self.engine.recorder = self.recorder

    def ask(self, prompt: Prompt, **fields: object) -> Reply:
        return ask(self.engine, prompt, **fields)

    @property
    def replies(self) -> list[ExactReply]:
        return self.recorder.replies


def after(prompt: Prompt, reply: Reply) -> Prompt:
    """Return a prompt that continues after ``reply`` with another message."""
    more = chat((3, 30))
    tokens = [*prompt.tokens.tolist(), *reply.tokens, *more.tokens.tolist()]
    n = len(tokens) - len(more)
    boundaries = (*prompt.boundaries, n, *(n + boundary for boundary in more.boundaries))
    return Prompt.from_ids(tokens, boundaries)


def test_a_reply_is_recorded_with_the_digest_of_the_logits_at_each_token() -> None:
    recorded = Recorded(exact=True)
    reply = recorded.ask(FIRST)
    assert reply.done is not None
    assert reply.done.receipt == 1
    (kept,) = recorded.replies
    assert kept.request.prompt is FIRST
    assert kept.trace.tokens[: len(reply.tokens)] == reply.tokens
    assert len(kept.trace.digests) == len(kept.trace.tokens) == reply.done.timings.n_predicted
    last = recorded.engine.backend.outputs[0]
    assert kept.trace.digests[-1] == zlib.crc32(last)


@pytest.mark.parametrize("n_seqs", [1, 4])
def test_with_exact_a_restored_reply_has_the_digests_of_a_cold_one(n_seqs: int) -> None:
    warm = Recorded(exact=True, n_seqs=n_seqs)
    warm.ask(FIRST)
    warm.ask(OTHER_QUESTION)
    warm.ask(OTHER_QUESTION)
    fresh = Recorded(exact=True, n_seqs=n_seqs)
    fresh.ask(OTHER_QUESTION)
    again = warm.replies[-1]
    assert again.stats.n_cached > 0
    assert again.trace.digests == fresh.replies[0].trace.digests
    assert len(warm.replies) == 3


def test_without_exact_one_sequence_and_its_batches_show_what_is_exact() -> None:
    recorded = Recorded(exact=False)
    first = recorded.ask(FIRST)
    recorded.ask(OTHER_QUESTION)
    assert len(recorded.replies) == 2
    assert recorded.replies[1].stats.n_cached > 0
    fresh = Recorded(exact=False)
    fresh.ask(OTHER_QUESTION)
    assert recorded.replies[1].trace.digests == fresh.replies[0].trace.digests
    first = recorded.ask(FIRST)
    n_before = len(recorded.replies)
    continued = recorded.ask(after(FIRST, first))
    assert continued.done is not None
    assert continued.done.stats.n_cached > len(FIRST), "it reuses rows of the reply"
    assert continued.done.receipt == 0
    assert len(recorded.replies) == n_before


@pytest.mark.parametrize("others", [{"n_seqs": 2}, {"clear_idle": False}], ids=str)
def test_without_exact_others_with_cells_show_nothing(others: dict[str, Any]) -> None:
    recorded = Recorded(exact=False, **others)
    reply = recorded.ask(FIRST)
    assert reply.done is not None
    assert reply.done.receipt == 0
    assert recorded.replies == []


def test_without_exact_drafts_make_batches_of_several_widths() -> None:
    known = cold(FakeBackend("hybrid"), FIRST).tokens
    speculation = Speculation([Guesses({FIRST: known}, 3, shortest=3)])
    recorded = Recorded(exact=False, speculation=speculation)
    recorded.ask(FIRST)
    assert recorded.replies == []


def test_a_request_that_may_not_be_kept_leaves_nothing() -> None:
    recorded = Recorded(exact=True)
    recorded.recorder.is_open = False
    reply = recorded.ask(FIRST)
    assert reply.done is not None
    assert reply.done.receipt == 0
    assert recorded.replies == []


def test_a_prompt_without_a_reply_is_not_recorded() -> None:
    recorded = Recorded(exact=True)
    reply = recorded.ask(FIRST, n=0)
    assert reply.done is not None
    assert reply.done.receipt == 0
    assert recorded.replies == []

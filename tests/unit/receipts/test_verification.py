"""A receipt is evaluated again from nothing, and every difference is found at its place."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Span, State
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.errors import EngineError
from pyctl.receipts.receipt import Receipt
from pyctl.receipts.verification import find_difference
from tests.fake import FakeBackend
from tests.unit.engine.drive import ask, chat
from tests.unit.receipts.making import FIRST, LONGER, PROVENANCE, Replies, talk

KIND = pytest.mark.parametrize("kind", ["attention", "hybrid", "opaque"])


def receipts(kind: str) -> list[Receipt]:
    """Return the receipts of a conversation that the cache served."""
    replies = talk(kind)
    assert sum(reply.stats.n_cached for reply in replies) > 0
    return [Receipt.from_reply(n, PROVENANCE, reply) for n, reply in enumerate(replies)]


def with_reply(receipt: Receipt, **fields: object) -> Receipt:
    record = msgspec.structs.replace(receipt.reply_record, **fields)
    return msgspec.structs.replace(receipt, reply_record=record)


def with_other_digest(receipt: Receipt, index: int) -> Receipt:
    digests = np.array(receipt.digests, "<u4")
    digests[index] ^= 1
    return with_reply(receipt, logits_digests=digests.tobytes())


@KIND
def test_replies_from_the_cache_are_equal(kind: str) -> None:
    backend = FakeBackend(kind)
    assert [find_difference(receipt, backend) for receipt in receipts(kind)] == [None] * 4
    assert len(backend.seqs[0].cells) == 0


@pytest.mark.parametrize("index", [0, 3, 7])
def test_another_digest_is_found_at_its_token(index: int) -> None:
    receipt = receipts("hybrid")[1]
    assert receipt.reply.size == 8
    assert find_difference(with_other_digest(receipt, index), FakeBackend()) == index


def test_another_token_of_the_prompt_is_found_at_the_first_token() -> None:
    receipt = receipts("attention")[0]
    ids = receipt.prompt.tokens.astype("<i4")
    ids[5] += 1
    record = msgspec.structs.replace(receipt.prompt_record, ids=ids.tobytes())
    other = msgspec.structs.replace(receipt, prompt_record=record)
    assert find_difference(other, FakeBackend("attention")) == 0


def test_other_batches_are_found() -> None:
    assert find_difference(receipts("attention")[0], FakeBackend("attention", n_ubatch=48)) == 0


class Flipping(FakeBackend):
    """Restores a state with a flipped bit."""

    def restore(
        self, seq: int, first: int, spans: Sequence[Span], state: State | None = None
    ) -> None:
        super().restore(seq, first, spans, state)
        head, *rest = self.seqs[seq].state
        self.seqs[seq].state = bytes([head ^ 1, *rest])


def test_a_reply_after_a_wrong_restore_is_found_at_its_first_token() -> None:
    recorder = Replies()
    settings = EngineSettings(exact=True)
    engine = Engine(Flipping(), RamCache(32, None), settings)
    engine.recorder = recorder
    for prompt in (FIRST, chat((9, 200)), LONGER):
        ask(engine, prompt)
    found = [Receipt.from_reply(1, PROVENANCE, reply) for reply in recorder.replies]
    assert [receipt.cache.source for receipt in found] == ["none", "none", "ram"]
    assert [find_difference(receipt, FakeBackend()) for receipt in found] == [None, None, 0]


class Watched(FakeBackend):
    """Keeps the number of tokens of each verify batch."""

    def __init__(self) -> None:
        super().__init__("hybrid")
        self.widths: list[int] = []

    def decode(self, items: list[SequenceTokens]) -> None:
        self.widths += [len(item.tokens) for item in items]
        super().decode(items)


def test_verify_batches_have_the_width_of_the_server() -> None:
    backend = Watched()
    receipt = with_reply(receipts("hybrid")[0], draft_width=2)
    assert find_difference(receipt, backend) is None
    assert backend.widths == [3] * 7


def test_a_failed_evaluation_leaves_the_sequence_empty() -> None:
    backend = FakeBackend("attention", n_ctx=100)
    with pytest.raises(EngineError):
        find_difference(receipts("attention")[0], backend)
    assert len(backend.seqs[0].cells) == 0

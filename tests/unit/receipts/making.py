"""Receipts of replies of the fake model."""

from __future__ import annotations

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.exact_reply import ExactReply
from pyctl.engine.request import Request
from pyctl.receipts.receipt import Provenance, Receipt
from tests.fake import FakeBackend
from tests.unit.engine.drive import ask, chat

PROVENANCE = Provenance(
    model="fake",
    fingerprint="f" * 32,
    llama_build="llama.cpp 1",
    pyctl_version="0",
    is_exact=True,
    layers=("CPU", "CPU"),
    settings={"model": {"n_ctx": 4096}},
)

NOON = 1_795_910_400.0
"""A time in UNIX seconds."""

FIRST = chat((1, 150))
LONGER = chat((1, 150), (2, 40))
LONGEST = chat((1, 150), (2, 40), (3, 90))


class Replies:
    """Keeps the exact replies of an engine."""

    def __init__(self) -> None:
        self.replies: list[ExactReply] = []

    def accepts(self, request: Request) -> bool:
        return True

    def record(self, reply: ExactReply) -> int:
        self.replies.append(reply)
        return len(self.replies)


def recorded_engine(kind: str = "hybrid") -> tuple[Engine, Replies]:
    """Return an engine with --exact on the fake model, and what it records."""
    recorder = Replies()
    settings = EngineSettings(exact=True)
    engine = Engine(FakeBackend(kind), RamCache(32, None), settings)
    engine.recorder = recorder
    return engine, recorder


def talk(kind: str = "hybrid") -> list[ExactReply]:
    """Return the replies of a conversation that grows, the later ones from the cache."""
    engine, recorder = recorded_engine(kind)
    for prompt in (FIRST, LONGER, LONGEST, LONGER):
        ask(engine, prompt)
    return recorder.replies


def receipt_at(seconds: float) -> Receipt:
    """Return a receipt of a reply that ended at ``seconds`` of UNIX time."""
    engine, recorder = recorded_engine()
    ask(engine, FIRST)
    return Receipt.from_reply(round(seconds * 1e6), PROVENANCE, recorder.replies[0])

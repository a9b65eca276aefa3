"""Events of a reply that no client reads, and errors that no caller collects, take bounded
memory.
"""

from __future__ import annotations

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import MAX_UNREAD, RequestHandle
from pyctl.engine.request import Failed, Piece
from pyctl.engine.sampling import Sampling
from pyctl.llama.library.library_log import LibraryLog
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.drive import request

PROBS = tuple((token, -1.0) for token in range(21))


def test_a_reply_that_nobody_reads_ends() -> None:
    engine = Engine(FakeBackend(n_ctx=16384), RamCache(4, None), EngineSettings())
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    handle = RequestHandle(
        request(Prompt.from_ids(range(1, 50)), 16000, sampling=sampling, n_probs=20)
    )
    engine.submit(handle)
    steps = 0
    while engine.step():
        steps += 1
    assert steps < 16000 / 3, "it went on to the end"
    events = handle.drain()
    assert isinstance(events[-1], Failed)
    assert "unread" in str(events[-1].error)
    read = [event for event in events if isinstance(event, Piece)]
    assert sum(1 + len(piece.tokens) + sum(map(len, piece.probs)) for piece in read) <= MAX_UNREAD


def test_a_reply_that_is_read_may_be_as_long_as_it_likes() -> None:
    handle = RequestHandle(request(Prompt.from_ids([1, 2])))
    for _ in range(20):
        for _ in range(MAX_UNREAD // 50):
            handle.put(Piece("a", (1,), (PROBS,)))
        assert len(handle.drain()) == MAX_UNREAD // 50
    assert not handle.cancelled


def test_errors_of_the_library_that_nobody_asks_for_do_not_pile_up() -> None:
    said = LibraryLog()
    for number in range(1000):
        said.receive(4, f"llama_decode: cause {number}".encode())
        said.receive(5, b" and more")
    assert said._threads.error == "llama_decode: cause 0", "the first of them"
    assert said.last_error("nothing") == "cause 0"
    assert said.last_error("nothing") == "nothing"

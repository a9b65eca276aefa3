"""A worker on a fake backend, and the answers of its thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.ram import RamCache
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Piece
from pyctl.engine.sampling import Sampling
from pyctl.engine.worker import Worker
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.drive import ManualClock, request
from tests.unit.server.fake import INFO
from tests.waiting import until

PROMPT = Prompt.from_ids([1 + i % 60 for i in range(300)], [100, 290])


SLEEP_SECONDS = 60.0


ENDLESS = Sampling(temperature=0.0, ignore_eos=True)


@dataclass
class WorkerReply:
    tokens: list[int]
    stats: RequestStats


class WatchedWorker:
    """A worker on a fake backend, with everything that looks into it."""

    def __init__(
        self,
        sleep_seconds: float = -1,
        n_seqs: int = 1,
        exact: bool = False,
        is_async: bool = False,
    ) -> None:
        self.backend = FakeBackend("hybrid", n_seqs=n_seqs)
        self.backend.facts = replace(self.backend.facts, is_async=is_async)
        self.clock = ManualClock()
        self.engine = Engine(
            self.backend, RamCache(8, None), EngineSettings(exact=exact), clock=self.clock
        )
        self.worker = Worker(self.engine, INFO, sleep_seconds)
        self.admin = EngineAdmin(self.worker, self.engine)

    def ask(self, prompt: Prompt, n: int = 8) -> WorkerReply:
        tokens: list[int] = []
        for event in self.worker.submit(request(prompt, n)):
            if isinstance(event, Piece):
                tokens += event.tokens
            elif isinstance(event, Done):
                return WorkerReply(tokens, event.stats)
            else:
                assert not isinstance(event, Failed), event.error
        raise AssertionError("no end")

    def begin(self, n: int = 3000) -> RequestHandle:
        """Begin a reply of ``n`` tokens, one for each call or cancellation, so that it cannot end
        before a slow test looks at it.
        """
        decode = self.backend.decode
        inbox = self.worker._inbox
        running = self.engine.running
        call = self.worker.call
        looks = threading.Semaphore(0)

        def look(*args: Any, **kwargs: Any) -> Future[Any]:
            future = call(*args, **kwargs)
            looks.release()
            return future

        def when_looked_at(items: Sequence[SequenceTokens]) -> None:
            while not looks.acquire(timeout=0.001) and not any(
                active.handle.cancelled for active in running
            ):
                if not inbox.empty():
                    break
            decode(items)

        self.backend.decode = when_looked_at
        self.worker.call = look
        return self.worker.submit(request(PROMPT, n, sampling=ENDLESS))

    def advance(self, seconds: float) -> None:
        """Let time pass behind all that the worker has done."""
        result(self.worker.call(lambda: self.clock.advance(seconds)))

    def fall_asleep(self) -> None:
        self.advance(SLEEP_SECONDS)
        until(lambda: self.worker.is_sleeping)


def result(future: Future[Any]) -> Any:
    return future.result(timeout=60)

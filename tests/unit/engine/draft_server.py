"""An engine with a draft model, driven without a thread, and events between its requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pyctl.cache.ram import RamCache
from pyctl.engine.backend import Backend
from pyctl.engine.draft.source import DraftJob
from pyctl.engine.draft.speculation import ModelDrafts, Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.sampling import Sampling
from pyctl.errors import UnavailableError
from pyctl.prompt import Prompt
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ask, tier_on

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)


class RememberedDrafts(ModelDrafts):
    """Three drafts of the draft model each time; remembers them by request and position."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend, 3)
        self.drafts: defaultdict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)

    def propose(self, jobs: Sequence[DraftJob], n: int = 0) -> list[tuple[int, ...]]:
        found = super().propose(jobs, n)
        for job, draft in zip(jobs, found, strict=True):
            self.drafts[job.key][job.seq.n] = draft
        return found


class Turn(NamedTuple):
    """The result of one request, and the drafts by the positions that they followed."""

    tokens: list[int]
    drafts: dict[int, tuple[int, ...]]


class DraftServer:
    """An engine on ``backend``, with a cache in RAM and on disk; ``other`` is the prompt of another
    conversation.
    """

    def __init__(
        self, backend: Backend, directory: Path, other: Prompt, *, exact: bool = True
    ) -> None:
        self.backend = backend
        self.directory = directory
        self.other = other
        self.exact = exact
        self.start()

    def start(self) -> None:
        for seq in range(self.backend.facts.n_seqs):
            self.backend.memory.clear(seq)
        self.tier = tier_on(
            self.directory, "model", min_tokens=32, sizes=self.backend.memory.shape.sizes
        )
        self.source = RememberedDrafts(self.backend)
        speculation = Speculation(model=self.source if self.backend.facts.draft_type else None)
        options = EngineSettings(exact=self.exact)
        self.engine = Engine(self.backend, RamCache(32, None), options, self.tier, speculation)

    def ask(self, prompt: Prompt, n: int = 24) -> Turn:
        reply = ask(self.engine, prompt, n, sampling=ENDLESS)
        assert reply.error is None
        self.restored = reply.done.stats.source
        self.n_cached = reply.done.stats.n_cached
        check_invariants(self.engine.prefix_cache.cache)
        return Turn(
            reply.tokens, self.source.drafts[max(self.source.drafts)] if self.source.drafts else {}
        )

    def go_on(self) -> None:
        """Do nothing to the conversation: it is still there."""

    def leave(self) -> None:
        """Have another conversation take the only sequence."""
        self.ask(self.other)

    def sleep(self) -> None:
        self.engine.sleep()
        self.engine.wake()

    def close(self) -> None:
        self.engine.sleep()  # what was generated goes to the cache, too
        self.engine.close(UnavailableError("the end"))
        self.backend.load()

    def restart(self) -> None:
        """Leave nothing but what is on disk."""
        self.close()
        self.start()


WAYS = {
    "live": DraftServer.go_on,
    "ram": DraftServer.leave,
    "sleep": DraftServer.sleep,
    "disk": DraftServer.restart,
}

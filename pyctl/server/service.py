"""What the server does unless a request says otherwise, and the parts it talks to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.cache_stats import CacheView
from pyctl.cache.persist import DiskPolicy
from pyctl.chat.cached_tokenizer import Tokenizer
from pyctl.chat.chat_format import ChatFormat
from pyctl.engine.backend import EngineInfo
from pyctl.engine.engine_stats import EngineStats, SequenceFile, SequenceView
from pyctl.engine.request import Event, Request
from pyctl.engine.sampling import Sampling
from pyctl.prompt import Tokens
from pyctl.server.response_store import ResponseStore
from pyctl.server.server_settings import ServerSettings

__all__ = ["CacheLike", "EngineLike", "HandleLike", "Service", "Settings", "SlotsLike", "WorkerLike"]


class HandleLike(Protocol):
    """The events of one request, for one consumer; they end after a Done or Failed."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def drain(self) -> list[Event]:
        """Events that are here already, taken without waiting."""
        ...

    def cancel(self) -> None:
        """Stop the work soon; any thread, any number of times. No event need follow."""
        ...


class WorkerLike(Protocol):
    """What serves requests."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def is_sleeping(self) -> bool:
        """Whether the model is freed until the next request."""
        ...

    def check(self, sampling: Sampling) -> None:
        """Raise RequestError for a grammar that cannot be compiled; may take a second. Any thread."""
        ...

    def submit(self, request: Request) -> HandleLike:
        """Queue ``request``; raises ContextSizeError and UnavailableError at once. Any thread."""
        ...


class EngineLike(Protocol):
    """Watches the engine and embeds texts with its model."""

    def stats(self) -> Future[EngineStats]: ...
    def embed(self, tokens: Tokens) -> Future[NDArray[np.float32]]: ...


class SlotsLike(Protocol):
    """Looks at the live sequences and moves them between memory and files; see EngineAdmin for the errors."""

    def sequences(self) -> Future[tuple[SequenceView, ...]]: ...
    def save(self, seq: int, path: Path) -> Future[SequenceFile]: ...
    def restore(self, seq: int, path: Path) -> Future[SequenceFile]: ...
    def erase(self, seq: int) -> Future[int]: ...


class CacheLike(Protocol):
    """Looks into the prefix cache and changes it; each call's future ends between two steps of the engine."""

    def view(self) -> Future[CacheView]: ...
    def pin(self, name: str, pinned: bool) -> Future[bool]: ...
    def clear(self) -> Future[int]: ...


@dataclass(frozen=True)
class Settings(ServerSettings):
    """With what goes to disk, and what /cache and /props, /metrics and /embeddings, and /slots work with."""

    disk_policy: DiskPolicy = field(default_factory=lambda: DiskPolicy("off"))
    cache: CacheLike | None = None
    engine: EngineLike | None = None
    slots: SlotsLike | None = None


@dataclass(frozen=True)
class Service:
    """What the endpoints share."""

    worker: WorkerLike
    chat: ChatFormat
    tokenizer: Tokenizer
    settings: Settings
    responses: ResponseStore = field(default_factory=ResponseStore)

    @property
    def info(self) -> EngineInfo:
        """Facts about the model and the context."""
        return self.worker.info

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` for people: special tokens shown, broken characters replaced."""
        return self.tokenizer.detokenize(tokens).decode("utf-8", "replace")

    @property
    def model(self) -> str:
        """The name under which clients know the model."""
        return self.info.model_alias or self.info.model_name

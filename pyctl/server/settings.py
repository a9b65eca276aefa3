"""What the server does unless a request says otherwise, and the parts it talks to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from pyctl.cache.policy import DiskPolicy
from pyctl.cache.view import CacheView
from pyctl.chat.format import ChatFormat
from pyctl.chat.tokenizer import Tokenizer
from pyctl.engine.info import EngineInfo
from pyctl.engine.request import Event, Request
from pyctl.engine.sampling import Sampling
from pyctl.server.responses_store import ResponseStore

__all__ = ["CacheLike", "Service", "Settings", "TicketLike", "WorkerLike"]


class TicketLike(Protocol):
    """The events of one request, for one consumer; they end after a Done or Failed."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def waiting(self) -> list[Event]:
        """Events that are here already, taken without waiting."""
        ...

    def cancel(self) -> None:
        """Stop the work soon; any thread, any number of times. No event need follow."""
        ...


class WorkerLike(Protocol):
    """What serves requests."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: Request) -> TicketLike:
        """Queue ``request``; raises ContextSizeError and UnavailableError at once. Any thread."""
        ...


class CacheLike(Protocol):
    """Looks into the prefix cache and changes it; each call's future ends between two steps of the engine."""

    def view(self) -> Future[CacheView]: ...
    def pin(self, name: str, pinned: bool) -> Future[bool]: ...
    def clear(self) -> Future[int]: ...


@dataclass(frozen=True)
class Settings:
    """``n_predict`` -1 means until the context is full; no ``api_keys`` means that everybody may ask.

    ``reasoning_format`` is auto, deepseek, deepseek-legacy or none. ``ping_seconds`` is the silence after which a
    stream sends a comment, -1 for never. ``cache`` is what /cache and /props show, None for nothing, ``disk_policy``
    what goes to disk.
    """

    sampling: Sampling = field(default_factory=Sampling)
    n_predict: int = -1
    cache_prompt: bool = True
    reasoning_format: str = "auto"
    api_keys: tuple[str, ...] = ()
    ping_seconds: int = 30
    cache: CacheLike | None = None
    disk_policy: DiskPolicy = field(default_factory=lambda: DiskPolicy("off"))


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

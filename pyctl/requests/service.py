"""A model as requests reach it, in the server and in a chat at a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pyctl.cache.disk_policy import DiskPolicy
from pyctl.chat.cached_tokenizer import readable
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.tokenizer import Tokenizer
from pyctl.engine.backend import EngineInfo
from pyctl.engine.worker import Worker
from pyctl.processes.process_memory import trim_heap
from pyctl.requests.image_sources import ImageSources
from pyctl.requests.reply_settings import ReplySettings
from pyctl.requests.request_pool import Fetched, PostReplyQueue, RequestPool

__all__ = ["Service", "SharedState"]


@dataclass(frozen=True, kw_only=True)
class SharedState:
    """The parts of a process that requests to all of its models share."""

    pool: RequestPool = field(default_factory=lambda: RequestPool(trim_heap))

    @property
    def media_path(self) -> str:
        """The directory of the images that requests may name, empty for none."""
        return ""


@dataclass(frozen=True)
class Service:
    """A model with its engine. The maker of the worker closes the worker."""

    worker: Worker
    chat: ChatFormat
    settings: ReplySettings = field(default_factory=ReplySettings)
    shared: SharedState = field(default_factory=SharedState)

    def __post_init__(self) -> None:
        self.worker.before_close(self.post_reply.close)

    @cached_property
    def post_reply(self) -> PostReplyQueue:
        """Work after replies."""
        return PostReplyQueue(self.shared.pool)

    @cached_property
    def info(self) -> EngineInfo:
        """Facts about the model and the context."""
        return self.worker.info

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's own."""
        return self.chat.tokenizer

    @cached_property
    def model(self) -> str:
        """The model's name for clients."""
        return self.info.model_alias or self.info.model_name

    @cached_property
    def disk_policy(self) -> DiskPolicy:
        """The default disk policy of requests."""
        return DiskPolicy.from_flag(self.settings.disk_policy)

    def image_sources(self, fetched: Fetched) -> ImageSources | None:
        """Return the sources of a request's images, None for a model that reads none."""
        reader = self.chat.images
        if reader is None:
            return None
        return ImageSources(
            reader, fetched, n_ctx=self.info.n_ctx, media_path=self.shared.media_path
        )

    def readable(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` for display."""
        return readable(self.tokenizer, tokens)

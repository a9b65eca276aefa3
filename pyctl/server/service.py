"""What the server does unless a request says otherwise, and the parts it talks to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pyctl.cache.persist import DiskPolicy
from pyctl.chat.cached_tokenizer import Tokenizer
from pyctl.chat.chat_format import ChatFormat
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.backend import EngineInfo
from pyctl.engine.worker import Worker
from pyctl.server.response_store import ResponseStore
from pyctl.server.server_settings import ServerSettings

__all__ = ["Service", "Settings"]


@dataclass(frozen=True)
class Settings(ServerSettings):
    """With what of a request goes to disk unless it says otherwise."""

    disk_policy: DiskPolicy = field(default_factory=lambda: DiskPolicy("off"))


@dataclass(frozen=True)
class Service:
    """What the endpoints, and a chat in this process, share; whoever made the worker closes it."""

    worker: Worker
    chat: ChatFormat
    admin: EngineAdmin
    settings: Settings
    responses: ResponseStore = field(default_factory=ResponseStore)

    @property
    def info(self) -> EngineInfo:
        """Facts about the model and the context."""
        return self.worker.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own."""
        return self.chat.tokenizer

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` for people: special tokens shown, broken characters replaced."""
        return self.tokenizer.detokenize(tokens).decode("utf-8", "replace")

    @property
    def model(self) -> str:
        """The name under which clients know the model."""
        return self.info.model_alias or self.info.model_name

"""What the endpoints share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pyctl.cache import DiskPolicy
from pyctl.chat.cached_tokenizer import Tokenizer, readable
from pyctl.chat.chat_format import ChatFormat
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.backend import EngineInfo
from pyctl.engine.handle import RequestHandle
from pyctl.engine.worker import Worker
from pyctl.page.markdown_process import MarkdownProcess
from pyctl.server.heaps import give_back
from pyctl.server.request_pool import Afterwards, RequestPool
from pyctl.server.server_settings import ServerSettings
from pyctl.server.stores import ConversationStore, ResponseStore

__all__ = ["Service"]


@dataclass(frozen=True)
class Service:
    """What the endpoints, and a chat in this process, share; whoever made the worker closes it.

    ``running`` are the handles of replies that are being sent, by their id, without those that may not be controlled.
    The event loop's own.
    """

    worker: Worker
    chat: ChatFormat
    admin: EngineAdmin
    settings: ServerSettings
    responses: ResponseStore = field(default_factory=ResponseStore)
    running: dict[str, tuple[RequestHandle, ...]] = field(default_factory=dict)
    conversations: ConversationStore = field(default_factory=ConversationStore)
    pool: RequestPool = field(default_factory=lambda: RequestPool(on_rest=give_back))
    fetching: RequestPool = field(default_factory=lambda: RequestPool(4, max_waiting=64))
    rendering: RequestPool = field(default_factory=lambda: RequestPool(1, max_waiting=16))
    markdown: MarkdownProcess = field(default_factory=MarkdownProcess)
    afterwards: Afterwards = field(default_factory=Afterwards)

    def __post_init__(self) -> None:
        self.worker.before_close(self.afterwards.close)

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
        """The name under which clients know the model."""
        return self.info.model_alias or self.info.model_name

    @cached_property
    def disk_policy(self) -> DiskPolicy:
        """What goes to disk where a request does not say."""
        return DiskPolicy.of_server(self.settings.disk_policy)

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` for people."""
        return readable(self.tokenizer, tokens)

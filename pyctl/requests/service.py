"""The objects that endpoints use: a `Service` for each model, and `AppState` for all models of a
process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pyctl.cache import DiskPolicy
from pyctl.chat.cached_tokenizer import Tokenizer, readable
from pyctl.chat.chat_format import ChatFormat
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.backend import EngineInfo
from pyctl.engine.engine_stats import EngineMemory
from pyctl.engine.handle import RequestHandle
from pyctl.engine.worker import Worker
from pyctl.mcp.toolbox import ToolBox
from pyctl.page.markdown_process import MarkdownProcess
from pyctl.processes.process_memory import give_back
from pyctl.requests.request_pool import PostReplyQueue, RequestPool
from pyctl.server import ReplySettings, ServerSettings
from pyctl.server.kept_streams import KeptStreams
from pyctl.server.saved_days import SavedDays

__all__ = ["AppState", "Service"]


@dataclass(frozen=True)
class AppState:
    """The state that all models of a process share: settings of the server, kept streams, threads.

    ``running`` are the handles of replies that are being sent, by their id, without those that may
    not be controlled; only the event loop uses it, ``streams``, and ``calls``, the calls of tools.
    """

    settings: ServerSettings = field(default_factory=ServerSettings)
    build: str = ""
    """The build of llama.cpp, and which modules of the extension do not fit it."""
    streams: KeptStreams = field(default_factory=KeptStreams)
    running: dict[str, tuple[RequestHandle, ...]] = field(default_factory=dict)
    pool: RequestPool = field(default_factory=lambda: RequestPool(give_back))
    markdown: MarkdownProcess = field(default_factory=MarkdownProcess)
    tools: ToolBox = field(default_factory=ToolBox)
    calls: set[asyncio.Future[dict[str, Any]]] = field(default_factory=set)
    saved: SavedDays = field(default_factory=SavedDays)
    """The time that the cache saved all clients."""


@dataclass(frozen=True)
class Service:
    """A model, as the endpoints and a chat in this process use it. The creator of its worker
    closes that.
    """

    worker: Worker
    chat: ChatFormat
    admin: EngineAdmin
    settings: ReplySettings = field(default_factory=ReplySettings)
    shared: AppState = field(default_factory=AppState)

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
        return DiskPolicy.of_server(self.settings.disk_policy)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` for display."""
        return readable(self.tokenizer, tokens)

    def counted_bytes(self, engine: EngineMemory) -> Mapping[str, int]:
        """Return bytes by use; ``engine`` is the result of `EngineAdmin.memory`.

        ``snapshots`` are the prefix cache's. ``blocks`` are all saved rows and states: of
        snapshots, those ``in_flight`` to or from a device, those that wait for the disk. ``arena``
        is memory taken from the system for blocks, future ones included. The others are remembered
        between requests.
        """
        return {
            "snapshots": engine.snapshots,
            "blocks": engine.blocks.used,
            "in_flight": engine.blocks.in_flight,
            "arena": engine.blocks.held,
            "recent_prompts": engine.recent_prompts,
            "draft_texts": engine.draft_texts,
            "images": engine.images,
            **self.chat.n_bytes,
        }

"""The objects that endpoints use: a `HttpService` for each model, and `AppState` for all models of
a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from pyctl.engine.admin import EngineAdmin
from pyctl.engine.engine_stats import EngineMemory
from pyctl.engine.handle import RequestHandle
from pyctl.mcp.toolbox import ToolBox
from pyctl.page.markdown_process import MarkdownProcess
from pyctl.receipts.receipt_writer import ReceiptWriter
from pyctl.requests.cache_diagnosis import RequestRecords
from pyctl.requests.service import Service, SharedState
from pyctl.server.kept_streams import KeptStreams
from pyctl.server.model_history import ModelHistory
from pyctl.server.request_span import SpanCounts
from pyctl.server.saved_days import SavedDays
from pyctl.server.server_settings import ServerSettings
from pyctl.server.threads import Threads

__all__ = ["AppState", "HttpService"]


@dataclass(frozen=True)
class AppState(SharedState):
    """Shared by all models of a process: settings of the server, kept streams, threads.

    ``running`` are the handles of replies that are being sent, by their id, without those that may
    not be controlled; only the event loop uses it, ``streams``, and ``calls``, the calls of tools.
    """

    settings: ServerSettings = field(default_factory=ServerSettings)
    build: str = ""
    """The build of llama.cpp, and which modules of the extension do not fit it."""
    streams: KeptStreams = field(default_factory=KeptStreams)
    running: dict[str, tuple[RequestHandle, ...]] = field(default_factory=dict)
    markdown: MarkdownProcess = field(default_factory=MarkdownProcess)
    tools: ToolBox = field(default_factory=ToolBox)
    calls: set[asyncio.Future[dict[str, Any]]] = field(default_factory=set)
    threads: Threads = field(default_factory=Threads)
    """The conversations that clients continue by id."""
    request_records: RequestRecords = field(default_factory=RequestRecords)
    """The requests that clients compare later ones with."""
    saved: SavedDays = field(default_factory=SavedDays)
    """The time that the cache saved all clients."""
    model_history: ModelHistory = field(default_factory=ModelHistory)
    span_counts: SpanCounts = field(default_factory=SpanCounts)
    """The outcomes of the spans of requests, with --otel."""

    @property
    def media_path(self) -> str:
        return self.settings.media_path


@dataclass(frozen=True)
class HttpService(Service):
    """A model that endpoints serve, with the state of the process that serves it.

    Attributes:
        shared: The state of the process.
        admin: The reads and changes of the engine and its cache, between two of its steps.
        receipts: The writer of receipts, None without them.
    """

    shared: AppState = field(default_factory=AppState)
    _: KW_ONLY
    admin: EngineAdmin
    receipts: ReceiptWriter | None = None

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
            "threads": self.shared.threads.counts().n_bytes,
            "request_records": self.shared.request_records.n_bytes,
            **self.chat.n_bytes,
        }

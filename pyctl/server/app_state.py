"""The objects that endpoints use: a `HttpService` for each model, and `AppState` for all models of
a process.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from pyctl.engine.handle import RequestHandle
from pyctl.mcp.toolbox import ToolBox
from pyctl.page.markdown_process import MarkdownProcess
from pyctl.requests.service import Service, SharedState
from pyctl.server.kept_streams import KeptStreams
from pyctl.server.saved_days import SavedDays
from pyctl.server.server_settings import ServerSettings

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
    saved: SavedDays = field(default_factory=SavedDays)
    """The time that the cache saved all clients."""

    @property
    def media_path(self) -> str:
        return self.settings.media_path


@dataclass(frozen=True)
class HttpService(Service):
    """A model that endpoints serve, with the state of the process that serves it."""

    shared: AppState = field(default_factory=AppState)

"""Replies told as named events, each of which opens, fills or closes a part of the reply.

A stream begins with the first report of the prefill, before anything is evaluated, so that its opening events already
say what was cached and no client waits for them through a long prompt; llama-server sends them with the first token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from pyctl.chat.reasoning import Delta
from pyctl.engine.request import Done, Piece, Progress
from pyctl.server.answer import Answer, Run
from pyctl.server.chat import ChatJob
from pyctl.server.json import encode
from pyctl.server.reply import Reply
from pyctl.server.settings import Service

__all__ = ["EventReply", "answer", "named"]


def named(events: Iterable[dict[str, Any]]) -> bytes:
    """``events`` as server-sent events that are named after their types."""
    return b"".join(b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n" for event in events)


def answer(service: Service, reply: Reply) -> Answer:
    """Ask for ``reply`` and answer with it. Raises ContextSizeError and UnavailableError."""
    return Answer([Run(service.worker.submit(reply.request), reply)], lambda bodies: bodies[0], service.text_of)


class EventReply(Reply):
    """The reply to ``job``: `begin`, then `more` for each part, then `close`."""

    def __init__(self, service: Service, job: ChatJob) -> None:
        super().__init__(service, job.request, job.options)
        self.begun = False
        self.n_reasoned = 0  # tokens whose text is reasoning and nothing else
        self._splitter = job.splitter
        self._opened = job.opened

    @abstractmethod
    def begin(self) -> list[dict[str, Any]]:
        """The events that come before all others."""

    @abstractmethod
    def reported(self, events: list[dict[str, Any]], progress: Progress) -> list[dict[str, Any]]:
        """``events``, which are about to be sent, with a report of the prefill."""

    @abstractmethod
    def more(self, delta: Delta) -> list[dict[str, Any]]:
        """Events for more of the reply; what the end needs of it is kept."""

    @abstractmethod
    def close(self, done: Done) -> list[dict[str, Any]]:
        """The last events."""

    @abstractmethod
    def body(self, done: Done) -> dict[str, Any]:
        """The reply that `more` has been told, as one body."""

    def progressed(self, progress: Progress) -> bytes:
        self.progress = progress
        events = self._begin()
        if self.options.return_progress:
            events = self.reported(events, progress)
        return named(events)

    def progress_frames(self, progress: Progress) -> bytes:
        return named(self.reported([], progress))

    def piece_frames(self, piece: Piece) -> bytes:
        return named(self._begin()) + self.frames(self._take(piece))

    def ended(self, done: Done) -> bytes:
        return named(self._begin()) + self.frames(self._rest()) + named(self.close(done))

    def keep(self, piece: Piece) -> None:
        self.n_predicted += len(piece.tokens)
        self._take(piece)

    def whole(self, done: Done) -> dict[str, Any]:
        self._rest()
        return self.body(done)

    def frames(self, events: list[dict[str, Any]]) -> bytes:
        """``events`` of one piece, as they are sent."""
        return named(events)

    def _begin(self) -> list[dict[str, Any]]:
        if self.begun:
            return []
        self.begun = True
        return self.begin()

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        text, self._opened = self._opened + piece.text, ""
        delta = self._splitter.feed(text, piece.tokens)
        if delta.reasoning and not delta.content and not delta.calls:
            self.n_reasoned += len(piece.tokens)
        return self.more(delta)

    def _rest(self) -> list[dict[str, Any]]:
        """What is said by nothing but the end; all that the prompt has opened, if the model said nothing."""
        events = self.more(self._splitter.feed(self._opened)) if self._opened else []
        return events + self.more(self._splitter.finish())

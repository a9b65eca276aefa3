"""The forms of replies: the frames and bodies that an API makes of the engine's events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from pyctl.chat.reply import ReplyDelta
from pyctl.engine.backend import TopTokens
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, DraftCounts, Piece, Progress, Timings
from pyctl.requests.prepared_reply import PreparedReply
from pyctl.requests.service import Service
from pyctl.server.http import PING, ErrorForm, encode, error_body, frame, named_frames
from pyctl.server.reply_json import cache_json, probs_json, progress_json, timings_json
from pyctl.text import random_id

__all__ = ["EventReply", "Reply", "identity"]


def identity(service: Service) -> dict[str, Any]:
    """Return the members that all events of one answer share."""
    return {
        "created": int(time.time()),
        "id": "chatcmpl-" + random_id(),
        "model": service.model,
        "system_fingerprint": service.info.build,
    }


class Reply(ABC):
    """The reply to one prompt, as ``prepared``.

    A stream calls `progressed`, `continued` and `ended` and sends their results; anything else
    calls `collect` for each piece and then `whole`. Of a stream nothing is kept that the end does
    not need.
    """

    media_type = "text/event-stream"
    """The media type of a stream."""

    error_form: ErrorForm = staticmethod(error_body)
    """The form of errors."""

    end: bytes = b""
    """The end of a stream after the last reply."""

    id: str = ""
    """The id by which clients may control the reply while it runs; empty for none."""

    def __init__(self, service: Service, prepared: PreparedReply) -> None:
        self.service = service
        self.prepared = prepared
        self.request = prepared.request
        self.options = prepared.options
        self.index = prepared.index
        self.n_predicted = 0
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.probs: list[TopTokens] = []
        self.progress: Progress | None = None
        self.handle: RequestHandle | None = None  # of the request, once it is on its way
        self.may_read_prompts = (
            False  # the client may read texts of other clients; `respond` sets it
        )
        self._first = 0.0

    def progressed(self, progress: Progress) -> bytes:
        """Return the events for a report of the prefill, if requested."""
        self.progress = progress
        return self.progress_frames(progress) if self.options.return_progress else b""

    def waits(self, progress: Progress) -> bytes:
        """Return events for the place of a request that waits, if requested."""
        return self.progress_frames(progress) if self.options.return_progress else b""

    def continued(self, piece: Piece) -> bytes:
        """Return the events for more of the reply."""
        if not self.n_predicted:
            self._first = time.perf_counter()
        self.n_predicted += len(piece.tokens)
        return self.piece_frames(piece)

    def collect(self, piece: Piece) -> None:
        """Remember more of a reply that is sent as a whole."""
        self.texts.append(piece.text)
        self.tokens.extend(piece.tokens)
        self.probs.extend(piece.probs)

    def progress_frames(self, progress: Progress) -> bytes:
        """Return the events for a report of the prefill."""
        return b""

    @abstractmethod
    def piece_frames(self, piece: Piece) -> bytes:
        """Return the events for more of the reply."""

    @abstractmethod
    def ended(self, done: Done) -> bytes:
        """Return the last events of this reply."""

    @abstractmethod
    def whole(self, done: Done) -> dict[str, Any]:
        """Return the reply as one body."""

    def ping(self) -> bytes:
        """Return a sign of life for a silent stream."""
        return PING

    def error_event(self, error: Exception) -> bytes:
        """Return ``error`` as the last event of a stream that has started."""
        return frame(encode(self.error_form(error)))

    def timings(self, done: Done) -> dict[str, Any]:
        """Return the account of a reply that has ended, with the cache's if the client requested
        it.
        """
        body = timings_json(done.timings, done.stats, done.receipt)
        if self.options.return_cache:
            body["cache"] = cache_json(
                done.stats, self.service.readable if self.may_read_prompts else None
            )
        return body

    def logprobs(self, probs: list[TopTokens]) -> dict[str, Any]:
        """Return ``probs`` as the OpenAI endpoints write them."""
        return {
            "content": probs_json(
                probs, self.service.tokenizer, self.request.sampling.post_sampling_probs
            )
        }

    def extras(self, progress: Progress | None = None) -> bytes:
        """Return ``,"timings":...`` and ``,"prompt_progress":...`` for an event before the end, if
        they were requested.
        """
        parts = b""
        if self.options.timings_per_token:
            parts += b',"timings":' + encode(timings_json(self._timings_so_far()))
        if progress is not None:
            parts += b',"prompt_progress":' + encode(progress_json(progress, self.options))
        return parts

    def _timings_so_far(self) -> Timings:
        total = len(self.request.prompt)
        cached = 0
        prompt_ms = 0.0
        if self.progress is not None:
            cached = self.progress.n_cached
            prompt_ms = self.progress.ms
        predicted_ms = (time.perf_counter() - self._first) * 1e3 if self.n_predicted else 0.0
        drafts = self.handle.drafts if self.handle is not None else DraftCounts()
        return Timings(
            cached, total - cached, prompt_ms, self.n_predicted, predicted_ms, 0.0, drafts
        )


class EventReply(Reply):
    """A reply of events, which are objects: `begin`, then `more` for each part, then `close`."""

    def __init__(self, service: Service, prepared: PreparedReply) -> None:
        super().__init__(service, prepared)
        self.begun = False
        self._splitter = prepared.splitter
        self._open_reasoning = prepared.splitter.opening

    def begin(self) -> list[dict[str, Any]]:
        """Return the events that come before all others."""
        return []

    def reported(self, events: list[dict[str, Any]], progress: Progress) -> list[dict[str, Any]]:
        """Return ``events``, which are about to be sent, with a report of the prefill where the API
        has a place for it.
        """
        return events

    @abstractmethod
    def more(self, delta: ReplyDelta) -> list[dict[str, Any]]:
        """Return the events for more of the reply, and keep the text that the end needs."""

    @abstractmethod
    def close(self, done: Done) -> list[dict[str, Any]]:
        """Return the last events."""

    @abstractmethod
    def body(self, done: Done) -> dict[str, Any]:
        """Return the reply that `more` received, as one body."""

    def waits(self, progress: Progress) -> bytes:
        """Return nothing: the first event of these APIs has the tokens that were cached."""
        return b""

    def progressed(self, progress: Progress) -> bytes:
        self.progress = progress
        events = self._begin()
        if self.options.return_progress:
            events = self.reported(events, progress)
        return self.sent(events)

    def piece_frames(self, piece: Piece) -> bytes:
        return self.sent(self._begin()) + self.frames(self._take(piece))

    def ended(self, done: Done) -> bytes:
        return (
            self.sent(self._begin())
            + self.frames(self._closing_events())
            + self.sent(self.close(done))
        )

    def collect(self, piece: Piece) -> None:
        self.n_predicted += len(piece.tokens)
        self._take(piece)

    def whole(self, done: Done) -> dict[str, Any]:
        self._closing_events()
        return self.body(done)

    def sent(self, events: list[dict[str, Any]]) -> bytes:
        """Return ``events`` as they are sent."""
        return named_frames(events)

    def frames(self, events: list[dict[str, Any]]) -> bytes:
        """Return ``events`` of one piece, as they are sent."""
        return self.sent(events)

    def _begin(self) -> list[dict[str, Any]]:
        if self.begun:
            return []
        self.begun = True
        return self.begin()

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        text = self._open_reasoning + piece.text
        self._open_reasoning = ""
        return self.more(self._splitter.feed(text, piece.tokens))

    def _closing_events(self) -> list[dict[str, Any]]:
        """Return the events of the text that was held back until the end; all that the prompt has
        opened, if no token was sampled.
        """
        events = (
            self.more(self._splitter.feed(self._open_reasoning)) if self._open_reasoning else []
        )
        return events + self.more(self._splitter.finish())

"""What all kinds of replies have in common: they are told the engine's events and say what the client is to read."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from starlette.responses import Response

from pyctl.chat.reasoning import ReplyDelta
from pyctl.engine.backend import TopTokens
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, DraftCounts, Piece, Progress, Timings
from pyctl.server.generate.payload import cache_json, probs_json, progress_json, timings_json
from pyctl.server.generate.prepare import PreparedReply
from pyctl.server.http import PING, encode, error_event, error_response, named_frames
from pyctl.server.service import Service

__all__ = ["EventReply", "Reply"]


class Reply(ABC):
    """The reply to one prompt, as ``prepared``.

    A stream calls `progressed`, `continued` and `ended` and sends what they return; anything else calls `keep` for each
    piece and then `whole`. Of a stream nothing is kept that the end does not need.
    """

    end: bytes = b""
    """What ends a stream after the last reply."""

    id: str = ""
    """By what clients may control it while it runs; empty for nothing."""

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
        self.sees_texts = False  # the client may read what others have said
        self._first = 0.0

    def progressed(self, progress: Progress) -> bytes:
        """Events for a report of the prefill, if the client wants them."""
        self.progress = progress
        return self.progress_frames(progress) if self.options.return_progress else b""

    def continued(self, piece: Piece) -> bytes:
        """Events for more of the reply."""
        if not self.n_predicted:
            self._first = time.perf_counter()
        self.n_predicted += len(piece.tokens)
        return self.piece_frames(piece)

    def keep(self, piece: Piece) -> None:
        """Remember more of a reply that is sent as a whole."""
        self.texts.append(piece.text)
        self.tokens.extend(piece.tokens)
        self.probs.extend(piece.probs)

    @abstractmethod
    def progress_frames(self, progress: Progress) -> bytes:
        """Events for a report of the prefill."""

    @abstractmethod
    def piece_frames(self, piece: Piece) -> bytes:
        """Events for more of the reply."""

    @abstractmethod
    def ended(self, done: Done) -> bytes:
        """The last events of this reply."""

    @abstractmethod
    def whole(self, done: Done) -> dict[str, Any]:
        """The reply as one body."""

    def ping(self) -> bytes:
        """A sign of life for a silent stream."""
        return PING

    def error_event(self, error: Exception) -> bytes:
        """``error`` as the last event of a stream that has begun."""
        return error_event(error)

    def error_response(self, error: Exception) -> Response:
        """``error`` as the whole answer."""
        return error_response(error)

    def timings(self, done: Done) -> dict[str, Any]:
        """The account of a reply that has ended, with the cache's if the client asked for it."""
        body = timings_json(done.timings, done.stats)
        if self.options.return_cache:
            body["cache"] = cache_json(done.stats, self.service.text_of if self.sees_texts else None)
        return body

    def text(self) -> str:
        """What `keep` has seen."""
        return "".join(self.texts)

    def logprobs(self, probs: list[TopTokens]) -> dict[str, Any]:
        """``probs`` as the OpenAI endpoints write them."""
        return {"content": probs_json(probs, self.service.tokenizer, self.request.sampling.post_sampling_probs)}

    def kept_probs(self, done: Done) -> list[TopTokens]:
        """The probabilities of the tokens in `text`: those of a stop string are left out, as far as can be told."""
        if done.stop_type != "word":
            return self.probs
        n_stop = len(self.service.tokenizer.tokenize(done.stopping_word, add_special=False, parse_special=False))
        return self.probs[: max(len(self.probs) - n_stop, 0)]

    def extras(self, progress: Progress | None = None) -> bytes:
        """``,"timings":...`` and ``,"prompt_progress":...`` for an event before the end, where they were asked for."""
        parts = b""
        if self.options.timings_per_token:
            parts += b',"timings":' + encode(timings_json(self._timings_so_far()))
        if progress is not None:
            parts += b',"prompt_progress":' + encode(progress_json(progress))
        return parts

    def _timings_so_far(self) -> Timings:
        total, cached, prompt_ms = len(self.request.prompt), 0, 0.0
        if self.progress is not None:
            cached, prompt_ms = self.progress.n_cached, self.progress.ms
        predicted_ms = (time.perf_counter() - self._first) * 1e3 if self.n_predicted else 0.0
        drafts = self.handle.drafts if self.handle is not None else DraftCounts()
        return Timings(cached, total - cached, prompt_ms, self.n_predicted, predicted_ms, 0.0, drafts)


class EventReply(Reply):
    """A reply of named events: `begin`, then `more` for each part, then `close`."""

    def __init__(self, service: Service, prepared: PreparedReply) -> None:
        super().__init__(service, prepared)
        self.begun = False
        self.n_reasoned = 0  # tokens whose text is reasoning and nothing else
        self._splitter = prepared.splitter()
        self._open_reasoning = prepared.open_reasoning

    @abstractmethod
    def begin(self) -> list[dict[str, Any]]:
        """The events that come before all others."""

    @abstractmethod
    def reported(self, events: list[dict[str, Any]], progress: Progress) -> list[dict[str, Any]]:
        """``events``, which are about to be sent, with a report of the prefill."""

    @abstractmethod
    def more(self, delta: ReplyDelta) -> list[dict[str, Any]]:
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
        return named_frames(events)

    def progress_frames(self, progress: Progress) -> bytes:
        return named_frames(self.reported([], progress))

    def piece_frames(self, piece: Piece) -> bytes:
        return named_frames(self._begin()) + self.frames(self._take(piece))

    def ended(self, done: Done) -> bytes:
        return named_frames(self._begin()) + self.frames(self._rest()) + named_frames(self.close(done))

    def keep(self, piece: Piece) -> None:
        self.n_predicted += len(piece.tokens)
        self._take(piece)

    def whole(self, done: Done) -> dict[str, Any]:
        self._rest()
        return self.body(done)

    def frames(self, events: list[dict[str, Any]]) -> bytes:
        """``events`` of one piece, as they are sent."""
        return named_frames(events)

    def _begin(self) -> list[dict[str, Any]]:
        if self.begun:
            return []
        self.begun = True
        return self.begin()

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        text, self._open_reasoning = self._open_reasoning + piece.text, ""
        delta = self._splitter.feed(text, piece.tokens)
        if delta.reasoning and not delta.content and not delta.calls:
            self.n_reasoned += len(piece.tokens)
        return self.more(delta)

    def _rest(self) -> list[dict[str, Any]]:
        """What is said by nothing but the end; all that the prompt has opened, if the model said nothing."""
        events = self.more(self._splitter.feed(self._open_reasoning)) if self._open_reasoning else []
        return events + self.more(self._splitter.finish())

"""What all kinds of replies have in common: they are told the engine's events and say what the client is to read."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from starlette.responses import Response

from pyctl.engine.request import Done, Piece, Progress, Request, Timings
from pyctl.server.errors import error_event, error_response
from pyctl.server.json import encode
from pyctl.server.options import Options
from pyctl.server.probs import TokenProbs, probs_json
from pyctl.server.settings import Service
from pyctl.server.timings import progress_json, timings_json

__all__ = ["Reply", "frame"]


def frame(body: bytes) -> bytes:
    """``body`` as one server-sent event."""
    return b"data: " + body + b"\n\n"


class Reply(ABC):
    """The reply to one prompt, number ``index`` among those of its request.

    A stream calls `progressed`, `continued` and `ended` and sends what they return; anything else calls `keep` for each
    piece and then `whole`. Of a stream nothing is kept that the end does not need.
    """

    end: bytes = b""
    """What ends a stream after the last reply."""

    def __init__(self, service: Service, request: Request, options: Options, index: int = 0) -> None:
        self.service = service
        self.request = request
        self.options = options
        self.index = index
        self.n_predicted = 0
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.probs: list[TokenProbs] = []
        self.progress: Progress | None = None
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
        return b":\n\n"

    def error_event(self, error: Exception) -> bytes:
        """``error`` as the last event of a stream that has begun."""
        return error_event(error)

    def error_response(self, error: Exception) -> Response:
        """``error`` as the whole answer."""
        return error_response(error)

    def text(self) -> str:
        """What `keep` has seen."""
        return "".join(self.texts)

    def logprobs(self, probs: list[TokenProbs]) -> dict[str, Any]:
        """``probs`` as the OpenAI endpoints write them."""
        return {"content": probs_json(probs, self.service.tokenizer, self.request.sampling.post_sampling_probs)}

    def kept_probs(self, done: Done) -> list[TokenProbs]:
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
        return Timings(cached, total - cached, prompt_ms, self.n_predicted, predicted_ms, 0.0, 0.0)

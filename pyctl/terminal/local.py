"""Replies from the model in this process, asked for as a client of the server would."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from pyctl.engine.request import Done, Failed, Piece, Progress
from pyctl.errors import EngineError, PyctlError
from pyctl.requests.body import ChatBody
from pyctl.requests.prepare import prepare
from pyctl.requests.service import Service
from pyctl.terminal.conversation import PromptProgress, ReplyEvent, ReplyStats

__all__ = ["LocalBackend"]


class LocalBackend:
    """A chat with ``service``, whose settings bound its replies."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def name(self) -> str:
        """Return the model's name."""
        return self._service.model

    def models(self) -> Sequence[str]:
        """Return the one model."""
        return [self._service.model]

    def use(self, model: str) -> None:
        """Do nothing, for the one model."""

    def supports_images(self) -> bool:
        """Return whether the model has an image encoder."""
        return self._service.info.vision

    def stream(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None
    ) -> Generator[ReplyEvent, None, None]:
        """Yield the model's reply; closing the generator, or Ctrl-C, ends it after a batch or
        token. Raises EngineError.
        """
        body = {"messages": list(messages), "stream": True, **(fields or {})}
        (prepared,) = prepare(self._service, ChatBody.from_json(body))
        splitter = prepared.splitter
        handle = self._service.worker.submit(prepared.request)
        try:
            if splitter.opening:
                yield splitter.feed(splitter.opening)
            for event in handle:
                if isinstance(event, Piece):
                    yield splitter.feed(event.text, event.tokens)
                elif isinstance(event, Progress):
                    yield PromptProgress(event.n_prompt, event.n_processed, event.seconds_left)
                elif isinstance(event, Done):
                    yield splitter.finish()
                    yield _stats(event)
                elif isinstance(event, Failed):
                    if isinstance(event.error, PyctlError):
                        raise event.error
                    raise EngineError(
                        str(event.error) or type(event.error).__name__
                    ) from event.error
        finally:
            handle.cancel()


def _stats(done: Done) -> ReplyStats:
    timings = done.timings
    drafts = done.timings.drafts
    ms = done.timings.predicted_ms
    return ReplyStats(
        *(timings.n_cached, timings.n_evaluated, timings.n_predicted, timings.first_token_ms),
        tokens_per_second=1000.0 * timings.n_predicted / ms if ms > 0.0 else None,
        source=done.stats.source,
        truncated=done.stop_type == "limit",
        n_drafted=drafts.n_drafted,
        n_accepted=drafts.n_accepted,
    )

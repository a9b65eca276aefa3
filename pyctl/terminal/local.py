"""Replies from the model in this process, asked for as a client of the server would."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from pyctl.chat.reply import ReplyDelta
from pyctl.engine.request import Done, Failed, Piece
from pyctl.errors import EngineError, PyctlError
from pyctl.server.body import ChatBody
from pyctl.server.prepare import prepare
from pyctl.server.service import Service
from pyctl.terminal.conversation import ChatDelta, ReplyStats

__all__ = ["LocalBackend"]


class LocalBackend:
    """A chat with ``service``, whose settings say what a reply may be."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def name(self) -> str:
        """The model's name."""
        return self._service.model

    def models(self) -> Sequence[str]:
        """The one model."""
        return [self._service.model]

    def use(self, model: str) -> None:
        """Nothing, for the one model."""

    def stream(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None
    ) -> Generator[ChatDelta, None, None]:
        """The model's reply; closing the generator, or Ctrl-C within, stops the work at the next batch end or token."""
        (prepared,) = prepare(self._service, ChatBody.of({"messages": list(messages), **(fields or {})}))
        splitter = prepared.splitter
        handle = self._service.worker.submit(prepared.request)
        try:
            if splitter.opening:
                yield _delta(splitter.feed(splitter.opening))
            for event in handle:
                if isinstance(event, Piece):
                    yield _delta(splitter.feed(event.text, event.tokens))
                elif isinstance(event, Done):
                    yield _delta(splitter.finish(), _stats(event))
                elif isinstance(event, Failed):
                    if isinstance(event.error, PyctlError):
                        raise event.error
                    raise EngineError(str(event.error) or type(event.error).__name__) from event.error
        finally:
            handle.cancel()


def _delta(said: ReplyDelta, stats: ReplyStats | None = None) -> ChatDelta:
    return ChatDelta(said.reasoning, said.content, said.calls, stats)


def _stats(done: Done) -> ReplyStats:
    timings = done.timings
    return ReplyStats(
        n_cached=timings.n_cached,
        n_evaluated=timings.n_evaluated,
        n_predicted=timings.n_predicted,
        first_token_ms=timings.first_token_ms,
        tokens_per_second=1000.0 * timings.n_predicted / timings.predicted_ms if timings.predicted_ms > 0.0 else None,
        n_drafted=timings.drafts.n_drafted or None,
        n_accepted=timings.drafts.n_accepted if timings.drafts.n_drafted else None,
        source=done.stats.source,
        truncated=done.stop_type == "limit",
    )

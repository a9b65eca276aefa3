"""The facts of a request that its OpenTelemetry span reports.

They are collected with and without --otel, so no module of OpenTelemetry is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from starlette.types import Scope

from pyctl.engine.request import Done, Request

__all__ = ["AttributeValue", "RequestSpan", "SpanCounts", "operation_of", "span_of"]

SPAN = "pyctl.span"
"""The key of a request's span in its ASGI scope."""

AttributeValue: TypeAlias = str | bool | int | float | Sequence[str]

_CHAT = "chat"
_TEXT_COMPLETION = "text_completion"
_EMBEDDINGS = "embeddings"
_RERANK = "rerank"  # OpenTelemetry's conventions have no name for it

OPERATIONS: Mapping[str, str] = {
    "/chat/completions": _CHAT,
    "/v1/chat/completions": _CHAT,
    "/v1/messages": _CHAT,
    "/responses": _CHAT,
    "/v1/responses": _CHAT,
    "/api/chat": _CHAT,
    "/completion": _TEXT_COMPLETION,
    "/completions": _TEXT_COMPLETION,
    "/v1/completions": _TEXT_COMPLETION,
    "/infill": _TEXT_COMPLETION,
    "/api/generate": _TEXT_COMPLETION,
    "/embedding": _EMBEDDINGS,
    "/embeddings": _EMBEDDINGS,
    "/v1/embeddings": _EMBEDDINGS,
    "/api/embed": _EMBEDDINGS,
    "/rerank": _RERANK,
    "/reranking": _RERANK,
    "/v1/rerank": _RERANK,
    "/v1/reranking": _RERANK,
}
"""The values of ``gen_ai.operation.name`` by path."""


def operation_of(scope: Scope, prefix: str) -> str | None:
    """Return the operation of a request whose path starts with ``prefix``; None without a span."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    return OPERATIONS.get(scope["path"].removeprefix(prefix))


@dataclass
class SpanCounts:
    """Counts of spans since the start.

    The event loop counts ``n_queued`` and ``n_dropped``, the thread that exports all others.

    Attributes:
        n_queued: The spans that entered the queue.
        n_dropped: The spans that found the queue full.
        n_taken: The spans that left the queue for the collector.
        n_exported: The spans that the collector accepted.
        n_failed: The spans that it refused, or that did not reach it.
    """

    n_queued: int = 0
    n_dropped: int = 0
    n_taken: int = 0
    n_exported: int = 0
    n_failed: int = 0

    @property
    def n_waiting(self) -> int:
        """The spans in the queue."""
        return self.n_queued - self.n_taken

    @property
    def n_lost(self) -> int:
        """The spans that reached no collector, with those that still wait."""
        return self.n_queued - self.n_exported + self.n_dropped


def _end_unread(span: RequestSpan) -> None:
    """Do nothing: the facts of ``span`` are not exported."""


@dataclass
class RequestSpan:
    """The facts of one request for its span; only the event loop uses them.

    The span ends with the last of those who `hold` it: a reply may outlive its connection.

    Attributes:
        operation: The value of ``gen_ai.operation.name``.
        on_end: A function that is called with the facts when the span ends.
        model: The model that answers; empty before it is chosen.
        requests: The requests to the engine, one for each choice.
        replies: The replies that have ended.
        is_streamed: Whether the reply is a stream.
        n_embedded: The tokens of the texts that were embedded or ranked.
        status: The HTTP status of the response; 0 before it starts.
        error: The error that ended the request; None without one.
        is_cancelled: Whether the client left before the end.
    """

    operation: str = ""
    on_end: Callable[[RequestSpan], None] = _end_unread
    model: str = ""
    requests: Sequence[Request] = ()
    replies: list[Done] = field(default_factory=list)
    is_streamed: bool = False
    n_embedded: int = 0
    status: int = 0
    error: Exception | None = None
    is_cancelled: bool = False
    _n_holders: int = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the span open for the time of the block."""
        self._n_holders += 1
        try:
            yield
        finally:
            self._n_holders -= 1
            if not self._n_holders:
                self.on_end(self)

    @property
    def name(self) -> str:
        """The name of the span by OpenTelemetry's conventions: operation and model."""
        return f"{self.operation} {self.model}".rstrip()

    @property
    def failure(self) -> str | None:
        """The description of a failure of the server; None without one.

        A request that its client must change is no failure, as for all spans of HTTP servers. An
        error within a stream comes after the status 200.
        """
        is_within_stream = self.error is not None and self.status == 200
        if self.status < 500 and not is_within_stream:
            return None
        return str(self.error or f"HTTP {self.status}")

    def attributes(self) -> dict[str, AttributeValue]:
        """Return the attributes of the span: counts, names and times, but no text of a client."""
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": "pyctl",
        }
        if self.model:
            attributes["gen_ai.request.model"] = self.model
            attributes["gen_ai.response.model"] = self.model
        if self.requests:
            attributes |= self._request_attributes(self.requests[0])
        if self.replies:
            attributes |= self._usage_attributes()
            attributes |= _cache_attributes(self.replies[0])
        if self.n_embedded:
            attributes["gen_ai.usage.input_tokens"] = self.n_embedded
        if self.status:
            attributes["http.response.status_code"] = self.status
        if self.error is not None:
            attributes["error.type"] = type(self.error).__name__
        elif self.status >= 400:
            attributes["error.type"] = str(self.status)
        if self.is_cancelled:
            attributes["pyctl.request.cancelled"] = True
        return attributes

    def _request_attributes(self, request: Request) -> dict[str, AttributeValue]:
        """Return the attributes of what the client asked for."""
        sampling = request.sampling
        attributes: dict[str, AttributeValue] = {
            "gen_ai.request.stream": self.is_streamed,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
        }
        if request.max_tokens >= 0:
            attributes["gen_ai.request.max_tokens"] = request.max_tokens
        if len(self.requests) > 1:
            attributes["gen_ai.request.choice.count"] = len(self.requests)
        return attributes

    def _usage_attributes(self) -> dict[str, AttributeValue]:
        """Return the tokens of all replies, as the usage of the response sums them."""
        stats = [reply.stats for reply in self.replies]
        timings = [reply.timings for reply in self.replies]
        return {
            "gen_ai.usage.input_tokens": sum(one.n_prompt for one in stats),
            "gen_ai.usage.cache_read.input_tokens": sum(one.n_cached for one in stats),
            "gen_ai.usage.cache_creation.input_tokens": sum(one.n_written for one in stats),
            "gen_ai.usage.output_tokens": sum(one.n_predicted for one in timings),
            "gen_ai.response.finish_reasons": [
                "length" if reply.stop_type == "limit" else "stop" for reply in self.replies
            ],
            "pyctl.usage.evaluated_tokens": sum(one.n_evaluated for one in stats),
        }


def _cache_attributes(reply: Done) -> dict[str, AttributeValue]:
    """Return the source of a reply's prefix, the reason for a shorter one, and the times to the
    first token.
    """
    stats = reply.stats
    timings = reply.timings
    attributes: dict[str, AttributeValue] = {
        "pyctl.cache.source": stats.source,
        "pyctl.queue.seconds": timings.queued_ms / 1e3,
    }
    if timings.n_predicted:
        attributes["gen_ai.response.time_to_first_chunk"] = timings.first_token_ms / 1e3
    if stats.kind is not None:
        attributes["pyctl.request.kind"] = stats.kind.value
    if stats.comparison is not None and stats.comparison.section:
        attributes["pyctl.cache.differing_section"] = stats.comparison.section
    if timings.drafts.n_drafts:
        attributes["pyctl.drafts.tokens"] = timings.drafts.n_drafted
        attributes["pyctl.drafts.accepted_tokens"] = timings.drafts.n_accepted
    if timings.loop is not None:
        attributes["pyctl.reply.loop_period"] = timings.loop.period
    return attributes


def span_of(scope: Scope) -> RequestSpan:
    """Return the span of the request with ``scope``; without --otel one that is not exported."""
    span: RequestSpan = scope.get(SPAN) or RequestSpan()
    return span

"""The export of a span for each request to an OpenTelemetry collector, by OTLP over HTTP.

Only --otel imports this module, and with it the packages of the extra ``otel``. OpenTelemetry's
own variables set the rest, such as headers and the sampler; its packages read them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from urllib.parse import SplitResult

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyctl import __version__
from pyctl.errors import ConfigError
from pyctl.http_client import is_loopback
from pyctl.server.collector_settings import CollectorSettings
from pyctl.server.request_span import SPAN, RequestSpan, SpanCounts, operation_of
from pyctl.server.request_target import in_origin_form
from pyctl.settings.limit import limit

__all__ = ["CountedExporter", "LastMessage", "SpanExport", "SpanMiddleware", "parent_context"]

log = logging.getLogger(__name__)

MAX_TRACEPARENT = limit(
    128, "`traceparent` of a request", "its span has no parent", "request", "characters"
)
"""Version 00 has 55 characters; later versions may have more fields."""

MAX_TRACESTATE = limit(
    512, "`tracestate` of a request", "it is not passed on", "request", "characters"
)
"""The length that W3C's Trace Context asks servers to pass on at least."""

MAX_DESCRIPTION = 200
"""Characters of an error in a span or in the log."""

CLOSE_SECONDS = limit(
    2.0, "the end of a server that sends its last spans", "they are lost", "process", "s"
)


class SpanExport:
    """The tracer of requests and its way to the collector.

    Spans wait in a bounded queue, from which a thread of OpenTelemetry sends them: no request waits
    for a collector.
    """

    def __init__(
        self, exporter: SpanExporter, settings: CollectorSettings, counts: SpanCounts
    ) -> None:
        """Start the thread that gives spans to ``exporter``; ``counts`` has what became of them."""
        self._counts = counts
        self._is_closed = False
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(_BoundedProcessor(exporter, settings, counts))
        self._tracer = self._provider.get_tracer("pyctl", __version__)

    @classmethod
    def to_collector(cls, settings: CollectorSettings, counts: SpanCounts) -> SpanExport:
        """Start the export to a collector, and collect what OpenTelemetry logs about it. Raises
        ConfigError for other variables that OpenTelemetry does not take.
        """
        url = settings.url
        last_error = LastMessage()
        try:
            exporter = OTLPSpanExporter(endpoint=url.geturl(), session=session_for(url))
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"--otel: {error}") from error
        export = cls(CountedExporter(exporter, settings, counts, last_error), settings, counts)
        # Warnings about variables have been logged. From now on a line for each attempt to send
        # would fill the log while a collector is away, and some lines would quote clients' headers.
        library = logging.getLogger("opentelemetry")
        library.propagate = False
        library.addHandler(last_error)
        return export

    def wrap(self, app: ASGIApp, prefix: str = "") -> ASGIApp:
        """Return ``app``, whose paths start with ``prefix``, with a span for each request to a
        model.
        """
        return SpanMiddleware(app, self._tracer, prefix)

    def close(self) -> None:
        """Send the spans that wait, for at most CLOSE_SECONDS; log how many were lost.
        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        # The provider itself would wait for 30 seconds.
        thread = threading.Thread(target=self._provider.shutdown, name="pyctl-spans", daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)
        if self._counts.n_lost:
            log.warning("%s spans were not exported", f"{self._counts.n_lost:,}")


class SpanMiddleware:
    """The middleware that makes a span of each request to a model, with its facts in the scope.

    It is outermost, so that a span starts when its request arrives, also while a model is loaded.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer, prefix: str = "") -> None:
        self._app = app
        self._tracer = tracer
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, within its span if it has one."""
        scope = in_origin_form(scope)
        operation = operation_of(scope, self._prefix)
        if operation is None:
            return await self._app(scope, receive, send)
        otel_span = self._tracer.start_span(
            operation, context=parent_context(Headers(scope=scope)), kind=SpanKind.SERVER
        )
        if not otel_span.is_recording():  # sampled out
            return await self._app(scope, receive, send)
        span = RequestSpan(operation, on_end=lambda facts: _end(otel_span, facts))

        async def send_with_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.status = message["status"]
            await send(message)

        with span.hold():
            await self._app({**scope, SPAN: span}, receive, send_with_status)


def _end(otel_span: Span, facts: RequestSpan) -> None:
    """End the span of a request with its facts."""
    otel_span.update_name(facts.name)
    otel_span.set_attributes(facts.attributes())
    if (failure := facts.failure) is not None:
        otel_span.set_status(Status(StatusCode.ERROR, failure[:MAX_DESCRIPTION]))
    otel_span.end()


PROPAGATOR = TraceContextTextMapPropagator()


def parent_context(headers: Headers) -> Context:
    """Return the context of the client's span by W3C's Trace Context; an empty one without a valid
    ``traceparent``. The lengths are checked first.
    """
    parents = headers.getlist("traceparent")
    if len(parents) != 1 or len(parents[0]) > MAX_TRACEPARENT:
        return Context()
    carrier = {"traceparent": parents[0]}
    state = ",".join(headers.getlist("tracestate"))
    if len(state) <= MAX_TRACESTATE:
        carrier["tracestate"] = state
    return PROPAGATOR.extract(carrier, Context())


class _BoundedProcessor(BatchSpanProcessor):
    """OpenTelemetry's queue of spans, which drops and counts new ones when it is full."""

    def __init__(
        self, exporter: SpanExporter, settings: CollectorSettings, counts: SpanCounts
    ) -> None:
        super().__init__(
            exporter,
            max_queue_size=settings.max_waiting,
            schedule_delay_millis=settings.delay_ms,
            max_export_batch_size=settings.max_batch,
        )
        self._counts = counts
        self._max_waiting = settings.max_waiting

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._counts.n_waiting >= self._max_waiting:
            self._counts.n_dropped += 1
            return
        self._counts.n_queued += 1
        super().on_end(span)


class CountedExporter(SpanExporter):
    """An exporter that counts spans, and logs the start and the end of an outage in a line each."""

    def __init__(
        self,
        exporter: SpanExporter,
        settings: CollectorSettings,
        counts: SpanCounts,
        last_error: LastMessage,
    ) -> None:
        self._exporter = exporter
        self._settings = settings
        self._counts = counts
        self._last_error = last_error
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch, and count its spans. Logs when the result is another than before."""
        self._counts.n_taken += len(spans)
        reason = ""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # such as a file of certificates that does not exist
            reason = str(error)
        if result is SpanExportResult.SUCCESS:
            self._counts.n_exported += len(spans)
        else:
            self._counts.n_failed += len(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            address = self._settings.shown_address
            log.warning("spans do not reach %s: %s", address, self._shown(reason))
        if self._is_failing and not is_failing:
            log.info("spans reach %s again", self._settings.shown_address)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def _shown(self, reason: str) -> str:
        """Return ``reason``, or the library's last line, without the query of the address."""
        text = reason or self._last_error.text or "no reason given"
        query = self._settings.url.query
        if query:
            text = text.replace(query, "...")
        return text[:MAX_DESCRIPTION]


class LastMessage(logging.Handler):
    """A handler that keeps the last message of OpenTelemetry's packages."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def session_for(url: SplitResult) -> requests.Session | None:
    """Return a session without a proxy for a collector on this machine; None for the default."""
    if not is_loopback(url.hostname or ""):
        return None
    session = requests.Session()
    session.trust_env = False
    return session


def _resource() -> Resource:
    """Return the description of this process: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come
    before our own names.
    """
    given = OTELResourceDetector().detect().attributes
    own = {"service.name": "pyctl", "service.version": __version__}
    return Resource.create({**own, **given})

"""The export of spans: the parent of a span, a bounded queue, outages, and the end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from starlette.datastructures import Headers
from starlette.routing import Route

from pyctl.server.collector_settings import CollectorSettings
from pyctl.server.request_span import SpanCounts
from tests.client import CHAT, HI, Client
from tests.unit.server.fake import Bench, Gate, fail, play
from tests.unit.server.parts import Caller, in_loop
from tests.waiting import until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from pyctl.errors import ConfigError, EngineError
from pyctl.server import span_export
from pyctl.server.span_export import CountedExporter, LastMessage, SpanExport, parent_context

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
VALID = f"00-{TRACE}-{PARENT}-01"

COLLECTOR = CollectorSettings(
    urlsplit("http://host:4318/v1/traces?key=secret"), max_waiting=4, max_batch=2, delay_ms=1
)


class Exporter(SpanExporter):
    """An exporter that keeps spans, fails while `error` is set, and waits while `gate` is shut."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.error: Exception | None = None
        self.result = SpanExportResult.SUCCESS
        self.gate = threading.Event()
        self.gate.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.gate.wait(300)
        if self.error is not None:
            raise self.error
        self.spans += spans
        return self.result


class Exporting:
    """An application with spans: its exporter, counts, and a client."""

    running: ClassVar[list[Exporting]] = []

    def __init__(self, bench: Bench) -> None:
        self.running.append(self)
        self.bench = bench
        self.exporter = Exporter()
        self.counts = SpanCounts()
        self.library = LastMessage()
        counted = CountedExporter(self.exporter, COLLECTOR, self.counts, self.library)
        self.export = SpanExport(counted, COLLECTOR, self.counts)
        self.app = self.export.wrap(bench.app)
        self.client = Client.to_app(self.app)

    def spans(self) -> list[ReadableSpan]:
        """Return all spans, once they are exported."""
        until(lambda: self.counts.n_exported == self.counts.n_queued)
        return self.exporter.spans


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """End the threads that a test started."""
    yield
    while Exporting.running:
        exporting = Exporting.running.pop()
        exporting.exporter.gate.set()
        exporting.export.close()


@pytest.fixture
def exporting() -> Exporting:
    return Exporting(Bench(play("a", "b")))


def ask(client: Client, n: int = 1) -> None:
    for _ in range(n):
        client.chat(HI)


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["no parent"],
        [VALID[:-1]],
        [VALID.upper()],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"ff-{TRACE}-{PARENT}-01"],
        [f"01-{TRACE}-{PARENT}-01-{'x' * 200}"],
        ["0" * 60_000],
        [VALID, VALID],
    ],
)
def test_an_invalid_traceparent_is_no_parent(given: list[str]) -> None:
    headers = Headers(raw=[(b"traceparent", value.encode()) for value in given])
    assert not get_current_span(parent_context(headers)).get_span_context().is_valid


def test_a_valid_traceparent_is_the_parent() -> None:
    parent = get_current_span(parent_context(Headers({"traceparent": VALID}))).get_span_context()
    assert f"{parent.trace_id:032x}" == TRACE
    assert f"{parent.span_id:016x}" == PARENT
    assert parent.is_remote


@pytest.mark.parametrize(("length", "n_members"), [(500, 1), (600, 0)])
def test_a_long_tracestate_is_not_passed_on(length: int, n_members: int) -> None:
    members = "v=" + "x" * 250
    headers = Headers({"traceparent": VALID, "tracestate": members.ljust(length, ",")})
    parent = get_current_span(parent_context(headers)).get_span_context()
    assert parent.is_valid
    assert len(parent.trace_state) == n_members


def test_a_reply_is_one_span_of_a_server(exporting: Exporting) -> None:
    ask(exporting.client)
    (span,) = exporting.spans()
    assert span.name == "chat toy-1"
    assert span.kind is SpanKind.SERVER
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.status.status_code is StatusCode.UNSET


def test_requests_that_need_no_model_have_no_span(exporting: Exporting) -> None:
    exporting.client.get("/health")
    exporting.client.post("/tokenize", {"content": "a"})
    exporting.client.options(CHAT)
    ask(exporting.client)
    assert len(exporting.spans()) == 1


def test_every_endpoint_that_generates_has_spans(exporting: Exporting) -> None:
    """All endpoints get a body that each API accepts; those that reach the engine are compared."""
    fields = {"messages": HI, "input": "a", "input_prefix": "a", "max_tokens": 1}
    handles = exporting.bench.worker.handles
    counts = exporting.counts
    generating = set()
    without_span = set()
    for route in exporting.bench.app.routes:
        if not isinstance(route, Route) or "POST" not in (route.methods or ()):
            continue
        n_handles = len(handles)
        n_spans = counts.n_queued + counts.n_dropped
        # The Responses API refuses `prompt`, which the others need.
        prompt = {} if "responses" in route.path else {"prompt": "a"}
        exporting.client.post(route.path, {**fields, **prompt})
        if len(handles) > n_handles:
            generating.add(route.path)
            if counts.n_queued + counts.n_dropped == n_spans:
                without_span.add(route.path)
    assert {CHAT, "/completion", "/v1/messages", "/v1/responses", "/api/generate"} <= generating
    assert without_span <= {"/cache/prewarm", "/cache/warm"}, "these prepare a cache for no reply"


def test_a_target_in_absolute_form_has_a_span(exporting: Exporting) -> None:
    caller = Caller(exporting.app, f"http://host{CHAT}", {"messages": HI})
    asyncio.run(caller.call())
    assert caller.sent[0]["status"] == 200
    assert [span.name for span in exporting.spans()] == ["chat toy-1"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_engine_is_an_error(stream: bool) -> None:
    """It is one whether the status says so, or an event of a stream that has begun."""
    exporting = Exporting(Bench(fail(EngineError("the device is lost"), "a")))
    exporting.client.post(CHAT, {"messages": HI, "stream": stream})
    (span,) = exporting.spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "the device is lost"
    assert span.attributes is not None
    assert span.attributes["error.type"] == "EngineError"


@in_loop
async def test_the_span_of_a_kept_stream_ends_with_its_reply() -> None:
    """Its client leaves before; the usage is that of the whole reply."""
    gate = Gate(threading.Event())

    def script(request: Any) -> Any:
        first, *rest = play("One ", "two ", "three")(request)
        yield from (first, gate, *rest)

    exporting = Exporting(Bench(script))
    body = {"messages": HI, "stream": True}
    caller = Caller(exporting.app, CHAT, body, {"x-conversation-id": "mine"})
    call = asyncio.ensure_future(caller.call())
    await caller.until(lambda: len(caller.sent) >= 1)
    caller.gone.set()
    await call
    assert exporting.counts.n_queued == 0
    gate.opened.set()
    await caller.until(lambda: exporting.counts.n_queued == 1)
    (span,) = exporting.spans()
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert "pyctl.request.cancelled" not in span.attributes


def test_a_full_queue_drops_and_counts_new_spans(exporting: Exporting) -> None:
    """Two spans are on their way to a collector that does not answer, four wait."""
    exporting.exporter.gate.clear()
    ask(exporting.client, 2)
    until(lambda: exporting.counts.n_taken > 0)
    n_taken = exporting.counts.n_taken
    ask(exporting.client, 10)
    assert exporting.counts.n_waiting == 4
    assert exporting.counts.n_dropped == 12 - n_taken - 4
    exporting.exporter.gate.set()
    assert len(exporting.spans()) == n_taken + 4


def refuse(exporting: Exporting) -> None:
    """Let the collector refuse spans, which OpenTelemetry logs."""
    exporting.exporter.result = SpanExportResult.FAILURE
    exporting.library.emit(logging.makeLogRecord({"msg": "Failed: 403 at /?key=secret"}))


def break_off(exporting: Exporting) -> None:
    """Let the exporter itself fail."""
    exporting.exporter.error = OSError("no such certificate, ?key=secret")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(refuse, "Failed: 403 at /?..."), (break_off, "no such certificate, ?...")],
)
def test_an_outage_is_two_lines(
    harm: Callable[[Exporting], None],
    reason: str,
    exporting: Exporting,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log names the reason once, however many batches fail, and no key of the address."""
    caplog.set_level(logging.INFO, span_export.__name__)
    harm(exporting)
    for n in range(1, 4):
        ask(exporting.client)
        until(lambda n=n: exporting.counts.n_failed == n)
    exporting.exporter.error = None
    exporting.exporter.result = SpanExportResult.SUCCESS
    ask(exporting.client, 2)
    until(lambda: exporting.counts.n_exported == 2)
    until(lambda: len(caplog.messages) == 2)
    assert caplog.messages == [
        f"spans do not reach http://host:4318/v1/traces: {reason}",
        "spans reach http://host:4318/v1/traces again",
    ]


def test_the_end_sends_the_spans_that_wait(exporting: Exporting) -> None:
    exporting.exporter.gate.clear()
    ask(exporting.client, 3)
    exporting.exporter.gate.set()
    exporting.export.close()
    assert len(exporting.exporter.spans) == 3


def test_the_end_does_not_wait_for_a_silent_collector(
    exporting: Exporting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(span_export, "CLOSE_SECONDS", 0.01)
    exporting.exporter.gate.clear()
    ask(exporting.client, 3)
    exporting.export.close()
    exporting.export.close()
    assert caplog.messages == ["3 spans were not exported"]


def test_a_variable_that_opentelemetry_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "absent")
    with pytest.raises(ConfigError, match=r"--otel: .*absent"):
        SpanExport.to_collector(COLLECTOR, SpanCounts())


@pytest.mark.parametrize(
    ("host", "is_direct"), [("127.0.0.1", True), ("localhost", True), ("otel.lan", False)]
)
def test_no_proxy_stands_before_a_collector_on_this_machine(host: str, is_direct: bool) -> None:
    session = span_export.session_for(urlsplit(f"http://{host}:4318/v1/traces"))
    assert (session is not None and not session.trust_env) == is_direct

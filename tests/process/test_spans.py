"""A span of each request, from a server in a process to a collector that decodes OTLP."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest

from tests.client import CHAT
from tests.process.conftest import Server, free_port, pyctl
from tests.waiting import until
from tests.web_server import Handler, web_server

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
LONG = [{"role": "user", "content": "The harbour is closed at night. " * 20}]

ABSENT = "import sys; sys.modules['opentelemetry.exporter'] = None"
"""Statements that make an installed package look absent."""


class Span:
    """A decoded span."""

    def __init__(self, span: OtlpSpan) -> None:
        self.span = span
        self.name = span.name
        self.attributes = {item.key: _value(item.value) for item in span.attributes}


def _value(value: Any) -> Any:
    """Return the Python value of OTLP's AnyValue."""
    name = value.WhichOneof("value")
    if name == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, name)


class Collector:
    """A collector of spans at ``url``, with all that it received."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.paths: set[str] = set()

    def receive(self, path: str, body: bytes) -> None:
        """Decode a request of an exporter."""
        self.paths.add(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {item.key: _value(item.value) for item in resource.resource.attributes}
            self.services.add(names["service.name"])
            for scope in resource.scope_spans:
                self.spans += map(Span, scope.spans)

    def next(self) -> Span:
        """Return the span that comes next, and forget it."""
        until(lambda: self.spans)
        return self.spans.pop(0)


@contextmanager
def running() -> Iterator[Collector]:
    """Yield a collector that accepts everything."""
    collector = Collector()

    class Receiver(Handler):
        def do_POST(self) -> None:
            collector.receive(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send(200, b"")

    with web_server(Receiver) as url:
        collector.url = url
        yield collector


def exporting(url: str) -> str:
    """Return the statements that let a server export each span at once to ``url``."""
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_BSP_SCHEDULE_DELAY": "20",
    }
    return f"import os; os.environ.update({variables!r})"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], collector: Collector) -> Server:
    return start("tiny-hybrid", "--otel", "--metrics", before=exporting(collector.url))


def test_a_span_has_the_usage_of_its_reply(server: Server, collector: Collector) -> None:
    """Its times enclose the work, and its names are those of OpenTelemetry's conventions."""
    began = time.time_ns()
    reply = server.client.chat(LONG, max_tokens=6, temperature=0.5, seed=1)
    ended = time.time_ns()
    span = collector.next()
    usage = reply.body["usage"]
    assert span.name == f"chat {reply.body['model']}"
    assert span.span.kind == OtlpSpan.SPAN_KIND_SERVER
    assert began <= span.span.start_time_unix_nano < span.span.end_time_unix_nano <= ended
    assert span.span.status.code == Status.STATUS_CODE_UNSET
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert span.attributes["gen_ai.provider.name"] == "pyctl"
    assert span.attributes["gen_ai.request.model"] == reply.body["model"]
    assert span.attributes["gen_ai.request.temperature"] == 0.5
    assert span.attributes["gen_ai.request.max_tokens"] == 6
    assert span.attributes["gen_ai.request.stream"] is False
    assert span.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert span.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert span.attributes["http.response.status_code"] == 200
    assert collector.services == {"pyctl"}
    assert collector.paths == {"/v1/traces"}


def test_a_span_has_the_kind_and_the_source_of_its_prompt(
    server: Server, collector: Collector
) -> None:
    """The second turn of a conversation continues the first one, whose rows are still live."""
    question = {"role": "user", "content": "Which boats came in today? " * 20}
    first = server.client.chat([question], max_tokens=4, temperature=0)
    opening = collector.next().attributes
    turn = [question, first.body["choices"][0]["message"], {"role": "user", "content": "And now?"}]
    second = server.client.chat(turn, max_tokens=4, temperature=0)
    append = collector.next().attributes
    assert opening["pyctl.cache.source"] == "none"
    assert append["pyctl.request.kind"] == "append"
    assert append["pyctl.cache.source"] == "live"
    assert append["gen_ai.usage.cache_read.input_tokens"] == second.timings["cache_n"] > 0
    assert append["pyctl.usage.evaluated_tokens"] == second.timings["prompt_n"]
    assert append["gen_ai.response.time_to_first_chunk"] > 0


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_a_stream_is_one_span_under_the_span_of_its_client(
    path: str, server: Server, collector: Collector
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    server.client.stream(path, {"messages": LONG, "input": "Hi", "max_tokens": 4}, headers=headers)
    span = collector.next()
    assert span.span.trace_id.hex() == TRACE
    assert span.span.parent_span_id.hex() == PARENT
    assert span.span.trace_state == "vendor=1"
    assert span.attributes["gen_ai.request.stream"] is True
    assert span.attributes["gen_ai.usage.output_tokens"] > 0


def test_a_refused_request_is_a_span_with_its_error(server: Server, collector: Collector) -> None:
    """The client has to change the request, so that the status of the span is not an error."""
    response = server.client.post(CHAT, {"messages": 3})
    span = collector.next()
    assert response.status_code == 400
    assert span.name.startswith("chat tiny-hybrid")
    assert span.attributes["http.response.status_code"] == 400
    assert span.attributes["error.type"] == "RequestError"
    assert span.span.status.code == Status.STATUS_CODE_UNSET
    assert span.span.parent_span_id == b""


def test_a_client_that_leaves_is_a_cancelled_span(server: Server, collector: Collector) -> None:
    body = {"messages": LONG, "max_tokens": 4000, "ignore_eos": True}
    with server.client.open_stream(CHAT, body) as stream:
        next(iter(stream))
    span = collector.next()
    assert span.attributes["pyctl.request.cancelled"] is True
    assert "gen_ai.usage.output_tokens" not in span.attributes


def test_metrics_count_the_spans(server: Server, collector: Collector) -> None:
    server.client.chat(LONG, max_tokens=1)
    collector.next()
    until(lambda: "\npyctl_spans_waiting 0\n" in server.client.get("/metrics").text)
    text = server.client.get("/metrics").text
    assert 'pyctl_spans_total{result="failed"} 0\n' in text
    assert 'pyctl_spans_total{result="dropped"} 0\n' in text
    assert 'pyctl_spans_total{result="exported"} 0\n' not in text


def test_the_last_spans_are_sent_at_the_end(start: Callable[..., Server]) -> None:
    with running() as collector:
        environment = f"import os; os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = {collector.url!r}"
        server = start("tiny-hybrid", "--otel", before=environment)
        server.client.chat(LONG, max_tokens=1)
        assert collector.spans == [], "the next batch is due in 5 seconds"
        assert server.stop() == 0
        (span,) = collector.spans
        assert span.attributes["gen_ai.usage.output_tokens"] == 1


def test_a_collector_that_is_not_there_costs_no_reply(start: Callable[..., Server]) -> None:
    """The log has one line about it, however often the exporter tries."""
    server = start(
        "tiny-hybrid", "--otel", "--metrics", before=exporting(f"http://127.0.0.1:{free_port()}")
    )
    for n in range(1, 3):
        server.client.chat(LONG, max_tokens=1)
        until(lambda n=n: f'result="failed"}} {n}\n' in server.client.get("/metrics").text)
    assert server.client.chat(LONG, max_tokens=2).body["usage"]["completion_tokens"] == 2
    assert server.stop() == 0
    log = server.log()
    assert log.count("spans do not reach http://127.0.0.1:") == 1
    assert "3 spans were not exported" in log
    assert "Traceback" not in log


def test_a_collector_that_never_answers_costs_no_reply(start: Callable[..., Server]) -> None:
    released = Event()

    class Silent(Handler):
        def do_POST(self) -> None:
            released.wait(300)

    with web_server(Silent) as url:
        server = start("tiny-hybrid", "--otel", before=exporting(url))
        for _ in range(3):
            assert server.client.chat(LONG, max_tokens=2).body["usage"]["completion_tokens"] == 2
        assert server.stop() == 0
        released.set()
    assert "3 spans were not exported" in server.log()


def test_without_the_extra_the_flag_is_an_error_with_the_command() -> None:
    """It comes before the model is looked for."""
    code = f"{ABSENT}; import runpy; runpy.run_module('pyctl')"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", "-m", "no-such-file.gguf", "--otel"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "--otel needs OpenTelemetry: " in done.stderr
    assert "opentelemetry-exporter-otlp-proto-http" in done.stderr
    assert "no-such-file" not in done.stderr


def test_a_server_without_the_extra_serves(start: Callable[..., Server]) -> None:
    absent = f"{ABSENT}; sys.modules['opentelemetry.sdk'] = None"
    server = start("tiny-hybrid", before=absent)
    assert server.client.chat(LONG, max_tokens=2).body["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1000000"),
    ],
)
def test_a_variable_that_cannot_work_ends_the_start(name: str, value: str) -> None:
    """It does before the model is looked for."""
    done = pyctl("serve", "-m", "no-such-file.gguf", "--otel", **{name: value})
    assert done.returncode == 2
    assert f"error: --otel: {name} " in done.stderr

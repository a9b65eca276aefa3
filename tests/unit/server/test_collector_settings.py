"""OpenTelemetry's variables for the collector of spans."""

from __future__ import annotations

import pytest

from pyctl.errors import ConfigError
from pyctl.server.collector_settings import CollectorSettings


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({}, "http://localhost:4318/v1/traces"),
        ({"ENDPOINT": ""}, "http://localhost:4318/v1/traces"),
        ({"ENDPOINT": "https://otel.lan/base/"}, "https://otel.lan/base/v1/traces"),
        ({"ENDPOINT": "http://a", "TRACES_ENDPOINT": "http://b:1/x"}, "http://b:1/x"),
        ({"ENDPOINT": "http://[::1]:4318"}, "http://[::1]:4318/v1/traces"),
    ],
)
def test_the_address(variables: dict[str, str], address: str) -> None:
    environ = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()}
    settings = CollectorSettings.from_environment(environ)
    assert settings.url.geturl() == address
    assert settings.shown_address == address


def test_a_log_gets_no_secret_of_the_address() -> None:
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://me:pass@host:1/v1/traces?key=secret"}
    settings = CollectorSettings.from_environment(environ)
    assert settings.shown_address == "https://host:1/v1/traces"


def test_the_queue() -> None:
    environ = {"OTEL_BSP_MAX_QUEUE_SIZE": "100", "OTEL_BSP_SCHEDULE_DELAY": " 20 "}
    settings = CollectorSettings.from_environment(environ)
    assert settings.max_waiting == 100
    assert settings.max_batch == 100, "the default, 512, is more than the queue has"
    assert settings.delay_ms == 20


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("EXPORTER_OTLP_ENDPOINT", "localhost:4318", "must be an address"),
        ("EXPORTER_OTLP_ENDPOINT", "http://", "must be an address"),
        ("EXPORTER_OTLP_TRACES_ENDPOINT", "http://host:port", "TRACES_ENDPOINT must be an address"),
        ("EXPORTER_OTLP_ENDPOINT", "http://[::1", "must be an address"),
        ("EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
        ("EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "http/protobuf"),
        ("BSP_MAX_QUEUE_SIZE", "0", "must be a positive number"),
        ("BSP_MAX_QUEUE_SIZE", "9" * 5000, "must be a positive number"),
        ("BSP_MAX_EXPORT_BATCH_SIZE", "4096", "above OTEL_BSP_MAX_QUEUE_SIZE, 2048"),
        ("BSP_SCHEDULE_DELAY", "-1", "must be a positive number"),
    ],
)
def test_a_variable_that_cannot_work_is_an_error(name: str, value: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        CollectorSettings.from_environment({f"OTEL_{name}": value})

"""The OpenTelemetry collector of --otel, from OpenTelemetry's own variables.

The variables are checked before a model is loaded, and without OpenTelemetry's packages. Those that
are not here, such as OTEL_EXPORTER_OTLP_HEADERS, are left to the packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from pyctl.errors import ConfigError
from pyctl.settings.limit import limit

__all__ = ["CollectorSettings"]

DEFAULT_ENDPOINT = "http://localhost:4318"
"""OpenTelemetry's address of a collector, without the path."""

MAX_WAITING = limit(
    2048, "spans that wait for the collector", "the newest are dropped and counted", "memory"
)
"""OpenTelemetry's default of OTEL_BSP_MAX_QUEUE_SIZE."""

MAX_BATCH = 512
"""OpenTelemetry's default of OTEL_BSP_MAX_EXPORT_BATCH_SIZE."""

DELAY_MS = 5000
"""OpenTelemetry's default of OTEL_BSP_SCHEDULE_DELAY."""


@dataclass(frozen=True)
class CollectorSettings:
    """The collector, and the queue of spans for it.

    Attributes:
        url: The address that spans are posted to.
        max_waiting: The maximum number of spans that wait.
        max_batch: The maximum number of spans that are sent together.
        delay_ms: The milliseconds from one batch to the next.
    """

    url: SplitResult
    max_waiting: int = MAX_WAITING
    max_batch: int = MAX_BATCH
    delay_ms: int = DELAY_MS

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> CollectorSettings:
        """Return the settings that ``environ`` has, or the defaults. Raises ConfigError for an
        address, a protocol or a number that cannot work.
        """
        protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "")
        protocol = protocol or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
        if protocol not in ("", "http/protobuf"):
            raise ConfigError(
                f"--otel exports by http/protobuf, OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}"
            )
        max_waiting = _positive(environ, "OTEL_BSP_MAX_QUEUE_SIZE", MAX_WAITING)
        max_batch = _positive(
            environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", min(MAX_BATCH, max_waiting)
        )
        if max_batch > max_waiting:
            raise ConfigError(
                f"--otel: OTEL_BSP_MAX_EXPORT_BATCH_SIZE is {max_batch}, above "
                f"OTEL_BSP_MAX_QUEUE_SIZE, {max_waiting}"
            )
        delay_ms = _positive(environ, "OTEL_BSP_SCHEDULE_DELAY", DELAY_MS)
        return cls(_address(environ), max_waiting, max_batch, delay_ms)

    @property
    def shown_address(self) -> str:
        """The address for a log: without a password, and without keys in a query."""
        return f"{self.url.scheme}://{_host(self.url)}{self.url.path}"


def _address(environ: Mapping[str, str]) -> SplitResult:
    """Return the address for traces, or else the one for all signals with OTLP's path."""
    name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    text = environ.get(name, "")
    if not text:
        name = "OTEL_EXPORTER_OTLP_ENDPOINT"
        base = environ.get(name, "") or DEFAULT_ENDPOINT
        text = f"{base.rstrip('/')}/v1/traces"
    try:
        url = urlsplit(text)
        is_address = url.scheme in ("http", "https") and bool(_host(url))
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"--otel: {name} must be an address such as {DEFAULT_ENDPOINT}")
    return url


def _host(url: SplitResult) -> str:
    """Return host and port of ``url``. Raises ValueError for a port that is no number."""
    name = url.hostname or ""
    host = f"[{name}]" if ":" in name else name
    return host if url.port is None or not host else f"{host}:{url.port}"


def _positive(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return the positive integer of a variable. Raises ConfigError for any other text."""
    text = environ.get(name, "").strip() or str(default)
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    if not is_number or int(text) == 0:
        raise ConfigError(f"--otel: {name} must be a positive number, not {text[:40]!r}")
    return int(text)

"""The export of spans, if --otel asks for it. Its packages are an extra."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pyctl.errors import ConfigError
from pyctl.processes.install_command import install_command
from pyctl.server.collector_settings import CollectorSettings
from pyctl.server.server_settings import ServerSettings

if TYPE_CHECKING:
    from pyctl.server.app_state import AppState
    from pyctl.server.span_export import SpanExport

__all__ = ["check_spans", "open_spans"]

REQUIREMENT = "opentelemetry-exporter-otlp-proto-http>=1.28"
"""The exporter, which brings OpenTelemetry's other packages; `mcp` needs this version of them."""


def check_spans(settings: ServerSettings) -> None:
    """Raise ConfigError if --otel cannot work: for a missing package, with the command that
    installs it, and for OpenTelemetry's variables.
    """
    if not settings.otel:
        return
    try:
        is_there = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ImportError:  # of a package above it
        is_there = False
    if not is_there:
        raise ConfigError(f"--otel needs OpenTelemetry: {install_command(REQUIREMENT)}")
    CollectorSettings.from_environment(os.environ)


def open_spans(shared: AppState) -> SpanExport | None:
    """Return the export of spans; None without --otel. Raises ConfigError for variables that
    OpenTelemetry's packages refuse; the others have been checked.
    """
    if not shared.settings.otel:
        return None
    # 0.3 seconds, in which llama.cpp loads the model.
    from pyctl.server.span_export import SpanExport

    collector = CollectorSettings.from_environment(os.environ)
    return SpanExport.to_collector(collector, shared.span_counts)

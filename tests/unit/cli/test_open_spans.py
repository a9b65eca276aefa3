"""The checks of --otel before a model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyctl.cli.open_spans import REQUIREMENT, check_spans, open_spans
from pyctl.errors import ConfigError
from pyctl.server.app_state import AppState
from pyctl.server.server_settings import ServerSettings

ROOT = Path(__file__).resolve().parents[3]
OTEL = ServerSettings(otel=True)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the exporter, which another test of this process may have imported."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)


@pytest.mark.usefixtures("absent")
def test_a_missing_package_is_an_error_with_the_command() -> None:
    with pytest.raises(ConfigError, match=r"--otel needs OpenTelemetry: .*opentelemetry-exporter"):
        check_spans(OTEL)


@pytest.mark.usefixtures("absent")
def test_without_the_flag_nothing_is_missing() -> None:
    check_spans(ServerSettings())
    assert open_spans(AppState(ServerSettings())) is None


def test_variables_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT must be an address"):
        check_spans(OTEL)


def test_the_command_installs_what_the_extra_has() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'otel = ["{REQUIREMENT}"]\n' in text

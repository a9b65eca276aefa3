"""Configurations of MCP servers, and the package that they need."""

from __future__ import annotations

import json
import re

import pytest

from pyctl.errors import ConfigError
from pyctl.mcp import ToolSettings, mcp_servers
from pyctl.processes.install_command import install_command


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nonsense", "not JSON"),
        ("{}", "mcpServers"),
        ('{"mcpServers": {"a": 5}}', "not an object"),
        ('{"mcpServers": {"a": {"command": "x", "args": [1]}}}', "texts only"),
        ('{"mcpServers": {"a": {"command": "x", "timeout_ms": 0}}}', "whole number from 1"),
        ('{"mcpServers": {"a": {"command": ["x"]}}}', "'command' is not a text"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_said(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        mcp_servers(text)


def test_without_the_package_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyctl.mcp.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(install_command("mcp>=2,<3"))):
        ToolSettings(mcp_config=mcp_servers(json.dumps({"mcpServers": {"a": {"command": "b"}}})))

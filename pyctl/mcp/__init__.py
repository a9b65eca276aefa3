"""Tools that MCP servers run for a model. Their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from pyctl.errors import ConfigError
from pyctl.processes.install_command import install_command
from pyctl.settings.convert import file_text, json_object
from pyctl.settings.limit import limit
from pyctl.settings.setting import TOOLS

__all__ = ["McpServer", "ToolSettings", "bounded"]

_MCP_MS = 30_000
_LONGEST_MS = 24 * 3600 * 1000
_RESULT_CHARS = limit(256 << 10, "text of a result of a tool", "truncated", "reply", "characters")


def bounded(text: str) -> str:
    """Return the text of a result for a model: of limited length, and without lone surrogates."""
    if len(text) > _RESULT_CHARS:
        text = text[:_RESULT_CHARS] + "\n[output truncated]"
    return text.encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class McpServer:
    """A program that offers tools over its standard streams.

    ``env`` is added to the variables of `child_environment`; ``cwd`` is empty for this process's
    directory. A call of a tool may take ``timeout_ms``.
    """

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    timeout_ms: int = _MCP_MS


def mcp_servers(text: str) -> tuple[McpServer, ...]:
    """Return MCP servers from JSON: {"mcpServers": {NAME: {"command": ..., "args": [...]}}}. Raises
    ValueError.
    """
    listed = json_object(text).get("mcpServers")
    if not isinstance(listed, dict):
        raise ValueError('no object "mcpServers"')
    return tuple(_mcp_server(name, entry) for name, entry in listed.items())


def _mcp_server(name: str, given: Any) -> McpServer:
    """Return the server ``name`` from its entry in the JSON. Raises ValueError, which names the
    member.
    """

    def typed(key: str, kind: type, otherwise: Any) -> Any:
        value = given.get(key, otherwise)
        if not isinstance(value, kind) or (
            isinstance(value, int) and (value is True or not 0 < value <= _LONGEST_MS)
        ):
            raise ValueError(f"MCP server {name!r}: {key!r} is not {_KINDS[kind]}")
        return value

    if not isinstance(given, dict):
        raise ValueError(f"MCP server {name!r} is not an object")
    command = typed("command", str, "")
    args = typed("args", list, [])
    env = typed("env", dict, {})
    if not all(isinstance(item, str) for item in (*args, *env.values())):
        raise ValueError(f"MCP server {name!r}: 'args' and 'env' hold texts only")
    return McpServer(
        name, command, tuple(args), env, typed("cwd", str, ""), typed("timeout_ms", int, _MCP_MS)
    )


_KINDS = {
    str: "a text",
    list: "a list",
    dict: "an object",
    int: f"a whole number from 1 to {_LONGEST_MS}",
}


def mcp_servers_file(text: str) -> tuple[McpServer, ...]:
    """Return the servers of a file of MCP servers (JSON)."""
    return mcp_servers(file_text(text))


@dataclass(frozen=True)
class ToolSettings:
    """The MCP servers whose tools the model gets; none by default.

    Of two MCP servers of one name the first counts, the file's before the other. Raises ConfigError
    without mcp.
    """

    mcp_config: tuple[McpServer, ...] = TOOLS.flag(
        (),
        "--mcp-servers-config",
        "file of MCP servers (JSON) whose tools to run",
        mcp_servers_file,
        "LLAMA_ARG_MCP_SERVERS_CONFIG",
        "FILE",
    )
    mcp_json: tuple[McpServer, ...] = TOOLS.flag(
        (),
        "--mcp-servers-json",
        "MCP servers as JSON, likewise",
        mcp_servers,
        "LLAMA_ARG_MCP_SERVERS_JSON",
        "JSON",
    )

    def __post_init__(self) -> None:
        if self.mcp_servers and find_spec("mcp") is None:
            raise ConfigError(f"MCP servers need the package mcp: {install_command('mcp>=2,<3')}")

    @property
    def mcp_servers(self) -> tuple[McpServer, ...]:
        """The servers of both flags, each name once."""
        servers: dict[str, McpServer] = {}
        for server in (*self.mcp_config, *self.mcp_json):
            servers.setdefault(server.name, server)
        return tuple(servers.values())

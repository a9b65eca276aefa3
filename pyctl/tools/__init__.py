"""Tools that this process runs for a model: built-in ones, and those of MCP servers. Their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from pyctl.convert import file_text, json_object, words
from pyctl.errors import ConfigError
from pyctl.setting import TOOLS

__all__ = ["BUILT_IN", "McpServer", "ToolSettings"]

BUILT_IN = (
    "read_file",
    "file_glob_search",
    "grep_search",
    "exec_shell_command",
    "write_file",
    "edit_file",
    "get_info",
)
"""Names of the built-in tools."""

_MCP_MS = 30_000


@dataclass(frozen=True)
class McpServer:
    """A program that offers tools over its standard streams.

    ``env`` is added to the variables of this process; ``cwd`` is empty for this process's directory. A call of a tool
    may take ``timeout_ms``.
    """

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    timeout_ms: int = _MCP_MS


def tool_names(text: str) -> tuple[str, ...]:
    """Names of built-in tools, or ``all``."""
    found = words(text)
    for name in found:
        if name not in (*BUILT_IN, "all"):
            raise ValueError(f"unknown tool {name!r}; available tools: all, {', '.join(BUILT_IN)}")
    return BUILT_IN if "all" in found else tuple(name for name in BUILT_IN if name in found)


def mcp_servers(text: str) -> tuple[McpServer, ...]:
    """MCP servers as JSON: {"mcpServers": {NAME: {"command": ..., "args": [...]}}}."""
    listed = json_object(text).get("mcpServers")
    if not isinstance(listed, dict):
        raise ValueError('no object "mcpServers"')
    return tuple(_mcp_server(name, given) for name, given in listed.items())


def _mcp_server(name: str, given: Any) -> McpServer:
    def typed(key: str, kind: type, otherwise: Any) -> Any:
        value = given.get(key, otherwise)
        if not isinstance(value, kind) or (isinstance(value, int) and (value is True or value <= 0)):
            raise ValueError(f"MCP server {name!r}: {key!r} is not {_KINDS[kind]}")
        return value

    if not isinstance(given, dict):
        raise ValueError(f"MCP server {name!r} is not an object")
    command, args, env = typed("command", str, ""), typed("args", list, []), typed("env", dict, {})
    if not all(isinstance(item, str) for item in (*args, *env.values())):
        raise ValueError(f"MCP server {name!r}: 'args' and 'env' hold texts only")
    return McpServer(name, command, tuple(args), env, typed("cwd", str, ""), typed("timeout_ms", int, _MCP_MS))


_KINDS = {str: "a text", list: "a list", dict: "an object", int: "a whole number above 0"}


def mcp_servers_file(text: str) -> tuple[McpServer, ...]:
    """A file of MCP servers (JSON)."""
    return mcp_servers(file_text(text))


@dataclass(frozen=True)
class ToolSettings:
    """The tools that this process runs; none by default.

    Of two MCP servers of one name the first counts, that of the file before the other.
    """

    built_in: tuple[str, ...] = TOOLS.flag(
        (),
        "--tools",
        f"built-in tools to run for the model, comma-separated, or all: {', '.join(BUILT_IN)}",
        tool_names,
        "LLAMA_ARG_TOOLS",
        "NAMES",
    )
    agent: bool = TOOLS.flag(
        False, "-ag --agent", "run all built-in tools", None, "LLAMA_ARG_AGENT", off="-no-ag --no-agent"
    )
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
            raise ConfigError("MCP servers need the package mcp: pip install 'pyctl[tools]'")

    @property
    def names(self) -> tuple[str, ...]:
        """The built-in tools."""
        return BUILT_IN if self.agent else self.built_in

    @property
    def mcp_servers(self) -> tuple[McpServer, ...]:
        """The servers of both flags, each name once."""
        found: dict[str, McpServer] = {}
        for server in (*self.mcp_config, *self.mcp_json):
            found.setdefault(server.name, server)
        return tuple(found.values())

    @property
    def is_wanted(self) -> bool:
        """Whether there are tools."""
        return bool(self.names or self.mcp_servers)

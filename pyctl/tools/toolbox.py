"""The tools of this process by their names: their definitions for a model, and their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pyctl.errors import NotFoundError
from pyctl.tools import ToolSettings
from pyctl.tools.files import MOST_FOUND, READ_BYTES
from pyctl.tools.files_process import run_file_tool
from pyctl.tools.shell import SHELL_SECONDS, OnChunk, exec_shell_command, get_info

if TYPE_CHECKING:  # the package mcp may be missing
    from pyctl.tools.mcp_client import McpClient, McpTool

__all__ = ["RunnableTool", "ToolBox"]

Run = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Runs a tool with its parameters; blocks, and may raise RequestError for these."""


@dataclass(frozen=True)
class RunnableTool:
    """A tool; ``writes`` if it may change something, ``in_cwd`` if relative paths mean something to it.

    ``stream`` runs it with its output as it comes.
    """

    name: str
    title: str
    description: str
    schema: Mapping[str, Any]
    run: Run
    writes: bool = False
    in_cwd: bool = True
    kind: str = "server"
    stream: Callable[[Mapping[str, Any], OnChunk], object] | None = None

    def definition(self) -> dict[str, Any]:
        """In OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.schema)}
        return {"type": "function", "function": function}

    def for_client(self) -> dict[str, Any]:
        """As GET /tools shows it."""
        return {
            "display_name": self.title,
            "tool": self.name,
            "type": self.kind,
            "permissions": {"write": self.writes},
            "uses_cwd": self.in_cwd,
            "definition": self.definition(),
        }


def _schema(required: str = "", **properties: tuple[str, str]) -> dict[str, Any]:
    """A schema of an object; each property is a type and a description."""
    shown = {name: {"type": kind, "description": text} for name, (kind, text) in properties.items()}
    return {"type": "object", "properties": shown, **({"required": required.split()} if required else {})}


_GLOB = "a glob without / fits names in every directory, one with / fits paths, ** any directories"

_EDITS = {
    "type": "array",
    "description": "Replacements, all of them in the text as it is now",
    "items": _schema(
        "old_text new_text",
        old_text=("string", "Text to replace, to the letter; it must be in the file once"),
        new_text=("string", "Text in its place"),
    ),
}


def _readers() -> tuple[RunnableTool, ...]:
    return (
        _file_tool(
            "read_file",
            "Read file",
            f"Read a text file, or a range of its lines. At most {READ_BYTES >> 10} KiB at once.",
            _schema(
                "path",
                path=("string", "Path of the file"),
                start_line=("integer", "First line, from 1 (default 1)"),
                end_line=("integer", "Last line, included (default -1: to the end)"),
                append_loc=("boolean", "Put the number of each line before it"),
            ),
        ),
        _file_tool(
            "file_glob_search",
            "File search",
            f"Find files below a directory by a glob: {_GLOB}. Files that git ignores are left out, and what is in"
            " directories such as node_modules or build.",
            _schema(
                "path",
                path=("string", "Directory to look in"),
                include=("string", "Glob of paths to list (default **)"),
                exclude=("string", "Glob of paths to leave out"),
                type=("string", "What to list: file (default), dir or all"),
                max_depth=("integer", "Levels of directories, 1 is the directory itself (default 0: all)"),
                limit=("integer", f"Most paths to list, up to {MOST_FOUND} (the default)"),
            ),
        ),
        _file_tool(
            "grep_search",
            "Grep search",
            f"Find lines in a file, or in the files below a directory. In include and exclude, {_GLOB}. Files that git"
            " ignores are left out.",
            _schema(
                "path pattern",
                path=("string", "File or directory to search"),
                pattern=("string", "Python regular expression, or a text if literal is true"),
                include=("string", "Glob of files to search (default **)"),
                exclude=("string", "Glob of files to leave out"),
                return_line_numbers=("boolean", "Show the number of each line"),
                literal=("boolean", "The pattern is a text"),
                ignore_case=("boolean", "Take small and capital letters for the same"),
                context_lines=("integer", "Lines to show before and after each match (default 0)"),
            ),
        ),
        RunnableTool("get_info", "System info", "The operating system and the current directory.", _schema(), get_info),
    )


def _writers() -> tuple[RunnableTool, ...]:
    edits = _schema("path edits", path=("string", "Path of the file"))
    edits["properties"]["edits"] = _EDITS
    return (
        RunnableTool(
            "exec_shell_command",
            "Run a shell command",
            "Run a command with sh. The result is what it printed, and its exit code.",
            _schema(
                "command",
                command=("string", "The command"),
                timeout=("integer", f"Seconds until it is killed, up to {SHELL_SECONDS} (default 10)"),
                max_output_size=("integer", "Most bytes of output to return"),
            ),
            exec_shell_command,
            writes=True,
            stream=exec_shell_command,
        ),
        _file_tool(
            "write_file",
            "Write file",
            "Write a file, which is created or replaced, with the directories that lead to it.",
            _schema("path content", path=("string", "Path of the file"), content=("string", "All of its text")),
            writes=True,
        ),
        _file_tool(
            "edit_file",
            "Edit file",
            "Replace texts in a file. Each must be in it once; texts that overlap belong into one edit.",
            edits,
            writes=True,
        ),
    )


def _file_tool(
    name: str, title: str, description: str, schema: Mapping[str, Any], writes: bool = False
) -> RunnableTool:
    return RunnableTool(name, title, description, schema, partial(run_file_tool, name), writes)


@dataclass
class ToolBox:
    """The tools that ``settings`` name. `start` begins to ask MCP servers for theirs, `wait` waits until all answered.

    Any thread may call tools.
    """

    settings: ToolSettings = field(default_factory=ToolSettings)
    _tools: dict[str, RunnableTool] = field(default_factory=dict)
    _mcp: McpClient | None = None

    def start(self) -> None:
        """Make the tools ready that are there without asking; returns at once."""
        built_in = {tool.name: tool for tool in (*_readers(), *_writers())}
        self._tools = {name: built_in[name] for name in self.settings.names}
        if self.settings.mcp_servers:
            from pyctl.tools.mcp_client import McpClient

            self._mcp = McpClient(self.settings.mcp_servers)
            self._mcp.start()

    def wait(self) -> None:
        """Add the tools of MCP servers; of two that have the same name the first counts."""
        if self._mcp is not None:
            for found in self._mcp.tools():
                name = f"{found.server}_{found.name}"
                self._tools.setdefault(name, _mcp_tool(name, found, self._mcp))

    def close(self) -> None:
        """End the MCP servers, and calls of their tools."""
        if self._mcp is not None:
            self._mcp.close()

    def __iter__(self) -> Any:
        return iter(tuple(self._tools.values()))

    def __bool__(self) -> bool:
        return self.settings.is_wanted

    def named(self, name: str) -> RunnableTool:
        """The tool ``name``. Raises NotFoundError."""
        if (tool := self._tools.get(name)) is None:
            raise NotFoundError(f"unknown tool {name[:100]!r}")
        return tool


def _mcp_tool(name: str, found: McpTool, client: McpClient) -> RunnableTool:
    def run(params: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: value for key, value in params.items() if key != "cwd"}
        return client.call(found.server, found.name, given).result()

    return RunnableTool(
        name, name, found.description, found.schema, run, not found.reads_only, in_cwd=False, kind="mcp"
    )

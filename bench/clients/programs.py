"""The programs of `make clients` that are driven here, and the turns of their sessions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.clients.fields import MESSAGES, RESPONSES
from pyctl.model_files import builtin_model
from tools.generator import TINY_HYBRID, read_vocab, write_model

__all__ = ["CLIENTS", "PROGRAMS", "Program", "Turn", "write_words_model"]

CLIENTS = Path(__file__).resolve().parents[2] / ".venv" / "clients"
"""The folder in which `make clients` installs programs and SDKs."""

_NOTED = {"grammar": 'root ::= "Noted."'}
"""The field that makes a text the only reply."""

_THINKING_TOKENS = 8
"""The maximum tokens of reasoning before a call: a model of random weights ends none by itself."""


@dataclass(frozen=True)
class Turn:
    """A command of a user in a session.

    Attributes:
        name: The name in the table.
        arguments: The arguments of the program.
        prompt: The words of the user, the last argument.
        call: The tool that the model calls, and its arguments; None for a reply without a call.
        restarts: Whether the server is started again before the turn.
    """

    name: str
    arguments: tuple[str, ...]
    prompt: str
    call: tuple[str, Mapping[str, Any]] | None = None
    restarts: bool = False


@dataclass(frozen=True)
class Program:
    """A program, with the turns of its session.

    Attributes:
        package: The name of its package on npm.
        endpoint: The path of the API that it uses.
        turns: The turns.
        environment: Variables that keep it from requests to other servers.
    """

    package: str
    endpoint: str
    turns: tuple[Turn, ...]
    environment: Mapping[str, str]

    def version(self) -> str:
        """Return the installed version, empty if it is not installed."""
        path = CLIENTS / "node_modules" / self.package / "package.json"
        return str(json.loads(path.read_text())["version"]) if path.is_file() else ""

    def binding(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that bind the reply to a request: the call of the turn, or a text after
        its result.
        """
        if path != self.endpoint:
            return {}
        tools = body.get("tools")
        if not tools:
            return _NOTED
        last = json.dumps(_last_message(body.get("messages") or body.get("input")))
        # A program joins the words of several commands, of which the last one counts.
        begun = [turn for turn in self.turns if turn.prompt in last]
        turn = max(begun, key=lambda turn: last.rfind(turn.prompt), default=None)
        is_answered = '"tool_result"' in last or '_call_output"' in last
        if turn is None or turn.call is None or is_answered:
            none = {"type": "none"} if self.endpoint == MESSAGES else "none"
            return {**_NOTED, "tool_choice": none}
        return self._call(*turn.call)

    def _call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields for one call of the tool ``name`` with these ``arguments``."""
        schema = {
            "type": "object",
            "properties": {key: {"enum": [value]} for key, value in arguments.items()},
            "required": list(arguments),
            "additionalProperties": False,
        }
        tool = {"type": "function", "function": {"name": name, "parameters": schema}}
        fields = {"callable_tools": [tool], "thinking_budget_tokens": _THINKING_TOKENS}
        if self.endpoint == MESSAGES:
            choice = {"type": "tool", "name": name, "disable_parallel_tool_use": True}
            return {**fields, "tool_choice": choice}
        choice = {"type": "function", "name": name}
        return {**fields, "tool_choice": choice, "parallel_tool_calls": False}


def _last_message(messages: Any) -> Any:
    """Return the last of the ``messages`` or items that is not a system message."""
    listed = messages if isinstance(messages, list) else []
    own = ("system", "developer")
    return next((each for each in reversed(listed) if each.get("role") not in own), None)


def _claude(*tools: str, resumes: bool = True) -> tuple[str, ...]:
    """Return the arguments of Claude Code up to the prompt, with the ``tools`` that need no
    permission.
    """
    allowed = ("--allowedTools", ",".join(tools)) if tools else ()
    return (*allowed, "-p", *(("-c",) if resumes else ()))


_CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_CODEX_RESUMES = (*_CODEX, "resume", "--last")

_SEARCH = {"query": "select:WebFetch,TaskStop", "max_results": 5}
_AGENT = {
    "description": "Count",
    "prompt": "Count the doors.",
    "subagent_type": "Explore",
    "run_in_background": False,
}
_PLAN = {"plan": [{"step": "Print the code", "status": "completed"}]}

PROGRAMS: Mapping[str, Program] = {
    "claude": Program(
        "@anthropic-ai/claude-code",
        MESSAGES,
        (
            Turn(
                "a command",
                _claude("Bash", resumes=False),
                "Print the code.",
                ("Bash", {"command": "echo 4711", "description": "Print"}),
            ),
            Turn("a sub-agent", _claude("Agent"), "Ask a sub-agent.", ("Agent", _AGENT)),
            Turn("`/context`", _claude(), "/context"),
            Turn(
                "after a restart",
                _claude("Bash"),
                "Print it again.",
                ("Bash", {"command": "echo 4712", "description": "Print"}),
                restarts=True,
            ),
            # The last with a call: a tool that was found joins those that may be called, and these
            # take the place of the bound ones.
            Turn("a search for tools", _claude(), "Find your tools.", ("ToolSearch", _SEARCH)),
            Turn("`/compact`", _claude(), "/compact"),
        ),
        {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    "codex": Program(
        "@openai/codex",
        RESPONSES,
        (
            Turn("a command", _CODEX, "Print the code.", ("exec_command", {"cmd": "echo 4711"})),
            Turn("a plan", _CODEX_RESUMES, "Make a plan.", ("update_plan", _PLAN)),
            Turn(
                "after a restart",
                _CODEX_RESUMES,
                "Print it again.",
                ("exec_command", {"cmd": "echo 4712"}),
                restarts=True,
            ),
        ),
        {},
    ),
}
"""The programs by the name of their executable."""


def write_words_model(path: Path) -> Sequence[str]:
    """Write the fastest model with the words of the built-in one to ``path``: one recurrent layer
    and one of attention. Return the flag that names it.
    """
    vocab = read_vocab(builtin_model())
    n_tokens = (len(vocab.tokens) // 64 + 2) * 64
    shape = replace(TINY_HYBRID, num_layers=2, attention_interval=2, vocab_size=n_tokens)
    write_model(path, shape, vocab=vocab)
    return ("-m", str(path))

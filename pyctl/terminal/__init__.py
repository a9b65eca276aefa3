"""The chat at a terminal, and its settings."""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.settings.convert import printable, server_address
from pyctl.settings.setting import CHAT

__all__ = ["TerminalSettings"]


@dataclass(frozen=True)
class TerminalSettings:
    """The command-line chat; ``url`` is empty when the model runs in this process.

    Without a terminal, the text of standard input is one prompt.
    """

    url: str = CHAT.flag(
        "",
        "--url",
        "connect to this server instead of loading a model",
        server_address,
        "PYCTL_URL",
        "URL",
    )
    api_key: str = CHAT.flag(
        "", "--api-key", "key for that server", printable, "LLAMA_API_KEY", "KEY"
    )
    prompt: str | None = CHAT.flag(
        None,
        "-p --prompt",
        "send this prompt and the text of a pipe, print the reply and exit",
        str,
        metavar="TEXT",
    )
    lines: bool = CHAT.flag(False, "--lines", "take each line of a pipe as a message or command")
    resumes: bool = CHAT.flag(False, "--continue", "continue the last chat")
    system_prompt: str = CHAT.flag(
        "", "-sys --system-prompt", "system message", str, "PYCTL_SYSTEM_PROMPT", "TEXT"
    )
    stats: bool = CHAT.flag(
        True, "--stats", "print statistics after each reply", None, "PYCTL_STATS", off="--no-stats"
    )

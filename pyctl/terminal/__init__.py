"""The chat at a terminal, and its settings."""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.convert import printable, web_address
from pyctl.setting import CHAT

__all__ = ["TerminalSettings"]


@dataclass(frozen=True)
class TerminalSettings:
    """The command-line chat; ``url`` is empty when the model runs in this process."""

    url: str = CHAT.flag(
        "", "--url", "connect to this server instead of loading a model", web_address, "PYCTL_URL", "URL"
    )
    api_key: str = CHAT.flag("", "--api-key", "key for that server", printable, "LLAMA_API_KEY", "KEY")
    prompt: str | None = CHAT.flag(
        None, "-p --prompt", "send this prompt, print the reply and exit", str, metavar="TEXT"
    )
    system_prompt: str = CHAT.flag("", "-sys --system-prompt", "system message", str, "PYCTL_SYSTEM_PROMPT", "TEXT")
    stats: bool = CHAT.flag(True, "--stats", "print statistics after each reply", None, "PYCTL_STATS", off="--no-stats")

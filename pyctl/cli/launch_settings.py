"""Settings of `pyctl launch` alone."""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.convert import web_address
from pyctl.setting import Section

__all__ = ["LAUNCH", "LaunchSettings"]

LAUNCH = Section("launch")


@dataclass(frozen=True)
class LaunchSettings:
    """``server_flags`` were typed and are for a server that is started here."""

    url: str = LAUNCH.flag(
        "",
        "--url",
        "use this server; by default the one that answers at --host and --port, else a new one",
        web_address,
        "PYCTL_URL",
        "URL",
    )
    dry_run: bool = LAUNCH.flag(False, "--dry-run", "print the environment and the command, and start nothing")
    server_flags: tuple[str, ...] = ()

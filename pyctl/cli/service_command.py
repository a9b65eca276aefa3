"""`pyctl service`: a systemd unit of the user that runs `pyctl serve` with the given flags."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyctl.atomic_file import write_atomic
from pyctl.cli.arguments import parse_serve
from pyctl.errors import ConfigError
from pyctl.module_command import module_command

__all__ = ["pyctl_command", "run_service", "unit_path", "unit_text"]

UNIT = "pyctl.service"

USAGE = """usage: pyctl service install [--print] [flags of pyctl serve]
       pyctl service status
       pyctl service remove

install  write a systemd unit of this user that runs pyctl serve with these flags, and start it
         --print: print the unit and change nothing
status   what systemd says about it
remove   stop it and remove the unit
"""

STEPS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "install": (("daemon-reload",), ("enable", UNIT), ("restart", UNIT)),
    "remove": (("disable", "--now", UNIT),),
    "removed": (("daemon-reload",),),
    "status": (("status", "--no-pager", UNIT),),
}
"""Commands of `systemctl --user`, in order."""


def run_service(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Install, show or remove the service; returns the exit code. Raises ConfigError for flags that do not work."""
    action, flags = (argv[0], list(argv[1:])) if argv else ("", [])
    if action in ("", "-h", "--help"):
        print(USAGE, end="")
        return 0 if action else 2
    if action not in ("install", "remove", "status"):
        raise ConfigError(f"unknown: pyctl service {action}; there are install, remove and status")
    path = unit_path(environ)
    if action == "install":
        return _install(path, flags, environ)
    if flags:
        raise ConfigError(f"pyctl service {action} takes no flags, not {flags[0]!r}")
    if not path.is_file():
        print(f"{path} does not exist: no service is installed")
        return 0 if action == "remove" else 3
    return _remove(path) if action == "remove" else _systemctl("status")


def pyctl_command() -> list[str]:
    """The absolute command that runs this pyctl."""
    for path in (Path(sys.argv[0]), Path(sys.executable).with_name("pyctl")):
        if path.name == "pyctl" and path.is_file() and os.access(path, os.X_OK):
            return [str(path.absolute())]
    return module_command("pyctl")


def unit_path(environ: Mapping[str, str]) -> Path:
    """Where systemd finds units of this user."""
    base = environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "systemd" / "user" / UNIT


def _install(path: Path, flags: list[str], environ: Mapping[str, str]) -> int:
    prints = "--print" in flags
    flags = [flag for flag in flags if flag != "--print"]
    # A unit has none of the variables of this shell, so none may count here.
    for warning in parse_serve(flags, {}).warnings:
        print(f"pyctl: warning: {warning}", file=sys.stderr)
    text = unit_text([*pyctl_command(), "serve", *flags], Path.cwd())
    if prints:
        print(text, end="")
        return 0
    left = [name for name in environ if name.startswith(("LLAMA_ARG_", "PYCTL_")) or name == "LLAMA_API_KEY"]
    if left:
        print(f"pyctl: warning: not set in the service: {', '.join(sorted(left))}", file=sys.stderr)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())  # mode 0600: flags may hold a key
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    print(f"wrote {path}")
    code = _systemctl("install")
    print("the log: journalctl --user -u pyctl; to run without a login: loginctl enable-linger")
    return code


def _remove(path: Path) -> int:
    code = _systemctl("remove")
    path.unlink()
    print(f"removed {path}")
    return _systemctl("removed") or code


def unit_text(command: Sequence[str], directory: Path) -> str:
    """The unit that runs ``command`` in ``directory``, to which relative paths in it refer. Raises ConfigError."""
    # The slash keeps a backslash at its end from joining the next line, and a blank from being dropped.
    return f"""\
[Unit]
Description=pyctl, a server of GGUF models
After=network.target

[Service]
Type=exec
ExecStart={" ".join(map(_quoted, command))}
WorkingDirectory={_printable(str(directory)).replace("%", "%%")}/
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2
TimeoutStopSec=70
CacheDirectory=pyctl
CacheDirectoryMode=0700
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictNamespaces=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    """``word`` as systemd reads it back in ExecStart."""
    escaped = _printable(word).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    plain = escaped == word and word and not any(each in " '#;" for each in word)
    return word if plain else f'"{escaped}"'


def _printable(word: str) -> str:
    """``word``. Raises ConfigError for control characters, which may begin a line of their own."""
    if not word.isprintable():
        raise ConfigError(f"{word!r} cannot stand in a unit")
    return word


def _systemctl(step: str) -> int:
    """Run the commands of ``step``; without a systemd of the user, print them. Returns the first exit code but 0."""
    commands = [["systemctl", "--user", *words] for words in STEPS[step]]
    if not _has_systemd():
        print("systemd does not run for this user; where it does:")
        for command in commands:
            print(f"  {' '.join(command)}")
        return 0
    codes = [subprocess.run(command, check=False).returncode for command in commands]
    return next(filter(None, codes), 0)


def _has_systemd() -> bool:
    if shutil.which("systemctl") is None:
        return False
    asked = subprocess.run(["systemctl", "--user", "show-environment"], capture_output=True, check=False)
    return asked.returncode == 0

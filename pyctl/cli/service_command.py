"""`pyctl service install`: a systemd unit of the user that runs `pyctl serve` with the given flags."""

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

Write a systemd unit of this user that runs pyctl serve with these flags, and start it.
With --print, print the unit and change nothing.
"""

STEPS = (("daemon-reload",), ("enable", UNIT), ("restart", UNIT))
"""Commands of `systemctl --user` after the unit is written, in order."""


def run_service(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Install the service; returns the exit code. Raises ConfigError for flags that do not work."""
    action, flags = (argv[0], list(argv[1:])) if argv else ("", [])
    if action in ("", "-h", "--help"):
        print(USAGE, end="")
        return 0 if action else 2
    if action != "install":
        raise ConfigError(f"unknown: pyctl service {action}; for all but install there is systemctl --user")
    return _install(unit_path(environ), flags, environ)


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
    code = _start()
    print("the log: journalctl --user -u pyctl; to run without a login: loginctl enable-linger")
    return code


def unit_text(command: Sequence[str], directory: Path) -> str:
    """The unit that runs ``command`` in ``directory``, to which relative paths in it refer. Raises ConfigError."""
    # The slash keeps a backslash at its end from joining the next line, and a blank from being dropped.
    unit = Path(__file__).with_name(UNIT).read_text("utf-8")
    return unit.format(command=" ".join(map(_quoted, command)), directory=_printable(str(directory)).replace("%", "%%"))


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


def _start() -> int:
    """Start the service anew; without a systemd of the user, print how. Returns the first exit code but 0."""
    commands = [["systemctl", "--user", *words] for words in STEPS]
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

"""`pyctl service`: prints a systemd unit that runs `pyctl serve` with the given flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyctl.cli.arguments import parse_serve
from pyctl.errors import ConfigError
from pyctl.processes.module_command import module_command

__all__ = ["pyctl_command", "run_service", "unit_text"]

USAGE = """usage: pyctl service [flags of pyctl serve]

Print a systemd unit that runs pyctl serve with these flags in this directory. To start it as this
user:
pyctl service FLAGS | install -Dm600 /dev/stdin ~/.config/systemd/user/pyctl.service
systemctl --user enable --now pyctl
"""


def run_service(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Print the unit; returns the exit code. Raises ConfigError for flags that do not work."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    # A unit has none of the variables of this shell, so none may count here.
    warnings = list(parse_serve(argv, {}).warnings)
    if names := [
        name
        for name in environ
        if name.startswith(("LLAMA_ARG_", "PYCTL_")) or name == "LLAMA_API_KEY"
    ]:
        warnings.append(f"not set in the service: {', '.join(sorted(names))}")
    for warning in warnings:
        print(f"pyctl: warning: {warning}", file=sys.stderr)
    print(unit_text([*pyctl_command(), "serve", *argv], Path.cwd()), end="")
    return 0


def pyctl_command() -> list[str]:
    """Return the absolute command that runs this pyctl."""
    for path in (Path(sys.argv[0]), Path(sys.executable).with_name("pyctl")):
        if path.name == "pyctl" and path.is_file() and os.access(path, os.X_OK):
            return [str(path.absolute())]
    return module_command("pyctl")


def unit_text(command: Sequence[str], directory: Path) -> str:
    """Return the unit that runs ``command`` in ``directory``, to which relative paths in it refer.
    Raises ConfigError.
    """
    # The slash keeps a backslash at its end from joining the next line, and a blank from being
    # dropped.
    unit = Path(__file__).with_name("pyctl.service").read_text("utf-8")
    return unit.format(
        command=" ".join(map(_quoted, command)),
        directory=_printable(str(directory)).replace("%", "%%"),
    )


def _quoted(word: str) -> str:
    """Return ``word`` as systemd reads it back in ExecStart."""
    escaped = (
        _printable(word)
        .replace("\\", "\\\\")
        .replace('"', '\\"')
        .replace("%", "%%")
        .replace("$", "$$")
    )
    plain = escaped == word and word and not any(special in " '#;" for special in word)
    return word if plain else f'"{escaped}"'


def _printable(word: str) -> str:
    """Return ``word``. Raises ConfigError for control characters, which may start a new line."""
    if not word.isprintable():
        raise ConfigError(f"{word!r} cannot be part of a unit")
    return word

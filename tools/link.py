"""Links ~/.local/bin/pyctl to the command of this checkout, and prints the next commands.

    make demo     # runs: .venv/bin/python tools/link.py .venv/bin/pyctl
    make serve    # runs: .venv/bin/python tools/link.py --only .venv/bin/pyctl

A file or link of another installation stays as it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["link", "main", "next_lines"]


def link(command: Path, place: Path) -> str:
    """Make ``place`` a link to ``command`` unless something is there; return why not, "" if it is
    one now.
    """
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(command)
    except FileExistsError:
        if place.is_symlink() and place.readlink() == command:
            return ""
        return f"{place} is of another installation and was not changed"
    except OSError as error:
        return f"cannot link {place}: {error.strerror}"
    return ""


def path_line(command: Path, place: Path, path: str) -> str:
    """Return why a shell with the search path ``path`` does not run ``command`` by its name, and
    the remedy; "" if it does.
    """
    first = shutil.which(place.name, path=path)
    if first is None:
        directory = place.parent
        return f'{directory} is not on PATH: export PATH="{directory}:$PATH"'
    if os.path.realpath(first) != os.path.realpath(command):
        return f"{first} is another pyctl and precedes this one on PATH: {place}"
    return ""


def next_lines(command: Path, place: Path, reason: str, path: str) -> list[str]:
    """Return the lines after the demo; ``reason`` is of `link`, ``path`` the search path of
    commands.
    """
    obstacle = path_line(command, place, path)
    name = str(command if reason else place) if obstacle else place.name
    lines = [reason or obstacle] if reason or obstacle else []
    return [
        *lines,
        "Next:",
        f"  {name} serve --open              # the page, with the built-in model",
        f"  {name} launch claude -m FILE     # Claude Code on a model; FILE is a GGUF file",
    ]


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", type=Path, help="the command to link to")
    parser.add_argument("--only", action="store_true", help="print no next commands")
    args = parser.parse_args(argv)
    command = Path(os.path.abspath(args.command))
    place = Path(environ.get("HOME") or Path.home()) / ".local" / "bin" / command.name
    reason = link(command, place)
    path = environ.get("PATH", os.defpath)
    if not args.only:
        print("\n".join(next_lines(command, place, reason, path)))
        return
    print(reason or f"{place} is the command of this checkout")
    if not reason and (obstacle := path_line(command, place, path)):
        print(obstacle)


if __name__ == "__main__":
    main()

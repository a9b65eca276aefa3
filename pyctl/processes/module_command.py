"""The command of every Python child process, and the script that it runs: ``module_command.py PATH
MODULE ARGUMENTS``.

``python -m`` puts the current directory before all packages, so a file there with the name of a
module would run. ``-P`` needs Python 3.11, ``-I`` leaves out PYTHONPATH and the user's own
packages, and before the code of ``-c`` runs, Python 3.13 imports modules from there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["module_command"]


def module_command(name: str, python: str = "", path: Sequence[str] | None = None) -> list[str]:
    """Return the command that runs ``name`` as ``-m`` does, with the packages of this process.

    The current directory's are left out, unless pyctl or the module is there. Another
    ``python`` has its own packages, after ``path``.
    """
    if path is None:
        package = sys.modules.get(name.partition(".")[0])
        homes = [
            os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
            *getattr(package, "__path__", ()),
        ]
        is_home = any(_is_here(os.path.dirname(home)) for home in homes)
        path = [entry or os.getcwd() for entry in sys.path if is_home or not _is_here(entry)]
    return [python or sys.executable, os.path.abspath(__file__), os.pathsep.join(path), name]


def _is_here(entry: str) -> bool:
    try:
        return os.path.samefile(entry or ".", ".")
    except (OSError, ValueError):
        return False


def _main() -> None:
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        del sys.path[0]  # the directory of this script
    _, path, *sys.argv = sys.argv
    own = [entry for entry in sys.path if not _is_here(entry)]
    sys.path[:] = filter(None, dict.fromkeys([*path.split(os.pathsep), *own]))
    import runpy

    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()

"""`pyctl cache`: looks through a cache directory and keeps it tidy, while servers use it or not."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyctl.cache.cache_settings import DiskSettings
from pyctl.errors import ConfigError
from pyctl.setting import flags_of
from pyctl.text import one_line

if TYPE_CHECKING:
    from pyctl.cache.disk.directory import CacheDirectory

__all__ = ["run_cache"]

MIB = 2**20

DIRECTORY = next(flag for _, flag in flags_of(DiskSettings) if flag.dest == "cache_dir")


def run_cache(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run one command on a directory; returns the exit code: 1 when something is wrong or not found.

    Raises ConfigError when the arguments or the directory cannot be used.
    """
    parser = _parser(environ)
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        raise ConfigError(f"unexpected argument {rest[0]!r}; a directory is named by {DIRECTORY.names}")
    if not arguments.kv_cache_dir:
        raise ConfigError(f"no directory; pass {DIRECTORY.names} or set {DIRECTORY.env}")
    path = Path(arguments.kv_cache_dir).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory")
    # Only now: --help needs none of it.
    from pyctl.cache.disk.directory import CacheDirectory
    from pyctl.cache.disk.file_format import INDEX

    if arguments.run is not _verify and not (path / INDEX).exists():
        raise ConfigError(f"no prefix cache in {path}")
    try:
        directory = CacheDirectory(path)
        try:
            return int(arguments.run(directory, arguments))
        finally:
            directory.close()
    except OSError as error:
        raise ConfigError(f"cannot use {path}: {error.strerror or error}") from error


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="pyctl cache", description="Look through a cache directory and keep it tidy.")
    shared = _Parser(add_help=False)
    default = environ.get(DIRECTORY.env, "")
    shared.add_argument(DIRECTORY.names, metavar="DIR", default=default, help="the directory that servers were given")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, function: object, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, parents=[shared], help=text, description=text)
        added.set_defaults(run=function)
        return added

    command("ls", _list, "list the snapshots, the last used first")
    verify = command("verify", _verify, "read every byte and compare the files with the index")
    verify.add_argument("--fix", action="store_true", help="remove what is damaged or useless, adopt what is whole")
    prune = command("prune", _prune, "remove what is worth least until the directory has a size")
    prune.add_argument("--kv-cache-budget", type=int, metavar="MiB", required=True, help="the size in MiB")
    for name, function, text in (
        ("pin", _pin, "keep snapshots from eviction"),
        ("unpin", _unpin, "let snapshots be evicted again"),
        ("rm", _remove, "remove snapshots, pinned or not"),
    ):
        command(name, function, text).add_argument("id", nargs="+", help="as ls shows it")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}; see {self.prog} --help")


def _list(directory: CacheDirectory, _: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("id", "tokens", "MiB", "age", "last used", "hits", "", "text", box=None)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:6]:
        column.justify = "right"
    now = time.time()
    entries = directory.entries()
    models = {entry.fingerprint for entry in entries}
    for entry in entries:
        marks = " ".join(mark for mark, is_set in (("pinned", entry.pinned), ("inexact", not entry.exact)) if is_set)
        table.add_row(
            entry.name,
            str(entry.n),
            f"{entry.n_bytes / MIB:.1f}",
            _span(now - entry.created),
            _span(now - entry.used),
            str(entry.hits),
            marks,
            escape(one_line(entry.label)),
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    if entries:
        console.print(table)
    console.print(f"{len(entries)} snapshots of {len(models)} models, {directory.n_bytes / MIB:.1f} MiB")
    return 0


def _verify(directory: CacheDirectory, arguments: argparse.Namespace) -> int:
    from rich.console import Console

    with Console(stderr=True).status("reading every file"):
        report = directory.verify(fix=arguments.fix)
    print(f"{report.files} whole files, {report.n_bytes / MIB:.1f} MiB")
    for kind in ("broken", "missing", "unknown", "useless", "temps", "foreign"):
        for name in getattr(report, kind):
            print(f"{kind}: {one_line(name)}")
    return 0 if report.sound or arguments.fix else 1


def _prune(directory: CacheDirectory, arguments: argparse.Namespace) -> int:
    if arguments.kv_cache_budget < 0:
        raise ConfigError("--kv-cache-budget must be at least 0")
    freed = directory.prune(arguments.kv_cache_budget * MIB)
    print(f"{freed / MIB:.1f} MiB freed, {directory.n_bytes / MIB:.1f} MiB left")
    return 0


def _pin(directory: CacheDirectory, arguments: argparse.Namespace) -> int:
    return _each(arguments, lambda name: directory.pin(name, True))


def _unpin(directory: CacheDirectory, arguments: argparse.Namespace) -> int:
    return _each(arguments, lambda name: directory.pin(name, False))


def _remove(directory: CacheDirectory, arguments: argparse.Namespace) -> int:
    return _each(arguments, directory.remove)


def _each(arguments: argparse.Namespace, function: Callable[[str], bool]) -> int:
    missing = [name for name in arguments.id if not function(name)]
    for name in missing:
        print(f"no snapshot {one_line(name)}", file=sys.stderr)
    return 1 if missing else 0


def _span(seconds: float) -> str:
    """A time that people read: 12 s, 5 min, 3 h, 2 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"

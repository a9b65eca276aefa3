"""`pyctl cache`: looks through a cache directory and keeps it tidy, while servers use it or not."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyctl.cache.cache_settings import DiskSettings, default_directory
from pyctl.cli.command_parser import CommandParser
from pyctl.errors import ConfigError
from pyctl.settings.setting import class_flags
from pyctl.text import one_line, plain

if TYPE_CHECKING:
    from pyctl.cache.ports import Entry
    from pyctl.disk.directory import CacheDirectory

__all__ = ["run_cache"]

MIB = 2**20

DIRECTORY = next(flag for _, flag in class_flags(DiskSettings) if flag.dest == "cache_dir")


def run_cache(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run one command on a directory; return the exit code: 1 when something is wrong or not found.

    Raises ConfigError when the arguments or the directory cannot be used.
    """
    parser = _parser(environ)
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        raise ConfigError(
            f"unexpected argument {' '.join(rest)!r}; a directory is named by {DIRECTORY.names}"
        )
    try:
        path = (
            Path(arguments.kv_cache_dir).expanduser()
            if arguments.kv_cache_dir
            else default_directory(environ)
        )
    except RuntimeError as error:
        raise ConfigError(f"no directory; pass {DIRECTORY.names} or set {DIRECTORY.env}") from error
    # Only now: --help needs none of it.
    from pyctl.disk.directory import CacheDirectory
    from pyctl.disk.file_format import INDEX

    is_default = not arguments.kv_cache_dir
    if is_default and arguments.run is _list and not (path / INDEX).exists():
        # No server has run yet: no fault of the user, who named no directory.
        print("[]" if arguments.json else f"no snapshots: {path} has not been used yet")
        return 0
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory")
    if arguments.run is not _verify and not (path / INDEX).exists():
        raise ConfigError(f"no prefix cache in {path}")
    try:
        with closing(CacheDirectory(path)) as directory:
            return int(arguments.run(directory, arguments))
    except OSError as error:
        raise ConfigError(f"cannot use {path}: {error.strerror or error}") from error


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the parser of `pyctl cache` with its commands, whose function is ``run``."""
    parser = CommandParser(
        prog="pyctl cache", description="List, check and change a directory of snapshots."
    )
    shared = CommandParser(add_help=False)
    where = f"the directory of the servers (default: {DIRECTORY.default.partition(',')[0]})"
    shared.add_argument(
        DIRECTORY.names, metavar="DIR", default=environ.get(DIRECTORY.env, ""), help=where
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)

    def command(
        name: str, function: object, text: str, epilog: str = ""
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, parents=[shared], help=text, description=text, epilog=epilog
        )
        added.set_defaults(run=function)
        return added

    listed = command("ls", _list, "list the snapshots by model, the last used first", epilog=MARKS)
    listed.add_argument("--model", metavar="NAME", default="", help="only snapshots of this model")
    listed.add_argument("--json", action="store_true", help="print every field as JSON")
    verify = command("verify", _verify, "read every byte and compare the files with the index")
    verify.add_argument(
        "--fix", action="store_true", help="remove damaged and useless files, adopt whole ones"
    )
    prune = command(
        "prune", _prune, "remove the least valuable snapshots until the rest fits --kv-cache-budget"
    )
    prune.add_argument(
        "--kv-cache-budget", type=int, default=-1, metavar="MiB", help="MiB to keep, required"
    )
    prune.add_argument(
        "--dry-run", action="store_true", help="only print the MiB that would be freed"
    )
    for name, function, text in (
        ("pin", lambda directory, name: directory.pin(name, True), "keep snapshots from eviction"),
        (
            "unpin",
            lambda directory, name: directory.pin(name, False),
            "let snapshots be evicted again",
        ),
        ("rm", lambda directory, name: directory.remove(name), "remove snapshots, pinned or not"),
    ):
        added = command(name, partial(_each, function), text)
        added.add_argument("id", nargs="+", help="as ls shows it, or the beginning of one")
    return parser


def _list(directory: CacheDirectory, arguments: argparse.Namespace) -> int:
    """Print the snapshots by model, or as JSON; return 0."""
    from pyctl.disk.directory import model_in

    entries = directory.entries()
    names = {entry.fingerprint: model_in(directory.path, entry.fingerprint) for entry in entries}
    models = {home: name for home, name in names.items() if arguments.model in ("", home, name)}
    entries = [entry for entry in entries if entry.fingerprint in models]
    if arguments.json:
        print(
            json.dumps(
                [{"model": names[entry.fingerprint], **asdict(entry)} for entry in entries],
                indent=1,
            )
        )
        return 0
    for home, name in models.items():
        of_model = [entry for entry in entries if entry.fingerprint == home]
        print(
            f"{one_line(name)}: {_count(len(of_model), 'snapshot')}, "
            f"{sum(e.n_bytes for e in of_model) / MIB:.1f} MiB"
        )
        _print_lines([_line(entry, time.time()) for entry in of_model])
        print()
    if not entries:
        whose = f" of {one_line(arguments.model)}" if arguments.model else ""
        print(f"no snapshots{whose} in {directory.path}")
        return 0
    print(
        f"{_count(len(entries), 'snapshot')} of {_count(len(models), 'model')}, "
        f"{directory.n_bytes / MIB:.1f} MiB"
    )
    n_bytes = directory.auxiliary_bytes()
    if n_bytes >= MIN_SHOWN:
        print(f"{n_bytes / MIB:.1f} MiB of these are texts of recent prompts and replies")
    if any(not entry.exact for entry in entries):
        print(f"{NO_EXACT}: undamaged, but not used with --exact (pyctl cache ls --help)")
    return 0


HEAD = ("id", "tokens", "MiB", "age", "used", "hits", "marks", "text")
MIN_TEXT = 12
MIN_SHOWN = MIB // 20
"""Bytes below which a size is 0.0 MiB, and so has no line."""

NO_EXACT = "no-exact"

MARKS = (
    f"marks: pinned, kept from eviction; {NO_EXACT}, has rows that a cold run computes in other "
    "batches, such as a reply's: their last bits may differ, so --exact does not use them; older, "
    "made under the rules of another release."
)


def _line(entry: Entry, now: float) -> tuple[str, ...]:
    marks = {"pinned": entry.pinned, NO_EXACT: not entry.exact, "older": entry.is_older}
    return (
        entry.short,
        str(entry.n),
        f"{entry.n_bytes / MIB:.1f}",
        _span(now - entry.created),
        _span(now - entry.used),
        str(entry.hits),
        ",".join(mark for mark, is_set in marks.items() if is_set),
        one_line(plain(entry.label)),
    )


def _print_lines(lines: list[tuple[str, ...]]) -> None:
    """Print a table: whole lines into a pipe; on a terminal, the text gets the rest of its
    width.
    """
    widths = [max(map(len, column)) for column in zip(HEAD, *lines, strict=True)]
    room = shutil.get_terminal_size().columns - sum(widths[:-1]) - 2 * (len(HEAD) - 1)
    for line in (HEAD, *lines):
        cells = [
            cell.ljust(width) if head in ("id", "marks") else cell.rjust(width)
            for head, cell, width in zip(HEAD[:-1], line, widths, strict=False)
        ]
        text = line[-1]
        if sys.stdout.isatty() and len(text) > max(room, MIN_TEXT):
            text = text[: max(room, MIN_TEXT) - 1] + "…"
        print("  ".join([*cells, text]).rstrip())


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _verify(directory: CacheDirectory, arguments: argparse.Namespace) -> int:
    print("reading every file", file=sys.stderr)
    report = directory.verify(fix=arguments.fix)
    print(f"{report.files} whole files, {report.n_bytes / MIB:.1f} MiB")
    for kind in ("broken", "missing", "unknown", "useless", "temps", "foreign"):
        for name in getattr(report, kind):
            print(f"{kind}: {one_line(name)}")
    return 0 if report.is_consistent or arguments.fix else 1


def _prune(directory: CacheDirectory, arguments: argparse.Namespace) -> int:
    """Remove the snapshots of lowest value until the directory has the size of --kv-cache-budget;
    return 0. Raises ConfigError without a size.
    """
    if arguments.kv_cache_budget < 0:
        raise ConfigError("prune needs --kv-cache-budget MiB, at least 0")
    from pyctl.disk.directory import find_users

    if users := find_users(directory.path):
        print(
            f"in use by process {', '.join(users)}: its next prompts evaluate the removed prefixes",
            file=sys.stderr,
        )
    before = directory.n_bytes
    freed = directory.prune(arguments.kv_cache_budget * MIB, dry_run=arguments.dry_run)
    print(
        f"{freed / MIB:.1f} of {before / MIB:.1f} MiB "
        f"{'would be freed' if arguments.dry_run else 'freed'}"
    )
    return 0


def _each(
    function: Callable[[CacheDirectory, str], bool],
    directory: CacheDirectory,
    arguments: argparse.Namespace,
) -> int:
    """Apply ``function`` to each snapshot that the ids name; do nothing if one id names none, or
    several.
    """
    names_in_cache = {
        name
        for entry in directory.entries()
        for name in (entry.name, f"{entry.fingerprint}/{entry.name}")
    }
    by_text = {
        text: [text] if text in names_in_cache else _resolve_ids(text, names_in_cache)
        for text in arguments.id
    }
    for text, names in by_text.items():
        if not names:
            print(f"no snapshot {one_line(text)}", file=sys.stderr)
        elif len(names) > 1:
            print(f"{one_line(text)} may be any of {', '.join(names)}", file=sys.stderr)
    if any(len(names) != 1 for names in by_text.values()):
        return 1
    missing = [names[0] for names in by_text.values() if not function(directory, names[0])]
    return 1 if missing else 0


def _resolve_ids(text: str, known: Collection[str]) -> list[str]:
    """Return the names that start with ``text``, or whose digest does; one name may belong to
    snapshots of several models.
    """
    names = (name for name in known if "/" not in name)
    return sorted(
        name
        for name in names
        if text and text in (name[: len(text)], name.partition("-")[2][: len(text)])
    )


def _span(seconds: float) -> str:
    """Return a time for display: 12 s, 5 min, 3 h, 2 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"

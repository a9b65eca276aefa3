"""`pyctl bench`: measures this machine with the user's model and flags, without touching the user's
cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyctl import __version__
from pyctl.cache.cache_settings import default_directory
from pyctl.cli.arguments import FLAGS, CommandSettings, kept_flags, parse_serve
from pyctl.cli.command_parser import CommandParser
from pyctl.cli.signals import ending_by_signal
from pyctl.doctor.nvidia_smi import card_states, used_bytes
from pyctl.errors import ConfigError, ModelError
from pyctl.machine.probe import find_driver
from pyctl.measure.bench_report import is_wrong, table_lines
from pyctl.measure.bench_run import BenchOptions, BenchRun, Record
from pyctl.measure.shared_block import (
    block_lines,
    commit_of,
    model_facts,
    public_flags,
    shared_records,
)
from pyctl.model_files import builtin_model, split_names
from pyctl.settings.setting import DISK, GENERAL, LOG, SERVER
from pyctl.text import one_line

__all__ = ["run_bench"]

MIB = 2**20

DEPTHS = (2048, 8192, 32768)
QUICK_DEPTHS = (2048, 8192)

BUDGET = 900.0
QUICK_BUDGET = 120.0

MAX_DEPTHS = 4
"""Columns of the table."""

BUILTIN_CONTEXT = "65536"

MIN_CACHE_MIB = 256
MAX_CACHE_MIB = 16384

DROPPED = frozenset(
    flag.dest
    for section in (SERVER, GENERAL, LOG, DISK)
    for flag in FLAGS[section]
    if section is not DISK or flag.dest in ("cache_dir", "disk_mib", "kv_cache")
)
"""Flags of a serve command that the servers under test do not get; other flags of the disk cache
are the user's.
"""


def run_bench(argv: Sequence[str]) -> int:
    """Measure and print one table; return the exit code: 1 if a server failed or a restored prompt
    differs.

    Raises ConfigError if the arguments cannot be used.
    """
    options, rest = _parser().parse_known_args(argv)
    settings = parse_serve(rest, {})
    depths = tuple(sorted(set(options.depths or (QUICK_DEPTHS if options.quick else DEPTHS))))
    if len(depths) > MAX_DEPTHS or depths[0] < 1:
        raise ConfigError(f"--depths takes 1 to {MAX_DEPTHS} numbers of tokens")
    flags = _server_flags(settings, rest)
    if head_flags := _head_flags(settings, flags):
        flags = (*flags, "--spec-type", "none")  # the gain of drafts is a separate row
    peer = _peer(options.llama_server, flags) if options.llama_server else ()
    with ending_by_signal(), _work_directory(settings) as work:
        measured = BenchOptions(
            flags=flags,
            depths=depths,
            peer=peer,
            budget=options.budget or (QUICK_BUDGET if options.quick else BUDGET),
            n_decode=64 if options.quick else 128,
            both_modes=not options.quick,
            is_exact=settings.engine.exact,
            head_flags=head_flags,
            cache_mib=_cache_mib(work),
            vram=used_bytes,
        )
        run = BenchRun(
            measured,
            work,
            lambda text: print(f"{run.seconds:6.1f} s  {text}", file=sys.stderr, flush=True),
        )
        began = time.strftime("%Y-%m-%d %H:%M")
        run.run()
        cards = [state.name for state in card_states() or ()]
        header = _header(flags, cards)
        if options.json:
            report = {
                "pyctl": __version__,
                "began": began,
                "seconds": run.seconds,
                "about": header,
                "cards": cards,
            }
            shared = ("-m", Path(flags[1]).name, *flags[2:])  # without the user's directories
            print(json.dumps({**report, "flags": shared, "records": run.records}, indent=1))
        else:
            print("\n".join(table_lines(run.records, header)))
        if options.share:
            _print_block(flags, began, cards, run.records)
        return int(is_wrong(run.records))


def _print_block(
    flags: Sequence[str], began: str, cards: Sequence[str], records: Sequence[Record]
) -> None:
    """Print the block of --share below the table. Raises ConfigError if the model is gone."""
    path = Path(flags[1])
    driver = find_driver()
    try:
        model = model_facts(path.with_name(name) for name in split_names(path.name))
    except OSError as error:
        raise ConfigError(f"cannot read the model: {error}") from error
    report = {
        "pyctl": __version__,
        "commit": commit_of(Path(__file__).parent),
        "began": began[:10],
        "cpu": _cpu_name(),
        "cards": list(cards),
        "driver": driver.release if driver is not None else "",
        "model": model,
        "flags": ["-m", *public_flags(flags[1:])],
        "records": shared_records(records),
    }
    print("\npaste this into an issue; docs/cards.md has the address:\n")
    print("\n".join(block_lines(report)))


def _parser() -> argparse.ArgumentParser:
    """Return the parser of `pyctl bench`."""
    parser = CommandParser.beside_serve(
        "pyctl bench",
        "pyctl bench [-m FILE | -hf REPO] [--quick] [--llama-server PATH] [flags of pyctl serve]",
        "Measure first tokens, replies, exactness and memory on this machine. Flags of pyctl "
        "serve count, "
        "but for addresses, keys, the log and the cache directory: the cache is in a temporary "
        "directory.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="about a minute on a GPU, without --exact"
    )
    parser.add_argument(
        "--llama-server", metavar="PATH", help="send the same requests to this server, too"
    )
    parser.add_argument(
        "--depths",
        type=int,
        nargs="+",
        metavar="N",
        help="prompt tokens (default: 2048 8192 32768)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="S",
        help="skip slower rows (default: 900, 120 with --quick)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print every figure as JSON")
    output.add_argument(
        "--share",
        action="store_true",
        help="print a block for docs/cards.md as well: card, driver, hash of the model, flags, "
        "figures",
    )
    return parser


# -- flags of the servers
# ----------------------------------------------------------------------------------


def _server_flags(settings: CommandSettings, rest: Sequence[str]) -> tuple[str, ...]:
    """Return the flags of the servers under test; the first two are -m and the model's file, which
    is fetched if need be.
    """
    server_flags = kept_flags(
        rest, {*DROPPED, "path", "hf_repo", "hf_file", "hf_token", "model_url", "offline"}
    )
    if not (settings.model.path or settings.hub.hf_repo or settings.hub.model_url):
        context = () if settings.model.n_ctx else ("-c", BUILTIN_CONTEXT)
        return "-m", str(builtin_model()), *context, *server_flags
    # Only now: the import loads llama.cpp.
    from pyctl.cli.model_paths import resolve_files

    path = Path(resolve_files(settings).model.path).expanduser()
    if not path.is_file():
        raise ConfigError(f"no model at {path}")
    return "-m", str(path), *server_flags


def _peer(path: str, flags: Sequence[str]) -> tuple[str, ...]:
    """Return llama-server's command, with the ``flags`` that its --help names."""
    try:
        text = subprocess.run(
            [path, "--help"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"cannot run --llama-server {path}: {error}") from error
    spellings = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", text))
    unknown = {
        flag.dest
        for group in FLAGS.values()
        for flag in group
        if not spellings & set(flag.spellings())
    }
    return path, *kept_flags(flags, unknown)


def _head_flags(settings: CommandSettings, flags: Sequence[str]) -> tuple[str, ...]:
    """Return the flags for drafts from the model's own head, if it has one and no flag selects
    drafts.
    """
    drafts = settings.drafts
    if not drafts.is_automatic and (drafts.draft_types or drafts.draft_path):
        return ()
    # Only now: the import loads llama.cpp.
    from pyctl.llama.library.devices import count_heads, tensor_bytes

    try:
        n_heads = count_heads(tensor_bytes(Path(flags[1])))
    except ModelError as error:
        raise ConfigError(str(error)) from error
    return (
        ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(drafts.n_draft))
        if n_heads == 1
        else ()
    )


# -- places
# ----------------------------------------------------------------------------------


@contextmanager
def _work_directory(settings: CommandSettings) -> Iterator[Path]:
    """Provide a temporary directory on the disk of the given cache directory or of the default one,
    which need not exist.
    """
    is_given = settings.disk.cache_dir and not settings.disk.is_default
    cache = Path(settings.disk.cache_dir) if is_given else default_directory(os.environ)
    parent = cache.expanduser().absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(
            prefix="pyctl-bench-", dir=parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise ConfigError(f"cannot write to {parent}: {error.strerror}") from error
    with work as name:
        yield Path(name)


def _cache_mib(work: Path) -> int:
    """Return the MiB for the cache's files: half of the free space, at most as for `pyctl
    serve`.
    """
    free = shutil.disk_usage(work).free // MIB // 2
    if free < MIN_CACHE_MIB:
        raise ConfigError(
            f"{work.parent} has {2 * free} MiB free; the run needs {2 * MIN_CACHE_MIB} MiB"
        )
    return min(free, MAX_CACHE_MIB)


def _cpu_name() -> str:
    """Return the name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def _header(flags: Sequence[str], cards: Sequence[str]) -> list[str]:
    """Return the model, the machine with its ``cards``, and the flags, in lines of 80 columns."""
    from pyctl.llama.library.extension import build_version

    path = Path(flags[1])
    size = sum(path.with_name(name).stat().st_size for name in split_names(path.name))
    model = f"{one_line(path.name)}, {size / MIB:,.0f} MiB"
    facts = [
        f"pyctl {__version__}, {build_version()}",
        f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        *cards,
        model,
    ]
    facts += [" ".join(map(one_line, flags[2:]))] if flags[2:] else []
    return [line if len(line) <= 80 else f"{line[:79]}…" for line in facts]

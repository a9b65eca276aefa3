"""`pyctl doctor`: every problem of this machine that is wrong or slow, each with its fix."""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import mmap
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pyctl.cache.cache_settings import default_directory
from pyctl.cli.arguments import CommandSettings, parse_serve
from pyctl.cli.command_parser import CommandParser
from pyctl.errors import ConfigError
from pyctl.model_files import split_names

if TYPE_CHECKING:
    from pyctl.doctor.facts import LlamaFacts, RequestedSettings
    from pyctl.llama.settings.resolved import Resolved, ResolvedValue

    Plan: TypeAlias = Callable[[], tuple[Resolved, list[str]]]

__all__ = ["cuda_can_pin", "cuda_version", "log_findings", "planned", "run_doctor"]

log = logging.getLogger("pyctl")

MIB = 2**20

N_LOGGED = 2
"""Findings that `pyctl serve` logs at its start."""

FLAG_WIDTH = 21
"""Columns for a flag with an automatic value."""


def run_doctor(argv: Sequence[str]) -> int:
    """Print the findings; return the exit code: 1 if anything is wrong or slow. Raises ConfigError
    for bad flags.
    """
    options, rest = _parser().parse_known_args(argv)
    settings = _with_fetched(parse_serve(rest))
    # Only now: --help needs none of it.
    from pyctl.doctor.examine import WIDTH, examine, screen
    from pyctl.doctor.facts import Facts

    requested = _requested(settings)
    if (
        requested.cache_dir is None and settings.disk.kv_cache
    ):  # the place where a model's cache would be
        requested = replace(requested, cache_dir=default_directory(os.environ))
    plan = cache(partial(planned, settings))  # one dry run for the check and for the values
    found = examine(Facts(requested=requested, llama=_llama_facts(plan)))
    values = _values_in_use(plan) if settings.model.path else ()
    if options.json:
        report = {"sound": found.is_sound, **asdict(found)}
        print(json.dumps({**report, "settings": [row._asdict() for row in values]}, indent=1))
    else:
        print("\n".join(screen(found)))
        for row in values:
            line = f"{row.flag:{FLAG_WIDTH}}{row.value}: {row.reason}"
            print(textwrap.fill(line, WIDTH, subsequent_indent=" " * FLAG_WIDTH))
    return 0 if found.is_sound else 1


def _values_in_use(plan: Plan) -> tuple[ResolvedValue, ...]:
    """Return the automatic values for the model, none if it cannot be loaded: a finding has the
    reason.
    """
    try:
        return plan()[0].values
    except Exception:  # also whatever a broken library raises at its import
        return ()


def log_findings(settings: CommandSettings, root: Path = Path("/")) -> None:
    """Log the worst findings of the checks that take no time and load no library."""
    from pyctl.doctor.examine import CHECKS, examine
    from pyctl.doctor.facts import Facts

    report = examine(
        Facts(root, requested=_requested(settings)), [check for check in CHECKS if check.is_quick]
    )
    for finding in [each for each in report.findings if each.level != "unknown"][:N_LOGGED]:
        log.warning("%s; to fix it: %s", finding.text, finding.fix)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser.beside_serve(
        "pyctl doctor",
        "pyctl doctor [-m FILE] [--json] [flags of pyctl serve]",
        "Name faults and slow settings of this machine, with fixes. With -m and flags of pyctl "
        "serve, "
        "the model's file and the memory that it takes are also checked.",
    )
    parser.add_argument("--json", action="store_true", help="print every finding as JSON")
    return parser


def _with_fetched(settings: CommandSettings) -> CommandSettings:
    """Add the path of a model that -hf names and that is downloaded already; nothing is fetched."""
    if settings.model.path or not settings.hub.hf_repo:
        return settings
    from pyctl.cli.model_paths import resolve_files

    try:
        return resolve_files(replace(settings, hub=replace(settings.hub, offline=True)))
    except ConfigError:
        return settings


def _requested(settings: CommandSettings) -> RequestedSettings:
    from pyctl.doctor.facts import RequestedSettings

    model = settings.model
    path = Path(model.path).expanduser() if model.path else None
    disk = settings.disk
    ram_mib = settings.cache.ram_mib
    return RequestedSettings(
        model_files=tuple(path.with_name(name) for name in split_names(path.name))
        if path is not None
        else (),
        cache_dir=Path(disk.cache_dir).expanduser() if disk.cache_dir else None,
        cache_bytes=disk.disk_mib * MIB if disk.cache_dir and not disk.free_part else None,
        ram_bytes=ram_mib * MIB if ram_mib is not None and ram_mib >= 0 else None,
        locks_memory="mlock" in model.load_mode,
        chats=not (settings.format.chat_template or model.embeddings),
    )


# -- llama.cpp
# ----------------------------------------------------------------------------------


def _llama_facts(plan: Plan) -> LlamaFacts:
    """Return the facts about llama.cpp's libraries, devices and the file of ``plan``.

    llama.cpp is imported here: a library that does not load is a finding, not the end of `doctor`.
    """
    from pyctl.doctor.facts import LlamaFacts
    from pyctl.machine.libraries import unused_card, unused_choice

    try:
        from pyctl.llama.library.devices import devices, file_head
        from pyctl.llama.library.extension import describe_missing, library_file
    except Exception as error:  # whatever a broken library raises at its import
        return LlamaFacts(error=" ".join(str(error).split()))

    def file(path: Path) -> tuple[int, bool]:
        head = file_head(path)
        end = max((tensor.first + tensor.n_bytes for tensor in head.tensors), default=0)
        return end, head.has_template or head.kind != "model"

    return LlamaFacts(
        gpus=lambda: [device.name for device in devices() if device.is_gpu],
        describe_missing=lambda: [*filter(None, [unused_choice()]), *describe_missing()],
        idle_card=unused_card,
        cuda=lambda: cuda_version(library_file("libggml-cuda.so")),
        pin_error=cuda_can_pin,
        plan=lambda: plan()[1],
        file=file,
    )


def cuda_version(library: Path) -> int:
    """Return the major CUDA version of ``library``, from the name of the runtime in it; 0 if there
    is none.
    """
    if not library.is_file() or not library.stat().st_size:
        return 0
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        match = re.search(rb"libcudart\.so\.(\d+)", data)
        return int(match[1]) if match is not None else 0  # while the file is mapped


def cuda_can_pin(n_bytes: int = 2**26) -> str:
    """Pin and release ``n_bytes`` through the CUDA or HIP runtime of this process; return the
    obstacle, empty without one.
    """
    process = ctypes.CDLL(None)
    for vendor in ("cuda", "hip"):
        register = getattr(process, f"{vendor}HostRegister", None)
        if register is not None:
            block = ctypes.create_string_buffer(n_bytes)
            code = register(ctypes.byref(block), ctypes.c_size_t(n_bytes), 1)
            if code == 0:
                getattr(process, f"{vendor}HostUnregister")(ctypes.byref(block))
            return f"{vendor}HostRegister fails with code {code}" if code else ""
    return "no loaded library has cudaHostRegister"


class _PlannedError(Exception):
    """The exception that ends a load after its plan, before anything is allocated."""


def planned(settings: CommandSettings) -> tuple[Resolved, list[str]]:
    """Return the resolved settings and the warnings of a load that ends before memory is allocated.

    Raises ModelError if the model cannot be loaded.
    """
    from pyctl.cli.defaults import cache_budget
    from pyctl.cli.model_paths import check_files
    from pyctl.llama.loader import load

    check_files(settings)
    heard = BufferingHandler(capacity=1000)
    heard.setLevel(logging.WARNING)

    def announce(resolved: Resolved) -> None:
        raise _PlannedError(resolved)

    logging.getLogger().addHandler(heard)
    try:
        load(settings.model, None, announce, settings.drafts, settings.vision, pool=settings.pool)
    except _PlannedError as ended:
        resolved: Resolved = ended.args[0]
        texts = [record.getMessage() for record in heard.buffer if record.name.startswith("pyctl")]
        # A context that was reduced because none was given is not a fault.
        faults = [text for text in texts if not text.startswith("context reduced")]
        plan = resolved.memory
        return resolved, [*faults, *plan.warnings(cache_budget(settings.cache, plan))]
    finally:
        logging.getLogger().removeHandler(heard)
    raise AssertionError("a load announces its plan")

"""`pyctl models`: the models that are here, their sizes, and whether they fit this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyctl.cli.arguments import CommandSettings, parse_serve
from pyctl.cli.command_parser import CommandParser
from pyctl.errors import ConfigError
from pyctl.files.user_directory import user_directory
from pyctl.model_files import builtin_model, is_model_file
from pyctl.model_files.hub_cache import cached_files
from pyctl.text import one_line

__all__ = ["run_models"]

MIB = 2**20


def run_models(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """List the models of the caches, and of --models-dir and --models-preset; return 0. Raises
    ConfigError.
    """
    options, rest = _parser().parse_known_args(argv)
    rows = [_row(*model) for model in _iter_models(rest, environ)]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    width = max(len(row["name"]) for row in rows)
    print(f"{'name':{width}}  {'from':10}  {'MiB':>8}  context that fits")
    for row in rows:
        tokens = f"{row['n_ctx']:,} of {row['n_ctx_train']:,} tokens" if row["n_ctx"] else "none"
        fits = "; ".join(filter(None, (tokens, row["note"])))
        print(
            f"{row['name']:{width}}  {row['origin']:10}  {row['n_bytes'] // MIB:>8,}  "
            f"{one_line(fits)}"
        )
    return 0


def _parser() -> CommandParser:
    parser = CommandParser.beside_serve(
        "pyctl models",
        "pyctl models [--json] [--models-dir DIR] [--models-preset FILE] [flags of pyctl serve]",
        "List local models: downloads, and those of a directory or of presets, with their sizes "
        "and the context that fits the memory that is free now.",
    )
    parser.add_argument("--json", action="store_true", help="print every field as JSON")
    return parser


def _iter_models(
    argv: Sequence[str], environ: Mapping[str, str]
) -> Iterator[tuple[str, str, CommandSettings]]:
    """Yield name, origin and settings of each model; ``argv`` are flags of serve."""
    from pyctl.cli.presets import find_models  # only now: --help needs none of it

    router = parse_serve(argv, environ).router
    if cached_files(environ) or router.is_router:
        for preset in find_models(router, argv, environ):
            yield preset.card.name, preset.card.origin, preset.settings
    downloaded = (user_directory("cache", environ) / "models").glob("*/*.gguf")
    for path in sorted(path for path in downloaded if is_model_file(path.name)):
        yield path.stem, "download", parse_serve(["-m", str(path), *argv], environ)
    yield "(without -m)", "built-in", parse_serve(["-m", str(builtin_model()), *argv], environ)


def _row(name: str, origin: str, settings: CommandSettings) -> dict[str, Any]:
    """Return facts of a model; ``n_ctx`` is the context that fits, in tokens, 0 if none does or the
    file cannot be read.
    """
    from pyctl.cli.doctor_command import planned
    from pyctl.cli.model_paths import check_files, resolve_files
    from pyctl.llama.fit.memory_fit import has_room, required_memory
    from pyctl.llama.library.devices import model_files

    row = {
        "name": one_line(name),
        "origin": origin,
        "path": "",
        "n_bytes": 0,
        "n_ctx": 0,
        "n_ctx_train": 0,
        "note": "",
    }
    try:
        settings = resolve_files(replace(settings, hub=replace(settings.hub, offline=True)))
        row["path"] = path = settings.model.path
        row["n_bytes"] = sum(file.stat().st_size for file in model_files(Path(path)))
        check_files(settings)
        plan = required_memory(settings.model, settings.drafts, settings.vision)
        row["n_ctx_train"] = max(plan.n_ctx_train, plan.n_ctx)
        if not has_room(plan, is_known=False):
            resolved, notes = planned(settings)
            plan = resolved.memory
            row["note"] = "; ".join(notes[:1])
        row["n_ctx"] = 0 if any(device.shortage() for device in plan.places) else plan.n_ctx
    except (ConfigError, OSError) as error:
        row["note"] = str(error)
    return row

"""The models behind one address: of a directory, of the hub's cache, and of a preset file, each
with its flags.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path

from pyctl.cli.arguments import FLAGS, OWNERS, CommandSettings, converted, parse_serve
from pyctl.cli.command_parser import did_you_mean
from pyctl.cli.flag_aliases import IGNORED, NO_OP, REJECTED, InfoFlags
from pyctl.cli.logs import LogSettings
from pyctl.errors import ConfigError
from pyctl.mcp import ToolSettings
from pyctl.model_files import SPLIT_NAME, is_model_file
from pyctl.model_files.hub_cache import cached_files, choose, main_revision
from pyctl.server.model_card import ModelCard
from pyctl.server.server_settings import Cors, ListenSettings, RouterSettings, ServerSettings
from pyctl.settings.convert import INT32_MAX, TRUE_WORDS, Convert, number, on_off
from pyctl.settings.limit import limit
from pyctl.settings.setting import Flag
from pyctl.terminal import TerminalSettings

__all__ = ["SHARED_DISK", "Preset", "find_models", "models_in", "read_presets"]

log = logging.getLogger("pyctl")

MAX_MODELS = limit(
    256,
    "models of --models-dir, --models-preset and the hub's cache",
    "the program ends",
    "process",
)

MAX_PRESET_BYTES = limit(
    2**20, "the file of --models-preset", "the program ends", "process", "bytes"
)

EVERY = "*"
"""The section whose keys all models have, unless their own section overrides them."""

TOP = ""
"""The name of the lines before the first section of a preset file, such as its version."""

SHARED_DISK = ("cache_dir", "kv_cache", "disk_mib")
"""Fields of `DiskSettings` that all models of a process share."""

_OF_ALL = (
    InfoFlags,
    ListenSettings,
    RouterSettings,
    ServerSettings,
    Cors,
    LogSettings,
    TerminalSettings,
    ToolSettings,
)

_OF_PROCESS = {*SHARED_DISK, *(item.name for owner in _OF_ALL for item in fields(owner))}
"""Destinations of flags that all models share. In a section they are refused: the server would run
without them.
"""

_SHARED = {"ram_mib"}
"""Likewise, with a warning: llama-server's example of a preset file has it."""

_SECRET = {item.name for owner in OWNERS for item in fields(owner) if item.metadata.get("secret")}


@dataclass(frozen=True)
class Preset:
    """A model with its settings; on its ``card``, flags and section are without secrets. If it
    ``hides`` its file, the hub's cache does not list that.
    """

    card: ModelCard
    settings: CommandSettings
    on_start: bool = False
    keeps: bool = False
    hides: bool = False
    stop_seconds: float = 10.0
    warnings: tuple[str, ...] = ()


@dataclass
class _Known:
    """A model as it was found: the flags that name its files, and the keys of its section."""

    origin: str
    argv: list[str] = field(default_factory=list)
    section: dict[str, str] = field(default_factory=dict)


def find_models(
    router: RouterSettings, argv: Sequence[str], environ: Mapping[str, str]
) -> list[Preset]:
    """Return all models that ``router`` names, by name, with their flags.

    The flags are the section ``[*]``'s, then their own, then the command line's ``argv``;
    the last wins. Logs the warnings of sections.

    Raises ConfigError for a file that cannot be read, a key that is unknown or has no effect in a
    section, a wrong value, a model without a file, and no model at all.
    """
    fetched = cached_files(environ)
    models = {name: _Known("cache", ["-hf", name, "--offline"]) for name in fetched}
    if router.models_dir:
        for name, files in models_in(Path(router.models_dir).expanduser()).items():
            models[name] = _Known("models_dir", files)
    general = _add_sections(router, models)
    if not models:
        raise ConfigError(
            "no models: --models-dir has no GGUF file, and no section of --models-preset names one"
        )
    if len(models) > MAX_MODELS:
        raise ConfigError(f"{len(models)} models are more than {MAX_MODELS}")
    presets = [
        _preset(router, name, model, general, argv, environ)
        for name, model in sorted(models.items())
    ]
    _log_warnings(router, presets, parse_serve(argv, environ).warnings)
    used = {path for each in presets if each.hides for path in _fetched_by(each.settings, environ)}
    hidden = {
        name for name, path in fetched.items() if path in used and models[name].origin == "cache"
    }
    return [
        replace(each, card=replace(each.card, is_hidden=each.card.name in hidden))
        for each in presets
    ]


def _add_sections(router: RouterSettings, models: dict[str, _Known]) -> dict[str, str]:
    """Add the sections of the preset file to ``models``, and those that only it names; return the
    general section.

    Raises ConfigError for a key that is unknown or has no effect in a section, and for a section
    without a model.
    """
    sections = read_presets(Path(router.preset_path).expanduser()) if router.preset_path else {}
    for name, section in sections.items():
        for key in section:
            if _dest(key) in _OF_PROCESS:
                where = f"{router.preset_path}: [{name}]" if name else router.preset_path
                raise ConfigError(
                    f"{where}: {key} has no effect here: it belongs on the command line, for all "
                    "models"
                )
    if top := sections.pop(TOP, {}):
        log.warning(
            "%s: without effect above the sections: %s; use [*]", router.preset_path, ", ".join(top)
        )
    general = sections.pop(EVERY, {})
    for name, section in sections.items():
        model = models.setdefault(name, _Known("preset"))
        model.section = section
        if {"path", "hf_repo"} & set(map(_dest, section)):
            model.argv = []
            model.origin = "preset"
        elif not model.argv:
            where = f"{router.preset_path}: [{name}]"
            if unknown := [key for key in section if not _is_known(key)]:
                raise ConfigError(
                    f"{where}: unknown key {unknown[0]}{did_you_mean(unknown[0], _keys())}"
                )
            raise ConfigError(f"{where} needs the key model or hf-repo: no such model is installed")
    return general


_HEADER = re.compile(r"\[[ \t]*([^\]\s][^\]]*)\][ \t]*([;#].*)?")

_KEY = re.compile(r"([A-Za-z_][\w.-]*)[ \t]*=(.*)", re.ASCII)

_NOTE = re.compile(r"(^|[ \t])[;#].*")
"""A note to the end of the line. Within a word, as in "top_k;top_p", it is none, where llama-server
cuts the value.
"""


def read_presets(path: Path) -> dict[str, dict[str, str]]:
    """Return the sections of a preset file, and `TOP`, read as llama-server does: the last of equal
    keys wins, and ``version`` has no effect. Raises ConfigError.
    """
    try:
        if path.stat().st_size > MAX_PRESET_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_PRESET_BYTES} bytes")
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read --models-preset {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    section: dict[str, str] = {}
    sections = {TOP: section}
    for line_number, line in enumerate((line.strip(" \t") for line in lines), 1):
        if header := _HEADER.fullmatch(line):
            if (name := header[1].rstrip()) in sections:
                raise ConfigError(f"{path}: two models are called {name!r}")
            section = sections[name] = {}
        elif pair := _KEY.fullmatch(_NOTE.sub("", line)):
            section.pop(pair[1], None)  # the last of several spellings also wins
            section[pair[1]] = pair[2].strip(" \t")
        elif _NOTE.sub("", line):
            raise ConfigError(
                f"{path} is not an INI file: line {line_number} is neither [NAME] nor KEY = VALUE"
            )
    for section in sections.values():
        section.pop("version", None)
    return sections


def models_in(directory: Path) -> dict[str, list[str]]:
    """Return the models of a directory by name, each with the flags that name its files.

    A file is a model, and so is a folder: of a file or the first of several, with the encoder in a
    file that is called mmproj. Raises ConfigError if the directory cannot be read.
    """
    try:
        entries = sorted(directory.iterdir())
        found = {}
        for entry in entries:
            files = sorted(entry.iterdir()) if entry.is_dir() else [entry]
            models = [file for file in files if is_model_file(file.name)]
            if not models:
                continue
            encoders = [
                file for file in files if file.name.endswith(".gguf") and "mmproj" in file.name
            ]
            encoder = ["--mmproj", str(encoders[0])] if encoders and entry.is_dir() else []
            split = SPLIT_NAME.match(entry.name)
            name = entry.name if entry.is_dir() else split[1] if split else entry.stem
            found[name] = ["-m", str(models[0]), *encoder]
        return found
    except OSError as error:
        raise ConfigError(f"cannot read --models-dir {directory}: {error.strerror}") from error


def _fetched_by(settings: CommandSettings, environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files in the hub's cache that are a model and its draft model."""
    hub = settings.hub
    for name, file in ((hub.hf_repo, hub.hf_file), (hub.draft_repo, settings.drafts.draft_path)):
        repo, _, quant = name.partition(":")
        if repo and (revision := main_revision(repo, environ)) is not None:
            with suppress(ConfigError):
                yield revision.path / choose(revision.names, quant, file, repo)


def _preset(
    router: RouterSettings,
    name: str,
    known: _Known,
    general: Mapping[str, str],
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> Preset:
    """Return the model ``name`` with the flags of its section, of the general section and of the
    command line.

    The section's flags are first parsed without others, for the names that they give the model, and
    once with the command line. Raises ConfigError, which names the section.
    """
    # The model's own keys are last: they win over another spelling of the same flag.
    section = {
        key: value for key, value in general.items() if key not in known.section
    } | known.section
    where = f"{router.preset_path}: [{name}]" if section else name
    shared = [key for key in section if _dest(key) in _SHARED]
    try:
        own = [
            *known.argv,
            *_argv({key: value for key, value in section.items() if key not in shared}),
        ]
        aliases = parse_serve(own, {}).model.alias
        settings = parse_serve([*own, *argv], environ)
        if settings.model.workers:
            # When one model frees memory of a worker, the worker drops the graphs of the others,
            # which ends the client.
            raise ConfigError("--rpc serves one model: use -m")
        facts = {
            key: converted(key, convert, section[key])
            for key, convert in _OWN_KEYS.items()
            if key in section
        }
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return Preset(
        _card(name, known, section, aliases, settings),
        replace(settings, model=replace(settings.model, alias=(name,))),
        on_start=facts.get("load-on-startup", False),
        keeps=facts.get("keep", False),
        hides=facts.get("dedup-cache-models", False) and known.origin == "preset",
        stop_seconds=max(facts.get("stop-timeout", 10.0), 0.0),
        warnings=(
            *settings.warnings,
            *(f"{key} has no effect: all models share --cache-ram" for key in shared),
        ),
    )


def _card(
    name: str,
    known: _Known,
    section: Mapping[str, str],
    aliases: Sequence[str],
    settings: CommandSettings,
) -> ModelCard:
    """Return the description of the model ``name`` for clients, without the secrets of its
    ``section``.
    """
    shown = {key: value for key, value in section.items() if _dest(key) not in _SECRET}
    return ModelCard(
        name,
        tuple(alias for alias in aliases if alias != name),
        tuple(sorted(set(settings.model.tags))),
        settings.model.path,
        known.origin,
        ("pyctl", "serve", *known.argv, *_argv(shown)),
        "".join(f"{key} = {value}\n" for key, value in shown.items()),
        bool(settings.vision.mmproj_path or settings.hub.mmproj_url or settings.hub.hf_repo),
    )


def _log_warnings(router: RouterSettings, presets: Iterable[Preset], usual: Sequence[str]) -> None:
    """Log each warning once, with the first model that has it; ``usual`` are the command line's."""
    names: dict[str, list[str]] = {}
    for preset in presets:
        for text in preset.warnings:
            names.setdefault(text, []).append(preset.card.name)
    for text, (first, *more) in names.items():
        if text not in usual:
            log.warning(
                "%s: [%s]%s: %s",
                router.preset_path,
                first,
                f" and {len(more)} more" if more else "",
                text,
            )


_OWN_KEYS: Mapping[str, Convert] = {
    "stop-timeout": number(high=INT32_MAX),
    **dict.fromkeys(("load-on-startup", "dedup-cache-models", "keep"), on_off),
}
"""Keys that are not flags."""


def _argv(section: Mapping[str, str]) -> list[str]:
    """Return the words of a command line for those keys of a section that are flags."""
    return [
        word
        for key, value in section.items()
        if key not in _OWN_KEYS
        for word in _words(key, value)
    ]


def _words(key: str, value: str) -> list[str]:
    """Return the words of a command line for a key of a preset: a flag without its dashes, or its
    variable.

    An unknown flag stays as typed, for the reader of command lines to refuse.
    """
    name, takes = _flag(key)
    if isinstance(takes, int):
        return [name, *[value] * takes] if takes or value.lower() in TRUE_WORDS else []
    if takes.bare is not None:  # apart, a value that starts with a dash would be the next flag
        return [f"{takes.names.split()[-1]}={value}"]
    if takes.convert is not None:
        return [name, value]
    is_on = converted(key, on_off, value)
    positive = takes.names.split()
    negative = takes.off.split()
    if name in negative:
        return [name if is_on else positive[0]]
    return [name] if is_on else negative[:1]


def _keys() -> list[str]:
    """Return every key that a section may have, longest spellings of flags included."""
    return [*_by_key(), *_OWN_KEYS]


def _is_known(key: str) -> bool:
    return bool({key, key.replace("_", "-")} & {*_keys()})


def _dest(key: str) -> str:
    """Return the destination of the flag that a key of a preset stands for; empty if there is
    none.
    """
    flag = _flag(key)[1]
    return flag.dest if isinstance(flag, Flag) else ""


def _flag(key: str) -> tuple[str, Flag | int]:
    """Return the name of a key's flag, and the flag, or the number of values of one without
    effect.
    """
    return _by_key().get(key) or _by_key().get(key.replace("_", "-")) or (f"--{key}", 1)


@cache
def _by_key() -> dict[str, tuple[str, Flag | int]]:
    """Return `_flag` of every key of a preset."""
    by_key: dict[str, tuple[str, Flag | int]] = {}
    for names in (NO_OP, IGNORED, REJECTED):
        by_key |= {name.lstrip("-"): (name, n) for name, n in names.items()}
    for flag in (flag for flags in FLAGS.values() for flag in flags):
        for name in flag.spellings():
            by_key[name.lstrip("-")] = name, flag
        if flag.env:
            by_key[flag.env] = flag.names.split()[-1], flag
    return by_key

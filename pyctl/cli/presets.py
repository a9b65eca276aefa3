"""The models behind one address: of a directory, of the hub's cache, and of a preset file, each with its flags."""

from __future__ import annotations

import configparser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pyctl.cli.arguments import FLAGS, CommandSettings, parse_serve
from pyctl.cli.other_forms import IGNORED, NO_OP, REJECTED, REMOVED
from pyctl.convert import FALSE_WORDS, TRUE_WORDS
from pyctl.errors import ConfigError
from pyctl.limit import limit
from pyctl.models import SPLIT_NAME, is_model_file
from pyctl.models.hub_cache import cached_files, choose, newest
from pyctl.server import RouterSettings
from pyctl.setting import Flag

__all__ = ["Preset", "find_models", "models_in", "read_presets"]

MOST_MODELS = limit(256, "models of --models-dir, --models-preset and the hub's cache", "the program ends", "process")

MOST_PRESET_BYTES = limit(2**20, "the file of --models-preset", "the program ends", "process", "bytes")

EVERY = "*"
"""The section whose keys all models have, unless their own section says otherwise."""

TOP = "\0"
"""The name of what stands before the first section of a preset file, such as its version."""


@dataclass(frozen=True)
class Preset:
    """One model with its settings. ``argv`` are its own flags, ``text`` its section, for GET /models, which does not
    list it if it ``is_hidden``."""

    name: str
    settings: CommandSettings
    argv: tuple[str, ...] = ()
    text: str = ""
    origin: str = "preset"
    aliases: tuple[str, ...] = ()
    on_start: bool = False
    keeps: bool = False
    stop_seconds: float = 10.0
    is_hidden: bool = False


@dataclass
class _Known:
    """A model as it was found: the flags that name its files, and the keys of its section."""

    origin: str
    argv: list[str] = field(default_factory=list)
    section: dict[str, str] = field(default_factory=dict)


def find_models(router: RouterSettings, argv: Sequence[str], environ: Mapping[str, str]) -> list[Preset]:
    """All models that ``router`` names, by name, with their flags: those of the section ``[*]``, then of their own,
    then of the command line ``argv``; the last wins.

    Raises ConfigError for a file that cannot be read, an unknown key, a wrong value, a model of no file, and none at
    all.
    """
    fetched = cached_files(environ)
    found = {name: _Known("cache", ["-hf", name, "--offline"]) for name in fetched}
    if router.models_dir:
        for name, files in models_in(Path(router.models_dir).expanduser()).items():
            found[name] = _Known("models_dir", files)
    sections = read_presets(Path(router.preset_path).expanduser()) if router.preset_path else {}
    general = sections.pop(EVERY, {})
    for name, section in sections.items():
        known = found.setdefault(name, _Known("preset"))
        known.section = section
        if {"model", "m", "LLAMA_ARG_MODEL", "hf-repo", "hf", "hfr", "LLAMA_ARG_HF_REPO"} & section.keys():
            known.argv, known.origin = [], "preset"
        elif not known.argv:
            raise ConfigError(f"{router.preset_path}: [{name}] needs the key model or hf-repo: no such model is here")
    if not found:
        raise ConfigError("no models: --models-dir has no GGUF file, and no section of --models-preset names one")
    if len(found) > MOST_MODELS:
        raise ConfigError(f"{len(found)} models are more than {MOST_MODELS}")
    presets = [_preset(router, name, known, general, argv, environ) for name, known in sorted(found.items())]
    named = [
        each for each in presets if _truth(each.name, "dedup-cache-models", {**general, **found[each.name].section})
    ]
    used = {path for each in named if each.origin == "preset" for path in _fetched_by(each.settings, environ)}
    return [replace(each, is_hidden=each.origin == "cache" and fetched[each.name] in used) for each in presets]


def read_presets(path: Path) -> dict[str, dict[str, str]]:
    """The sections of a preset file. Raises ConfigError."""
    parser = configparser.ConfigParser(
        interpolation=None,
        delimiters=("=",),
        comment_prefixes=(";", "#"),
        default_section=TOP,
        empty_lines_in_values=False,
    )
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    try:
        if path.stat().st_size > MOST_PRESET_BYTES:
            raise ConfigError(f"{path} is larger than {MOST_PRESET_BYTES} bytes")
        parser.read_string(f"[{TOP}]\n{path.read_text(encoding='utf-8')}", str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --models-preset {path}: {getattr(error, 'strerror', None) or error}") from error
    except configparser.DuplicateSectionError as error:
        raise ConfigError(f"{path}: two models are called {error.section!r}") from error
    except configparser.DuplicateOptionError as error:
        raise ConfigError(f"{path}: [{error.section}] has the key {error.option!r} twice") from error
    except configparser.Error as error:
        raise ConfigError(f"{path} is no INI file: {' '.join(str(error).split())}") from error
    top = parser.defaults()
    return {
        name: {key: value for key, value in parser.items(name) if key not in top or parser.get(name, key) != top[key]}
        for name in parser.sections()
    }


def models_in(directory: Path) -> dict[str, list[str]]:
    """The models of a directory by name, each with the flags that name its files.

    A file is a model; a folder is one, too: of a file or the first of several, with the encoder in a file that is
    called mmproj. Raises ConfigError if the directory cannot be read.
    """
    try:
        entries = sorted(directory.iterdir())
        found = {}
        for entry in entries:
            files = sorted(entry.iterdir()) if entry.is_dir() else [entry]
            models = [each for each in files if is_model_file(each.name)]
            if not models:
                continue
            encoders = [each for each in files if each.name.endswith(".gguf") and "mmproj" in each.name]
            encoder = ["--mmproj", str(encoders[0])] if encoders and entry.is_dir() else []
            split = SPLIT_NAME.match(entry.name)
            name = entry.name if entry.is_dir() else split[1] if split else entry.stem
            found[name] = ["-m", str(models[0]), *encoder]
        return found
    except OSError as error:
        raise ConfigError(f"cannot read --models-dir {directory}: {error.strerror}") from error


def _fetched_by(settings: CommandSettings, environ: Mapping[str, str]) -> Iterator[Path]:
    """The files in the hub's cache that a model and its draft model are."""
    hub = settings.hub
    for name, file in ((hub.hf_repo, hub.hf_file), (hub.draft_repo, settings.drafts.draft_path)):
        repo, _, quant = name.partition(":")
        if repo and (revision := newest(repo, environ)) is not None:
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
    section = {**general, **known.section}
    where = f"{router.preset_path}: [{name}]" if section else name
    try:
        own = [*known.argv, *(word for key in section if key not in _OWN_KEYS for word in _words(key, section[key]))]
        aliases = parse_serve(own, {}).model.alias
        settings = parse_serve([*own, *argv], environ)
        if settings.model.workers:
            # When one model frees memory of a worker, the worker drops the graphs of the others, which ends the client.
            raise ConfigError("--rpc serves one model: use -m")
        stop_seconds = float(section.get("stop-timeout", "10"))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: stop-timeout: {section['stop-timeout']!r} is not a number") from error
    return Preset(
        name,
        replace(settings, model=replace(settings.model, alias=(name,))),
        tuple(own),
        "".join(f"{key} = {value}\n" for key, value in section.items()),
        known.origin,
        tuple(alias for alias in aliases if alias != name),
        on_start=_truth(where, "load-on-startup", section),
        keeps=_truth(where, "keep", section),
        stop_seconds=max(stop_seconds, 0.0),
    )


_OWN_KEYS = ("load-on-startup", "stop-timeout", "dedup-cache-models", "keep")
"""Keys that are no flags."""


def _truth(where: str, key: str, section: Mapping[str, str]) -> bool:
    value = section.get(key, "off").lower()
    if value not in TRUE_WORDS | FALSE_WORDS:
        raise ConfigError(f"{where}: {key}: {value!r} is none of on, off, true, false, 1, 0")
    return value in TRUE_WORDS


def _words(key: str, value: str) -> list[str]:
    """The words of a command line for a key of a preset: a flag without its dashes, or its variable.

    A flag that is unknown stays as it is, for the reader of command lines to refuse.
    """
    name, takes = _by_key().get(key, (f"--{key}", 1))
    if isinstance(takes, int):
        return [name, value] if takes else [name] if value.lower() in TRUE_WORDS else []
    if takes.convert is not None:
        return [name, value]
    if value.lower() not in TRUE_WORDS | FALSE_WORDS:
        raise ConfigError(f"{key}: {value!r} is none of on, off, true, false, 1, 0")
    is_on = value.lower() in TRUE_WORDS
    positive, negative = takes.names.split(), takes.off.split()
    if name in negative:
        return [name if is_on else positive[0]]
    return [name] if is_on else negative[:1]


def _by_key() -> dict[str, tuple[str, Flag | int]]:
    """Every key of a preset: the name of its flag, and the flag, or how many values one without effect takes."""
    found: dict[str, tuple[str, Flag | int]] = {}
    for names in (NO_OP, IGNORED, REJECTED, dict.fromkeys(REMOVED, 1)):
        found |= {name.lstrip("-"): (name, n) for name, n in names.items()}
    for flag in (flag for flags in FLAGS.values() for flag in flags):
        for name in flag.spellings():
            found[name.lstrip("-")] = name, flag
        if flag.env:
            found[flag.env] = flag.names.split()[-1], flag
    return found

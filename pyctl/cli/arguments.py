"""Settings from command lines and variables: reads the flags and settles what several of them say together.

Everything wrong raises ConfigError with one line of text. The flags themselves are in ``flag_table``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from pyctl import __version__
from pyctl.chat.template import keep_reasoning
from pyctl.cli import flag_table
from pyctl.cli.flag_table import IGNORED, NO_OP, REJECTED, SPECULATIVE
from pyctl.cli.flags import Flag, Given, help_text, read_flags
from pyctl.cli.settings import (
    Action,
    CacheSettings,
    ChatSettings,
    DiskSettings,
    FormatSettings,
    LogSettings,
    SamplingDefaults,
    ServerSettings,
    ServeSettings,
    TerminalSettings,
)
from pyctl.engine.llama.model_settings import ModelSettings
from pyctl.engine.sampling import Sampling
from pyctl.errors import ConfigError, RequestError
from pyctl.models import HubSettings

__all__ = ["parse_chat", "parse_serve"]

_SHARED: dict[str, tuple[Flag, ...]] = {
    "general": flag_table.GENERAL,
    "model": flag_table.MODEL,
    "model from the network": flag_table.HUB,
    "context": flag_table.CONTEXT,
    "cache": flag_table.CACHE,
    "disk cache": flag_table.DISK,
    "sampling": flag_table.SAMPLING,
    "chat format": flag_table.FORMAT,
    "log": flag_table.LOG,
}


def parse_serve(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> ServeSettings:
    """The settings of ``pyctl serve``; ``argv`` begins after the command.

    --help and --version print and raise SystemExit(0); anything that cannot be served raises ConfigError.
    """
    given = _read("serve [-m FILE | -hf REPO] [flags]", argv, environ, {**_SHARED, "server": flag_table.SERVER})
    values, warnings = _resolve(given)
    return ServeSettings(server=_fill(ServerSettings, values), **_shared(values, warnings))


def parse_chat(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> ChatSettings:
    """The settings of ``pyctl chat``, likewise. The server's own flags are taken and have no effect."""
    given = _read(
        "chat [-m FILE | -hf REPO | --url URL] [flags]", argv, environ, {"chat": flag_table.TERMINAL, **_SHARED}
    )
    values, warnings = _resolve(given)
    if values.get("url"):
        for dest in ("path", "hf_repo", "model_url"):
            if dest in given.typed:
                raise ConfigError(f"--url and {given.typed[dest]} exclude each other: that server has its own model")
        here = (
            flag_table.MODEL,
            flag_table.HUB,
            flag_table.CONTEXT,
            flag_table.CACHE,
            flag_table.DISK,
            flag_table.FORMAT,
        )
        idle = {flag.dest for group in here for flag in group}
        warnings += tuple(f"{name} has no effect with --url" for dest, name in given.typed.items() if dest in idle)
    if values.get("prompt") == "":
        raise ConfigError("--prompt is empty")
    return ChatSettings(terminal=_fill(TerminalSettings, values), **_shared(values, warnings))


def _shared(values: Mapping[str, Any], warnings: tuple[str, ...]) -> dict[str, Any]:
    """The members that the settings of both commands have."""
    return {
        "model": _fill(ModelSettings, values),
        "hub": _fill(HubSettings, values),
        "cache": _fill(CacheSettings, values),
        "disk": _fill(DiskSettings, values),
        "sampling": _sampling(values),
        "format": _fill(FormatSettings, values),
        "log": _fill(LogSettings, values),
        "warnings": warnings,
        "action": _action(values),
    }


def _read(usage: str, argv: Sequence[str], environ: Mapping[str, str], groups: Mapping[str, Iterable[Flag]]) -> Given:
    server_only = {name: int(flag.convert is not None) for flag in flag_table.SERVER for name in flag.spellings()}
    flags = [flag for group in groups.values() for flag in group]
    given = read_flags(argv, environ, flags, {**NO_OP, **SPECULATIVE, **IGNORED, **REJECTED, **server_only})
    if "help" in given.values:
        print(help_text(f"pyctl {usage}", groups, _defaults()), end="")
        raise SystemExit(0)
    if "version" in given.values:
        print(f"pyctl {__version__}")
        raise SystemExit(0)
    if refused := [name for name in given.unused if name in REJECTED]:
        raise ConfigError(f"{refused[0]} is for llama-server only: pyctl can neither answer it nor do without")
    known = {flag.env for flag in (*flags, *flag_table.SERVER)}
    variables = (
        variable
        for variable in sorted(environ)
        if variable.startswith("LLAMA_ARG_") and not {variable, variable.replace("_NO_", "_", 1)} & known
    )
    unused = (*(name for name in given.unused if name not in NO_OP), *variables)
    return Given(given.values, given.typed, unused)


def _action(values: Mapping[str, Any]) -> Action:
    if values.get("list_devices"):
        return "devices"
    return "models" if values.get("list_models") else "run"


def _unused(names: Sequence[str]) -> tuple[str, ...]:
    """The one line about flags and variables without effect; none if there are none."""
    drafts = [name for name in names if name in SPECULATIVE or name.startswith("LLAMA_ARG_SPEC_")]
    rest = [name for name in names if name not in drafts]
    parts = [f"without effect here: {', '.join(rest)}"] if rest else []
    if drafts:
        parts.append(f"no speculative decoding: {', '.join(drafts)}")
    return ("; ".join(parts),) if parts else ()


def _resolve(given: Given) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Settle what several flags say about one value."""
    values, warnings = dict(given.values), list(_unused(given.unused))

    if _chosen(given, "load_mode", ("mmap", "mlock")):
        mapped = values.get("mmap", True)
        locked = values.get("mlock", False)
        values["load_mode"] = {(True, True): "mmap+mlock", (True, False): "mmap", (False, True): "mlock"}.get(
            (mapped, locked), "none"
        )
    if _chosen(given, "rope_freq_scale", ("rope_scale",)):
        values["rope_freq_scale"] = 1.0 / values["rope_scale"]
    if _chosen(given, "chat_template", ("template_file",)):
        values["chat_template"] = values["template_file"]

    n_batch = values.get("n_batch", ModelSettings.n_batch)
    if values.get("n_ubatch", ModelSettings.n_ubatch) > n_batch:
        if "n_ubatch" in values:
            warnings.append(f"--ubatch-size {values['n_ubatch']} is cut to --batch-size {n_batch}")
        values["n_ubatch"] = n_batch
    kwargs = dict(values.get("template_kwargs", {}))
    if values.get("reasoning", "auto") != "auto":
        kwargs["enable_thinking"] = values["reasoning"] == "on"
    if values.get("reasoning_effort", "default") != "default":
        kwargs["reasoning_effort"] = values["reasoning_effort"]
    preserve = bool(values.get("reasoning_preserve", kwargs.pop("preserve_reasoning", True)))
    values["template_kwargs"] = {**keep_reasoning(preserve), **kwargs}
    if values.get("path") and (download := [given.typed[x] for x in ("hf_repo", "model_url") if x in given.typed]):
        # As in llama-server, the file is where that model was to be kept; here it is the model.
        warnings.append(f"{download[0]} has no effect beside {given.typed.get('path', 'LLAMA_ARG_MODEL')}")
    if values.get("cache_dir"):
        for dest, name in (("n_slots", "--prefix-cache-slots"), ("ram_mib", "--cache-ram")):
            if values.get(dest) == 0:
                raise ConfigError(f"--kv-cache-dir needs the prefix cache, which {name} 0 turns off")
    else:
        disk = {flag.dest for flag in flag_table.DISK}
        idle = (name for dest, name in given.typed.items() if dest in disk)
        warnings += [f"{name} has no effect without --kv-cache-dir" for name in idle]
    if not values.get("jinja", True):
        warnings.append("--no-jinja has no effect here")
    if values.get("lora_unapplied"):
        values["lora"] = tuple((path, 0.0) for path, _ in values.get("lora", ()))
    if "n_ctx_per_seq" in values and not values.get("n_ctx"):
        values["n_ctx"] = values["n_ctx_per_seq"] * values.get("n_seqs", ModelSettings.n_seqs)
    values["api_keys"] = (*values.get("api_keys", ()), *values.get("key_file", ()))
    return values, tuple(warnings)


def _chosen(given: Given, dest: str, others: Sequence[str]) -> bool:
    """Whether ``others``, which say the same in another way, count instead of ``dest``; both typed is an error."""
    typed = [given.typed[other] for other in others if other in given.typed]
    if typed and dest in given.typed:
        raise ConfigError(f"{given.typed[dest]} and {typed[0]} exclude each other")
    return bool(typed) or (dest not in given.values and any(other in given.values for other in others))


def _sampling(values: Mapping[str, Any]) -> SamplingDefaults:
    known = {item.name for item in fields(Sampling)}
    set_here = {name: value for name, value in values.items() if name in known}
    try:
        sampling = Sampling(**set_here)
    except RequestError as error:
        raise ConfigError(str(error)) from error
    n_predict = values.get("n_predict", -1)
    return SamplingDefaults(sampling, n_predict, frozenset(set_here) | values.keys() & {"n_predict"})


def _fill(settings: type[Any], values: Mapping[str, Any]) -> Any:
    return settings(**{item.name: values[item.name] for item in fields(settings) if item.name in values})


def _defaults() -> dict[str, Any]:
    parts = (
        *(ModelSettings(), HubSettings(), CacheSettings(), DiskSettings(), Sampling(), FormatSettings()),
        *(ServerSettings(), TerminalSettings(), LogSettings()),
    )
    shown = {name: value for part in parts for name, value in asdict(part).items()}
    return {
        **shown,
        "n_predict": -1,
        "seed": -1,
        "mmap": True,
        "fit": "on",
        "fit_target": "1024",
        "reasoning_preserve": True,
        "jinja": True,
        "reasoning": "auto",
    }

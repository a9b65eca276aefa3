"""Settings from command lines and environment variables: reads the flags and resolves their
combinations.

Every error raises ConfigError with one line of text. Each setting is declared in the class that its
consumer gets (`OWNERS`), with its flag; other spellings are in `flag_aliases`.

Flags are read in llama-server's ways: several letters after one dash, underscores for dashes,
LLAMA_ARG_NO_* for a negation, and the last of several wins.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_type_hints

from pyctl.cache.cache_settings import (
    DEFAULT_DAILY_MIB,
    FREE_PART,
    CacheSettings,
    DiskSettings,
    default_directory,
)
from pyctl.chat import FormatSettings, keep_reasoning
from pyctl.cli.flag_aliases import (
    FURTHER,
    IGNORED,
    INSTEAD,
    NO_OP,
    OF_TOOLS,
    REJECTED,
    REMOVED,
    BoundBySchema,
    FlagAliases,
    InfoFlags,
)
from pyctl.cli.help import help_text
from pyctl.cli.logs import VERBOSE, LogSettings
from pyctl.cli.programs import LAUNCH, LaunchSettings
from pyctl.cli.version import print_version
from pyctl.engine.draft.ngram_settings import NgramSettings
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.sampling import RANDOM_SEED, Sampling
from pyctl.errors import ConfigError, RequestError
from pyctl.llama.settings.draft_settings import AUTOMATIC, AUTOMATIC_LENGTH, PRIVATE, DraftSettings
from pyctl.llama.settings.model_settings import SERVED_SEQS, ModelSettings
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.llama.settings.vision_settings import VisionSettings
from pyctl.mcp import ToolSettings
from pyctl.model_files import HubSettings
from pyctl.requests.reply_settings import ReplySettings
from pyctl.server.server_settings import Cors, ListenSettings, RouterSettings, ServerSettings
from pyctl.settings.convert import FALSE_WORDS, Convert, on_off
from pyctl.settings.setting import (
    CACHE,
    CHAT,
    CONTEXT,
    DISK,
    FORMAT,
    GENERAL,
    HUB,
    LOG,
    MODEL,
    SAMPLING,
    SERVER,
    SPECULATION,
    TOOLS,
    Flag,
    Section,
    class_flags,
    fill,
)
from pyctl.terminal import TerminalSettings

__all__ = [
    "FLAGS",
    "OWNERS",
    "CommandSettings",
    "converted",
    "kept_flags",
    "parse_chat",
    "parse_launch",
    "parse_serve",
]


@dataclass(frozen=True)
class ParsedFlags:
    """The given flags: values by destination, the name typed for each, and names that were taken
    without effect.

    ``words`` are the command line's, split by flag, each with its destination.
    """

    values: Mapping[str, Any]
    typed: Mapping[str, str]
    unused: tuple[str, ...]
    words: tuple[tuple[str, list[str]], ...] = ()


def read_flags(
    argv: Sequence[str],
    environ: Mapping[str, str],
    flags: Iterable[Flag],
    unused: Mapping[str, int],
) -> ParsedFlags:
    """Read ``argv``, then ``environ`` for the flags that it does not set.

    ``unused`` are names that are accepted without effect, with the number of values after each.
    Raises ConfigError for any other name, and for a value that is missing or wrong.
    """
    flags = tuple(flags)
    by_spelling = {name: flag for flag in flags for name in flag.spellings()}
    values: dict[str, Any] = {}
    typed: dict[str, str] = {}
    ignored: dict[str, None] = {}
    words: list[tuple[str, list[str]]] = []
    rest = list(argv)
    while rest:
        before = list(rest)
        dest = ""
        word = rest.pop(0)
        name, equals, attached = word.partition("=") if word.startswith("--") else (word, "", "")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if equals:
            rest.insert(0, attached)
        if (flag := by_spelling.get(name)) is not None:
            value = _typed_value(name, flag, rest, bool(equals))
            joined = flag.many and flag.dest in typed
            values[flag.dest] = values[flag.dest] + value if joined else value
            typed[flag.dest] = name
            dest = flag.dest
        elif name in unused:
            if len(rest) < unused[name]:
                raise ConfigError(f"{name} needs a value")
            del rest[: unused[name]]
            ignored[name] = None
        elif not name.startswith("-") or not name.strip("-"):
            hint = f"; did you mean -m {word}?" if word.endswith(".gguf") else ""
            raise ConfigError(f"unexpected argument {word!r}{hint}")
        else:
            raise ConfigError(f"unknown flag {name}{_hint(name, by_spelling)}")
        words.append((dest, before[: len(before) - len(rest)]))
    for flag in flags:
        if flag.env and flag.dest not in typed:
            _read_env(flag, environ, values)
    return ParsedFlags(values, typed, tuple(ignored), tuple(words))


_MEANT = {
    "context": "--ctx-size",
    "layers": "--gpu-layers",
    "temperature": "--temp",
    "draft": "--spec-draft-n-max",
}
"""Words of names that people type, and the flags that they look for."""


def _hint(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with a flag that has an effect: one of ``known``."""
    from pyctl.cli.command_parser import closest, did_you_mean

    word = closest(name.lstrip("-"), _MEANT)
    return f"; did you mean {_MEANT[word]}?" if word else did_you_mean(name, known)


def _typed_value(name: str, flag: Flag, rest: list[str], attached: bool) -> Any:
    if flag.convert is None:
        if attached:
            raise ConfigError(f"{name} takes no value")
        return False if name in flag.off.split() else flag.const
    if flag.bare is not None and not attached and (not rest or rest[0].startswith("-")):
        return flag.convert(flag.bare)
    if not rest:
        raise ConfigError(f"{name} needs a value")
    return converted(name, flag.convert, rest.pop(0))


def _read_env(flag: Flag, environ: Mapping[str, str], values: dict[str, Any]) -> None:
    if flag.off and flag.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1) in environ.keys() - {
        flag.env
    }:
        values[flag.dest] = False
        return
    text = environ.get(flag.env, "")
    if not text:
        return
    value = converted(flag.env, flag.convert or on_off, text)
    if flag.convert is None and not value and not flag.off:
        return
    if flag.convert is None and value:
        value = flag.const
    values[flag.dest] = values.get(flag.dest, ()) + value if flag.many else value


def converted(name: str, convert: Convert, text: str) -> Any:
    """Return the value of the flag, variable or key ``name``. Raises ConfigError."""
    try:
        return convert(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


Action: TypeAlias = Literal["run", "devices", "models"]
"""The user's aim: to run, or to list devices or fetched models."""


@dataclass(frozen=True)
class CommandSettings:
    """The settings of a `pyctl serve` or `pyctl chat` command; ``warnings`` are lines for the user.

    ``request_fields`` are the values that the user set, not the defaults, as fields of a
    llama-server request.
    """

    listen: ListenSettings
    router: RouterSettings
    format: FormatSettings
    hub: HubSettings
    cache: CacheSettings
    replies: ReplySettings
    server: ServerSettings
    engine: EngineSettings
    disk: DiskSettings
    log: LogSettings
    terminal: TerminalSettings
    model: ModelSettings
    vision: VisionSettings
    pool: PoolSettings
    drafts: DraftSettings
    ngrams: NgramSettings
    tools: ToolSettings
    request_fields: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    action: Action = "run"


_PARTS = {
    name: hint
    for name, hint in get_type_hints(CommandSettings).items()
    if hasattr(hint, "__dataclass_fields__")
}
"""The classes of `CommandSettings` by their fields."""

OWNERS: tuple[type[Any], ...] = (InfoFlags, *_PARTS.values(), Sampling, Cors, FlagAliases)
"""Every class with settings that flags set, in the order of --help within a section."""

_ALL = (*(pair for owner in OWNERS for pair in class_flags(owner)), *FURTHER)

_ORDER = (
    GENERAL,
    MODEL,
    HUB,
    CONTEXT,
    CACHE,
    DISK,
    SAMPLING,
    SPECULATION,
    FORMAT,
    LOG,
    SERVER,
    TOOLS,
    CHAT,
)

FLAGS: Mapping[Section, tuple[Flag, ...]] = {
    section: tuple(flag for where, flag in _ALL if where is section) for section in _ORDER
}
"""Every flag that does something, by its section of --help."""

_UNUSED = {**NO_OP, **IGNORED, **REJECTED}

_OF_SERVE = {section: flags for section, flags in FLAGS.items() if section is not CHAT}


def parse_serve(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> CommandSettings:
    """Return the settings of ``pyctl serve``; ``argv`` starts after the command.

    --help and --version print and raise SystemExit(0); anything that cannot be served raises
    ConfigError.
    """
    return _settings(
        _read("serve", "[-m FILE | -hf REPO] [flags]", argv, environ, _OF_SERVE),
        environ,
        SERVED_SEQS,
    )


def kept_flags(argv: Sequence[str], dropped: Collection[str]) -> list[str]:
    """Return the flags of ``pyctl serve`` without those whose destinations are ``dropped``, and
    without their values.
    """
    parsed = read_flags(argv, {}, [flag for flags in _OF_SERVE.values() for flag in flags], _UNUSED)
    return [word for dest, words in parsed.words if dest not in dropped for word in words]


def parse_launch(
    program: str, argv: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[CommandSettings, LaunchSettings]:
    """Return ``pyctl launch``'s settings: the server's that it may start, and its own; likewise."""
    own = tuple(flag for _, flag in class_flags(LaunchSettings))
    usage = f"{program} [--url URL | flags of a server] [-- arguments of {program}]"
    parsed = _read("launch", usage, argv, environ, {LAUNCH: own, **_OF_SERVE})
    # The address and the key of a running server.
    allowed = {flag.dest for flag in own} | {"hosts", "api_keys", "key_file", "api_prefix", "path"}
    others = tuple(name for dest, name in parsed.typed.items() if dest not in allowed)
    return _settings(parsed, environ, SERVED_SEQS), fill(
        LaunchSettings, parsed.values, server_flags=others
    )


def parse_chat(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> CommandSettings:
    """Return the settings of ``pyctl chat``; the server's own flags have no effect. Raises
    ConfigError if flags conflict.
    """
    sections = {
        CHAT: FLAGS[CHAT],
        **{section: flags for section, flags in FLAGS.items() if section is not SERVER},
    }
    parsed = _read("chat", "[-m FILE | -hf REPO | --url URL] [flags]", argv, environ, sections)
    warnings: list[str] = []
    if parsed.values.get("url"):
        for dest in ("path", "hf_repo", "model_url"):
            if dest in parsed.typed:
                raise ConfigError(
                    f"--url and {parsed.typed[dest]} exclude each other: that server has its own "
                    "model"
                )
        idle = {
            flag.dest
            for section in (MODEL, HUB, CONTEXT, CACHE, DISK, SPECULATION, FORMAT)
            for flag in FLAGS[section]
        }
        warnings += [
            f"{name} has no effect with --url"
            for dest, name in parsed.typed.items()
            if dest in idle
        ]
    if parsed.values.get("prompt") == "":
        raise ConfigError("--prompt is empty")
    if parsed.values.get("workers") and not parsed.values.get("list_devices"):
        raise ConfigError("--rpc is for pyctl serve; pyctl chat --url talks to that")
    # Information belongs to the log of a server; a conversation shows it on demand only.
    return _settings(
        replace(parsed, values={"verbosity": 2, **parsed.values}), environ, 1, warnings
    )


def _read(
    command: str,
    usage: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    sections: Mapping[Section, tuple[Flag, ...]],
) -> ParsedFlags:
    """Return the values of the flags in ``sections``, with the names that have no effect.

    --help and --version print and raise SystemExit(0). Raises ConfigError for flags and variables
    that pyctl does not support, and for an empty LLAMA_API_KEY, which would open the server.
    """
    server_only = {
        name: int(flag.convert is not None) for flag in FLAGS[SERVER] for name in flag.spellings()
    }
    flags = [flag for group in sections.values() for flag in group]
    parsed = read_flags(argv, environ, flags, {**_UNUSED, **server_only})
    if "help" in parsed.values:
        print(
            help_text(command, f"pyctl {command} {usage}", sections, parsed.values["help"]), end=""
        )
        raise SystemExit(0)
    if "version" in parsed.values:
        print_version()
        raise SystemExit(0)
    if (
        SERVER in sections
        and environ.get("LLAMA_API_KEY") == ""
        and not {"api_keys", "key_file"} & parsed.values.keys()
    ):
        raise ConfigError("LLAMA_API_KEY is set but empty: unset it to serve without a key")
    refused = [name for name in parsed.unused if name in REJECTED]
    refused += [
        name for name in OF_TOOLS if (environ.get(name) or "off").lower() not in FALSE_WORDS
    ]
    refused += [name for name in REMOVED if environ.get(name)]
    if refused:
        raise ConfigError(f"{refused[0]} is not supported: {INSTEAD[refused[0]]}")
    variables_read = {flag.env for flag in (*flags, *FLAGS[SERVER])}
    variables = (
        variable
        for variable in sorted(environ)
        if variable.startswith("LLAMA_ARG_")
        and not {variable, variable.replace("_NO_", "_", 1)} & variables_read
    )
    unused = (*(name for name in parsed.unused if name not in NO_OP), *variables)
    return ParsedFlags(parsed.values, parsed.typed, unused)


def _settings(
    parsed: ParsedFlags, environ: Mapping[str, str], n_seqs: int, warnings: Sequence[str] = ()
) -> CommandSettings:
    """Return the settings of ``parsed``; ``n_seqs`` is the default number of sequences."""
    if parsed.values.get("n_seqs", -1) == -1:
        parsed = replace(
            parsed,
            values={**parsed.values, "n_seqs": 1 if parsed.values.get("n_pooled") else n_seqs},
        )
    values, more = _resolve(parsed, environ)
    try:
        sampling = fill(Sampling, values)
    except RequestError as error:
        raise ConfigError(str(error)) from error
    chosen = frozenset(item.name for item in fields(Sampling) if item.name in values)
    debug = bool(environ.get("LLAMA_SERVER_SLOTS_DEBUG"))
    cors = fill(Cors, values)
    is_verbose = values.get("verbosity", LogSettings.verbosity) >= VERBOSE
    made: dict[str, Any] = {
        "server": fill(ServerSettings, values, cors=cors, slots_debug=debug, is_verbose=is_verbose),
        "replies": fill(ReplySettings, values, sampling=sampling, chosen=chosen),
    }
    made |= {name: fill(owner, values) for name, owner in _PARTS.items() if name not in made}
    return CommandSettings(
        **made,
        request_fields=_request_fields(values, sampling, chosen),
        warnings=(*more, *warnings),
        action="devices"
        if values.get("list_devices")
        else "models"
        if values.get("list_models")
        else "run",
    )


def _request_fields(
    values: Mapping[str, Any], sampling: Sampling, chosen: frozenset[str]
) -> dict[str, Any]:
    """Return the ``chosen`` members of ``sampling`` as fields of a request, in llama-server's
    form.
    """
    made = {
        item.name: getattr(sampling, item.name) for item in fields(Sampling) if item.name in chosen
    }
    if "json_schema" in values:
        del made["grammar"], made["grammar_kind"]
        made["json_schema"] = values["json_schema"]
    if made.get("seed") == RANDOM_SEED:
        made["seed"] = -1
    if "logit_bias" in made:
        made["logit_bias"] = [
            [token, False if bias == -float("inf") else bias] for token, bias in made["logit_bias"]
        ]
    if "n_predict" in values:
        made["max_tokens"] = values["n_predict"]
    return made


def _resolve(
    parsed: ParsedFlags, environ: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of the settings, in which several flags are combined, and warnings."""
    values = dict(parsed.values)
    warnings = [f"without effect here: {', '.join(parsed.unused)}"] if parsed.unused else []
    _combine_flags(parsed, values)
    values["template_kwargs"] = _template_kwargs(values)
    n_batch = values.get("n_batch", ModelSettings.n_batch)
    if values.get("n_ubatch", 0) > n_batch:
        warnings.append(f"--ubatch-size {values['n_ubatch']} is cut to --batch-size {n_batch}")
        values["n_ubatch"] = n_batch
    downloads = [parsed.typed[dest] for dest in ("hf_repo", "model_url") if dest in parsed.typed]
    if values.get("path") and downloads:
        # As in llama-server, the file is where that model was to be kept; here it is the model.
        warnings.append(
            f"{downloads[0]} has no effect with {parsed.typed.get('path', 'LLAMA_ARG_MODEL')}"
        )
    warnings += _choose_directory(parsed, environ, values)
    if values.get("n_pooled"):
        _check_pool(values)
    _choose_automatic_drafts(values)
    return values, tuple(warnings)


def _combine_flags(parsed: ParsedFlags, values: dict[str, Any]) -> None:
    """Set the values that follow from several flags, or from one for several of them."""
    if _chosen(parsed, "load_mode", ("mmap", "mlock")):
        mapped = values.get("mmap", True)
        locked = values.get("mlock", False)
        values["load_mode"] = {
            (True, True): "mmap+mlock",
            (True, False): "mmap",
            (False, True): "mlock",
        }.get((mapped, locked), "none")
    if _chosen(parsed, "rope_freq_scale", ("rope_scale",)):
        values["rope_freq_scale"] = 1.0 / values["rope_scale"]
    if isinstance(bound := values.get("grammar"), BoundBySchema):
        values |= {
            "grammar": bound.grammar,
            "grammar_kind": bound.kind,
            "json_schema": bound.schema,
        }
    if _chosen(parsed, "chat_template", ("template_file",)):
        values["chat_template"] = values["template_file"]
    if any(values.get(dest) for dest in ("mcp_config", "mcp_json")) and "origins" not in values:
        values["origins"] = "localhost"  # as in llama-server
    if values.get("rerank"):
        values |= {"embeddings": True, "pooling": "rank"}
    values["api_keys"] = (*values.get("api_keys", ()), *values.get("key_file", ()))
    if values.get("lora_unapplied"):
        values["lora"] = tuple((path, 0.0) for path, _ in values.get("lora", ()))
    if "n_ctx_per_seq" in values and not values.get("n_ctx"):
        values["n_ctx"] = values["n_ctx_per_seq"] * values["n_seqs"]


def _template_kwargs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template, with those that other flags set."""
    kwargs = dict(values.get("template_kwargs", {}))
    if values.get("reasoning", "auto") != "auto":
        kwargs["enable_thinking"] = values["reasoning"] == "on"
    if values.get("reasoning_effort", "default") != "default":
        kwargs["reasoning_effort"] = values["reasoning_effort"]
    preserve = bool(values.get("reasoning_preserve", kwargs.pop("preserve_reasoning", True)))
    return {**keep_reasoning(preserve), **kwargs}


def _choose_automatic_drafts(values: dict[str, Any]) -> None:
    """Let loading choose the drafts of a model if no flag excludes or names them."""
    others = ("draft_types", "draft_path", "draft_repo", "exact", "embeddings", "n_pooled")
    is_chosen = any(values.get(dest) for dest in others)
    if is_chosen or not (_names_model(values) and values.get("fit", True)):
        return
    values["draft_types"] = PRIVATE if len(values["api_keys"]) > 1 else AUTOMATIC
    values.setdefault("n_draft", AUTOMATIC_LENGTH)


def _names_model(values: Mapping[str, Any]) -> bool:
    """Return whether the flags name another model than the built-in one."""
    return any(values.get(dest) for dest in ("path", "hf_repo", "model_url"))


def _choose_directory(
    parsed: ParsedFlags, environ: Mapping[str, str], values: dict[str, Any]
) -> list[str]:
    """Choose the directory of the disk cache: the default one unless a flag names another. Return
    warnings.
    """
    has_ram = values.get("ram_mib") != 0
    lacking = "without --kv-cache-dir"
    if {"cache_dir", "kv_cache"} <= parsed.typed.keys() and not values["kv_cache"]:
        raise ConfigError("--no-kv-cache and --kv-cache-dir exclude each other")
    if not values.get("kv_cache", True) and "cache_dir" not in parsed.typed:
        values["cache_dir"] = ""
        lacking = "with --no-kv-cache"
    elif values.get("cache_dir"):
        if not has_ram:
            raise ConfigError(
                "--kv-cache-dir needs the prefix cache, which --cache-ram 0 turns off"
            )
        return []
    elif not has_ram:
        lacking = "with --cache-ram 0"
    elif (_names_model(values) or values.get("kv_cache")) and not values.get("embeddings"):
        try:
            values["cache_dir"] = str(default_directory(environ))
        except RuntimeError:
            return ["no disk cache: the user has no home directory; --kv-cache-dir names another"]
        values |= {"is_default": True, "free_part": 0 if "disk_mib" in values else FREE_PART}
        values.setdefault("daily_mib", DEFAULT_DAILY_MIB)
        return []
    idle = {flag.dest for flag in FLAGS[DISK]} - {"kv_cache"}
    return [
        f"{name} has no effect {lacking}" for dest, name in parsed.typed.items() if dest in idle
    ]


def _check_pool(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for flags that exclude a pool."""
    for is_wrong, why in (
        (values["n_seqs"] != 1, f"one reply at a time, not --parallel {values['n_seqs']}"),
        (values.get("flash_attn") == "off", "flash attention, which --flash-attn off forbids"),
        (
            not values.get("offload_kqv", True),
            "the KV cache on the GPU, which --no-kv-offload forbids",
        ),
        (
            bool(values.get("mmproj_path") or values.get("mmproj_url")),
            "a model without --mmproj: it has no rows of images",
        ),
    ):
        if is_wrong:
            raise ConfigError(f"--kv-pool needs {why}")


def _chosen(parsed: ParsedFlags, dest: str, others: Sequence[str]) -> bool:
    """Return whether ``others``, which mean the same, count instead of ``dest``. Raises ConfigError
    if both were typed.
    """
    typed = [parsed.typed[other] for other in others if other in parsed.typed]
    if typed and dest in parsed.typed:
        raise ConfigError(f"{parsed.typed[dest]} and {typed[0]} exclude each other")
    return bool(typed) or (
        dest not in parsed.values and any(other in parsed.values for other in others)
    )

"""What the program was asked to do: frozen settings, filled from flags and variables, contradictions refused.

Everything wrong raises ConfigError with one line of text. The flags themselves are in ``flag_table``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pyctl import __version__, flag_table
from pyctl.engine.sampling import RANDOM_SEED, Sampling
from pyctl.errors import ConfigError, RequestError
from pyctl.flags import Flag, Given, help_text, read_flags

__all__ = [
    "CacheSettings",
    "ChatSettings",
    "DiskSettings",
    "FormatSettings",
    "LogSettings",
    "ModelSettings",
    "SamplingDefaults",
    "ServeSettings",
    "ServerSettings",
    "TerminalSettings",
    "parse_chat",
    "parse_serve",
]


@dataclass(frozen=True)
class ModelSettings:
    """The model file and the context that llama.cpp makes for it; counts are tokens or layers.

    ``n_gpu_layers`` -1 means as many as fit, -2 all. ``n_threads`` below 1 leaves the choice to llama.cpp, and
    ``n_threads_batch`` below 1 means the same number. ``n_ctx`` 0, ``rope_*`` 0 or empty, ``yarn_orig_ctx`` 0 and the
    other ``yarn_*`` -1 mean the model's own value. ``tensor_split`` are proportions, empty for an even split.
    ``pooling`` is none, mean, cls, last or rank, empty for the model's own; it is for ``embeddings`` only.
    """

    path: str = ""
    alias: tuple[str, ...] = ()
    n_gpu_layers: int = -1
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    load_mode: str = "auto"
    n_ctx: int = 0
    n_seqs: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = -1
    n_threads_batch: int = 0
    flash_attn: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    offload_kqv: bool = True
    rope_scaling: str = ""
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_beta_fast: float = -1.0
    embeddings: bool = False
    pooling: str = ""

    def __post_init__(self) -> None:
        if self.flash_attn == "off" and "q" in self.type_v:
            raise ConfigError(f"--cache-type-v {self.type_v} needs flash attention, which --flash-attn off forbids")


@dataclass(frozen=True)
class CacheSettings:
    """The prefix cache: ``n_slots`` snapshots within ``ram_mib`` MiB (-1 no limit); 0 of either turns it off.

    With ``exact``, generated text is evaluated again as part of the next prompt before it is reused, so that every
    reply equals an uncached one to the bit.
    """

    n_slots: int = 32
    ram_mib: int = 8192
    cache_prompt: bool = True
    checkpoint_min_step: int = 8192
    exact: bool = False


@dataclass(frozen=True)
class DiskSettings:
    """The prefix cache on disk; without ``cache_dir`` there is none.

    ``disk_mib`` MiB is what the directory may hold and ``daily_mib`` what a day may write, 0 for no limit.
    ``min_tokens`` and ``cold_max`` are tokens, ``disk_policy`` is a form that DiskPolicy.parse takes.
    """

    cache_dir: str = ""
    disk_mib: int = 4096
    min_tokens: int = 512
    cold_max: int = 10240
    # Restores more than full in every shape of bench/results/policy.md, and writes less.
    disk_policy: str = "auto:30"
    daily_mib: int = 0

    def __post_init__(self) -> None:
        if self.disk_policy.isdigit() and int(self.disk_policy) < self.min_tokens:
            raise ConfigError(
                f"--disk-prefix-cache {self.disk_policy} is below --kv-cache-min-tokens {self.min_tokens}: "
                "nothing would ever be written"
            )


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling of a request that does not say otherwise; ``n_predict`` is in tokens, -1 for no limit.

    ``given`` names the values that the user set, as opposed to defaults.
    """

    sampling: Sampling = field(default_factory=Sampling)
    n_predict: int = -1
    given: frozenset[str] = frozenset()

    def request_fields(self) -> dict[str, Any]:
        """The values that the user set, as fields of a llama-server request."""
        made = {name: getattr(self.sampling, name) for name in sorted(self.given - {"n_predict"})}
        if made.get("seed") == RANDOM_SEED:
            made["seed"] = -1
        if "logit_bias" in made:
            made["logit_bias"] = [
                [token, False if bias == -float("inf") else bias] for token, bias in made["logit_bias"]
            ]
        if "n_predict" in self.given:
            made["max_tokens"] = self.n_predict
        return made


@dataclass(frozen=True)
class FormatSettings:
    """How messages become text and replies messages; an empty ``chat_template`` means the model's own."""

    chat_template: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_format: str = "auto"
    prompt_replay: str = "equal"


@dataclass(frozen=True)
class ServerSettings:
    """Where and to whom the server answers.

    ``host`` may be a UNIX socket, a path ending in .sock; ``port`` 0 is any free one. ``timeout``,
    ``sse_ping_interval`` and ``sleep_idle_seconds`` are seconds, -1 of the last two is never. ``cors_*`` are as in
    server.cors.Cors. ``slot_save_path`` is a directory, empty for none.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    ssl_key_file: str = ""
    ssl_cert_file: str = ""
    timeout: int = 3600
    sse_ping_interval: int = 30
    webui: bool = True
    metrics: bool = False
    props: bool = False
    slots: bool = True
    slot_save_path: str = ""
    sleep_idle_seconds: int = -1
    api_prefix: str = ""
    cors_origins: str = "*"
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str = "*"
    cors_credentials: bool = True
    embd_normalize: int = 2

    def __post_init__(self) -> None:
        if bool(self.ssl_key_file) != bool(self.ssl_cert_file):
            raise ConfigError("--ssl-key-file and --ssl-cert-file need each other")


@dataclass(frozen=True)
class LogSettings:
    """-1 nothing, 1 errors, 2 warnings, 3 information, 4 trace, 5 everything."""

    verbosity: int = 3


@dataclass(frozen=True)
class TerminalSettings:
    """The command-line chat; ``url`` is empty when the model runs in this process."""

    url: str = ""
    api_key: str = ""
    prompt: str | None = None
    system_prompt: str = ""
    stats: bool = True


@dataclass(frozen=True)
class ServeSettings:
    """All of ``pyctl serve``; ``warnings`` are lines for the user."""

    model: ModelSettings
    cache: CacheSettings
    disk: DiskSettings
    sampling: SamplingDefaults
    format: FormatSettings
    server: ServerSettings
    log: LogSettings
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatSettings:
    """All of ``pyctl chat``; ``warnings`` are lines for the user."""

    model: ModelSettings
    cache: CacheSettings
    disk: DiskSettings
    sampling: SamplingDefaults
    format: FormatSettings
    terminal: TerminalSettings
    log: LogSettings
    warnings: tuple[str, ...] = ()


_SHARED: dict[str, tuple[Flag, ...]] = {
    "general": flag_table.GENERAL,
    "model": flag_table.MODEL,
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
    given = _read("serve [-m FILE] [flags]", argv, environ, {**_SHARED, "server": flag_table.SERVER})
    values, warnings = _resolve(given)
    return ServeSettings(
        model=_fill(ModelSettings, values),
        cache=_fill(CacheSettings, values),
        disk=_fill(DiskSettings, values),
        sampling=_sampling(values),
        format=_fill(FormatSettings, values),
        server=_fill(ServerSettings, values),
        log=_fill(LogSettings, values),
        warnings=warnings,
    )


def parse_chat(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> ChatSettings:
    """The settings of ``pyctl chat``, likewise. The server's own flags are taken and have no effect."""
    given = _read("chat [-m FILE | --url URL] [flags]", argv, environ, {"chat": flag_table.TERMINAL, **_SHARED})
    values, warnings = _resolve(given)
    if values.get("url"):
        if "path" in given.typed:
            raise ConfigError(f"--url and {given.typed['path']} exclude each other: that server has its own model")
        here = (flag_table.MODEL, flag_table.CONTEXT, flag_table.CACHE, flag_table.DISK, flag_table.FORMAT)
        idle = {flag.dest for group in here for flag in group}
        warnings += tuple(f"{name} has no effect with --url" for dest, name in given.typed.items() if dest in idle)
    if values.get("prompt") == "":
        raise ConfigError("--prompt is empty")
    return ChatSettings(
        model=_fill(ModelSettings, values),
        cache=_fill(CacheSettings, values),
        disk=_fill(DiskSettings, values),
        sampling=_sampling(values),
        format=_fill(FormatSettings, values),
        terminal=_fill(TerminalSettings, values),
        log=_fill(LogSettings, values),
        warnings=warnings,
    )


def _read(usage: str, argv: Sequence[str], environ: Mapping[str, str], groups: Mapping[str, Iterable[Flag]]) -> Given:
    server_only = {name: int(flag.convert is not None) for flag in flag_table.SERVER for name in flag.spellings()}
    flags = [flag for group in groups.values() for flag in group]
    given = read_flags(argv, environ, [*flags, *flag_table.REFUSED], {**flag_table.UNUSED, **server_only})
    if "help" in given.values:
        print(help_text(f"pyctl {usage}", groups, _defaults()), end="")
        raise SystemExit(0)
    if "version" in given.values:
        print(f"pyctl {__version__}")
        raise SystemExit(0)
    if "refused" in given.typed:
        raise ConfigError(f"{given.typed['refused']} is a question to llama-server, which pyctl cannot answer")
    if "download" in given.typed:
        if "path" not in given.values and "url" not in given.values:
            raise ConfigError(f"{given.typed['download']} cannot fetch models yet; pass a GGUF file with -m")
        given = replace(given, warnings=(f"{given.typed['download']} has no effect here", *given.warnings))
    known = {flag.env for flag in (*flags, *flag_table.SERVER)}
    unused = (
        f"{variable} has no effect here"
        for variable in sorted(environ)
        if variable.startswith("LLAMA_ARG_") and not {variable, variable.replace("_NO_", "_", 1)} & known
    )
    return Given(given.values, given.typed, (*given.warnings, *unused))


def _resolve(given: Given) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Settle what several flags say about one value."""
    values, warnings = dict(given.values), list(given.warnings)

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
    if values.get("reasoning", "auto") != "auto":
        kwargs = {**values.get("template_kwargs", {}), "enable_thinking": values["reasoning"] == "on"}
        values["template_kwargs"] = kwargs
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
        *(ModelSettings(), CacheSettings(), DiskSettings(), Sampling(), FormatSettings()),
        *(ServerSettings(), TerminalSettings(), LogSettings()),
    )
    shown = {name: value for part in parts for name, value in asdict(part).items()}
    return {
        **shown,
        "n_predict": -1,
        "seed": -1,
        "mmap": True,
        "jinja": True,
        "reasoning": "auto",
    }

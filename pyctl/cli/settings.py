"""What the program was asked to do, as frozen settings; contradictions raise ConfigError with one line of text.

``arguments`` fills them from flags and variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pyctl.engine.llama.model_settings import ModelSettings
from pyctl.engine.sampling import RANDOM_SEED, Sampling
from pyctl.errors import ConfigError
from pyctl.models import HubSettings

__all__ = [
    "Action",
    "CacheSettings",
    "ChatSettings",
    "DiskSettings",
    "FormatSettings",
    "LogSettings",
    "SamplingDefaults",
    "ServeSettings",
    "ServerSettings",
    "TerminalSettings",
]

Action: TypeAlias = Literal["run", "devices", "models"]
"""What the user asked for: to run, or to list devices or fetched models."""


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
    """How messages become text and replies messages; an empty ``chat_template`` means the model's own.

    ``reasoning_budget`` is tokens, -1 for no limit; ``reasoning_budget_message`` is what ends the thinking then.
    """

    chat_template: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_format: str = "auto"
    prompt_replay: str = "equal"
    reasoning_budget: int = -1
    reasoning_budget_message: str = ""


@dataclass(frozen=True)
class ServerSettings:
    """Where and to whom the server answers.

    ``host`` may be a UNIX socket, a path ending in .sock; ``port`` 0 is any free one. ``sse_ping_interval`` and
    ``sleep_idle_seconds`` are seconds, -1 is never. ``api_prefix`` stands before every path, ``slot_save_path`` is
    where sequences are saved, empty for nowhere. ``cors_*`` are as in server.cors.Cors. ``embd_normalize`` is
    llama-server's: -1 no norm, 0 int16 range, p the p-norm.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    ssl_key_file: str = ""
    ssl_cert_file: str = ""
    sse_ping_interval: int = 30
    metrics: bool = False
    props: bool = False
    slots: bool = True
    slot_save_path: str = ""
    api_prefix: str = ""
    cors_origins: str = "*"
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str = "*"
    cors_credentials: bool = True
    sleep_idle_seconds: int = -1
    embd_normalize: int = 2
    spm_infill: bool = False

    def __post_init__(self) -> None:
        if bool(self.ssl_key_file) != bool(self.ssl_cert_file):
            raise ConfigError("--ssl-key-file and --ssl-cert-file need each other")


@dataclass(frozen=True)
class LogSettings:
    """-1 nothing, 1 errors, 2 warnings, 3 information, 4 trace, 5 everything; ``log_file`` gets the lines, too."""

    verbosity: int = 3
    log_file: str = ""
    timestamps: bool = True


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
    hub: HubSettings
    cache: CacheSettings
    disk: DiskSettings
    sampling: SamplingDefaults
    format: FormatSettings
    server: ServerSettings
    log: LogSettings
    warnings: tuple[str, ...] = ()
    action: Action = "run"


@dataclass(frozen=True)
class ChatSettings:
    """All of ``pyctl chat``; ``warnings`` are lines for the user."""

    model: ModelSettings
    hub: HubSettings
    cache: CacheSettings
    disk: DiskSettings
    sampling: SamplingDefaults
    format: FormatSettings
    terminal: TerminalSettings
    log: LogSettings
    warnings: tuple[str, ...] = ()
    action: Action = "run"

"""Settings of the HTTP server: addresses, models, and rights of clients."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from pyctl.errors import ConfigError
from pyctl.settings.convert import directory, file_text, integer, number, words
from pyctl.settings.limit import SetLimit
from pyctl.settings.setting import SERVER

__all__ = [
    "Cors",
    "ListenSettings",
    "RouterSettings",
    "ServerSettings",
]


def addresses(text: str) -> tuple[str, ...]:
    """Return one address or several; an IPv6 address may be in brackets. Raises ValueError for
    none.
    """
    if not (names := words(text)):
        raise ValueError(f"{text!r} is not an address")
    return tuple(_without_brackets(address) for address in names)


def _without_brackets(address: str) -> str:
    """Return ``[::1]``, the form that addresses have before a port, as ``::1``."""
    is_bracketed = address.startswith("[") and address.endswith("]")
    return address[1:-1] if is_bracketed else address


def keys(text: str) -> tuple[str, ...]:
    """Return one key or several. Raises ValueError for an empty text, which must not open the
    server.
    """
    if not (names := words(text)):
        raise ValueError("no key given; omit the flag to serve without a key")
    return names


def key_lines(text: str) -> tuple[str, ...]:
    """Return the stripped lines of a file that are neither empty nor comments. Raises ValueError if
    it has none.
    """
    lines = (line.strip() for line in file_text(text).splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"no key in {text!r}")
    return keys


def existing_or_new(text: str) -> Path:
    """Return the path of a directory that exists, or can be created. Raises ValueError for
    others.
    """
    return Path(directory(text))


def existing(text: str) -> str:
    """Return the path of a directory that exists. Raises ValueError for others."""
    if not Path(directory(text)).is_dir():
        raise ValueError(f"{text!r} does not exist")
    return directory(text)


def url_path(text: str) -> str:
    """Return a path prefix of the server's URLs, without a slash at its end. Raises ValueError for
    other text.
    """
    if text and not re.fullmatch(r"(/[\w.~-]+)+", text):
        raise ValueError(f"{text!r} is not a path such as /llm")
    return text


@dataclass(frozen=True)
class ListenSettings:
    """The addresses that the server listens at; a host PATH.sock is a UNIX socket. Raises
    ConfigError for one TLS file of two.
    """

    hosts: tuple[str, ...] = SERVER.flag(
        ("127.0.0.1",),
        "--host",
        "addresses or paths that end in .sock, comma-separated",
        addresses,
        "LLAMA_ARG_HOST",
        "HOSTS",
        shown="127.0.0.1",
    )
    port: int = SERVER.flag(
        8080, "--port", "port to listen on, 0 = any free one", integer(0, 65535), "LLAMA_ARG_PORT"
    )
    open_page: bool = SERVER.flag(False, "--open", "open the page in a browser", None, "PYCTL_OPEN")
    ssl_key_file: str = SERVER.flag(
        "", "--ssl-key-file", "private key (PEM)", str, "LLAMA_ARG_SSL_KEY_FILE", "FILE"
    )
    ssl_cert_file: str = SERVER.flag(
        "", "--ssl-cert-file", "certificate (PEM)", str, "LLAMA_ARG_SSL_CERT_FILE", "FILE"
    )
    max_connections: int = SERVER.flag(
        512,
        "--max-connections",
        "connections at once",
        integer(1, 65536),
        "PYCTL_MAX_CONNECTIONS",
        limit=SetLimit("connections at once", "silent ones are closed, then 503", "connection"),
    )

    def __post_init__(self) -> None:
        if bool(self.ssl_key_file) != bool(self.ssl_cert_file):
            raise ConfigError("--ssl-key-file and --ssl-cert-file must be given together")


@dataclass(frozen=True)
class RouterSettings:
    """The settings of several models behind one address: their places, and the number that may be
    loaded at the same time.
    """

    models_dir: str = SERVER.flag(
        "",
        "--models-dir",
        "directory of models that requests name; a model of several files has its own folder",
        directory,
        "LLAMA_ARG_MODELS_DIR",
        "DIR",
    )
    preset_path: str = SERVER.flag(
        "",
        "--models-preset",
        "file of models that requests name (INI): a section for each, with its flags",
        str,
        "LLAMA_ARG_MODELS_PRESET",
        "FILE",
    )
    max_loaded: int = SERVER.flag(
        4,
        "--models-max",
        "maximum models loaded at the same time, 0 = as many as fit",
        integer(0),
        "LLAMA_ARG_MODELS_MAX",
        limit=SetLimit(
            "models that are loaded at the same time; 0 is no limit",
            "one of them is unloaded",
            "memory",
        ),
    )
    autoload: bool = SERVER.flag(
        True,
        "--models-autoload",
        "load a model when a request names it",
        None,
        "LLAMA_ARG_MODELS_AUTOLOAD",
        off="--no-models-autoload",
    )
    patience: float = SERVER.flag(
        0.2,
        "--models-patience",
        "seconds after its last reply before a model is unloaded for another one",
        number(0.0),
        "PYCTL_MODELS_PATIENCE",
        "SECONDS",
    )

    @property
    def is_router(self) -> bool:
        """True if there are several models."""
        return bool(self.models_dir or self.preset_path)


@dataclass(frozen=True)
class Cors:
    """The rules for pages of other origins: ``origins`` is ``*`` for all, ``localhost`` for pages
    of this machine, or a list.

    Lists are separated by commas.
    """

    origins: str = SERVER.flag(
        "*",
        "--cors-origins",
        "origins of web pages that may send requests, or localhost",
        str,
        "LLAMA_ARG_CORS_ORIGINS",
        "LIST",
    )
    methods: str = SERVER.flag(
        "GET, POST, DELETE, OPTIONS",
        "--cors-methods",
        "methods that they may use",
        str,
        "LLAMA_ARG_CORS_METHODS",
        "LIST",
    )
    headers: str = SERVER.flag(
        "*", "--cors-headers", "headers that they may send", str, "LLAMA_ARG_CORS_HEADERS", "LIST"
    )
    credentials: bool = SERVER.flag(
        True,
        "--cors-credentials",
        "allow credentials",
        None,
        "LLAMA_ARG_CORS_CREDENTIALS",
        off="--no-cors-credentials",
    )


@dataclass(frozen=True)
class ServerSettings:
    """The rules for clients of a process: which may generate, read prompts and change shared data.

    Without ``api_keys``, ``key_file``'s included, every client may generate. ``slots_debug`` adds
    prompts to /slots, ``show_prompts`` their ends to /cache even if there are no keys; with
    ``is_verbose``, OpenAI's replies hold llama-server's.
    """

    api_keys: tuple[str, ...] = SERVER.flag(
        (), "--api-key", "accepted keys, comma-separated", keys, "LLAMA_API_KEY", "KEYS", many=True
    )
    key_file: tuple[str, ...] = SERVER.flag(
        (),
        "--api-key-file",
        "file of accepted keys, one a line",
        key_lines,
        "LLAMA_ARG_API_KEY_FILE",
        "FILE",
    )
    ping_seconds: int = SERVER.flag(
        30,
        "--sse-ping-interval",
        "seconds between heartbeats of a silent stream, -1 = never",
        integer(-1),
        "LLAMA_ARG_SSE_PING_INTERVAL",
    )
    api_prefix: str = SERVER.flag(
        "", "--api-prefix", "prefix of all paths", url_path, "LLAMA_ARG_API_PREFIX", "PATH"
    )
    show_page: bool = SERVER.flag(
        True, "--ui --webui", "serve the page at /", None, "LLAMA_ARG_UI", off="--no-ui --no-webui"
    )
    static_path: str = SERVER.flag(
        "", "--path", "directory of files to serve at /", existing, "LLAMA_ARG_STATIC_PATH", "DIR"
    )
    media_path: str = SERVER.flag(
        "",
        "--media-path",
        "directory of images that requests name as file://NAME",
        existing,
        metavar="DIR",
    )
    show_slots: bool = SERVER.flag(
        True, "--slots", "serve /slots", None, "LLAMA_ARG_ENDPOINT_SLOTS", off="--no-slots"
    )
    show_metrics: bool = SERVER.flag(
        False, "--metrics", "serve /metrics", None, "LLAMA_ARG_ENDPOINT_METRICS"
    )
    otel: bool = SERVER.flag(
        False,
        "--otel",
        "send a span of each request to an OpenTelemetry collector, by the variables OTEL_*; needs "
        "the extra otel",
        None,
        "PYCTL_OTEL",
    )
    show_prompts: bool = SERVER.flag(
        False,
        "--show-prompts",
        "GET /cache shows ends of prompts, also without an API key",
        None,
        "PYCTL_SHOW_PROMPTS",
    )
    change_props: bool = SERVER.flag(
        False, "--props", "allow POST /props", None, "LLAMA_ARG_ENDPOINT_PROPS"
    )
    slot_save_path: Path | None = SERVER.flag(  # noqa: RUF009
        None,
        "--slot-save-path",
        "directory for saved sequences",
        existing_or_new,
        "LLAMA_ARG_SLOT_SAVE_PATH",
        "DIR",
    )
    cors: Cors = field(default_factory=Cors)
    slots_debug: bool = False
    is_verbose: bool = False

    @property
    def has_page(self) -> bool:
        """True if the page is served; a directory of --path replaces it."""
        return self.show_page and not self.static_path

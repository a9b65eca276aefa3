"""The command `pyctl`: reads the settings, builds the objects, runs them; nothing else knows concrete classes."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from pyctl import __version__
from pyctl.cache.disk.catalog import Catalog
from pyctl.cache.disk.store import DiskStore
from pyctl.cache.policy import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.cache.tier import DiskTier
from pyctl.chat.format import ChatFormat
from pyctl.chat.template import Template
from pyctl.config import (
    CacheSettings,
    ChatSettings,
    DiskSettings,
    FormatSettings,
    ModelSettings,
    ServeSettings,
    parse_chat,
    parse_serve,
)
from pyctl.engine.admin import CacheAdmin
from pyctl.engine.engine import Engine, EngineOptions
from pyctl.engine.worker import Worker
from pyctl.errors import ConfigError
from pyctl.models import builtin_model
from pyctl.server.app import create_app
from pyctl.server.serve import bind, serve
from pyctl.server.settings import Settings
from pyctl.terminal.backend import Backend
from pyctl.terminal.local import LocalBackend
from pyctl.terminal.program import run_chat
from pyctl.terminal.remote import RemoteBackend
from pyctl.upkeep import run_cache

if TYPE_CHECKING:
    from pyctl.engine.llama import Loaded

__all__ = ["main"]

USAGE = """usage: pyctl COMMAND [flags]

commands:
  serve    answer llama-server's HTTP API
  chat     talk in the terminal, in this process or with --url to a running server
  cache    look through a cache directory: ls, verify, prune, pin, unpin, rm

pyctl COMMAND --help lists the flags; pyctl --version prints the version.
"""

SWITCH_SECONDS = 0.0005

LEVELS = {-1: logging.CRITICAL + 1, 0: logging.CRITICAL, 1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO}

log = logging.getLogger("pyctl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 after a failure, 2 when it cannot start as asked."""
    argv = sys.argv[1:] if argv is None else argv
    # The engine's thread asks for the interpreter several times a token; nobody may keep it waiting for 5 ms.
    sys.setswitchinterval(SWITCH_SECONDS)
    commands: dict[str, Callable[[Sequence[str]], int]] = {"serve": _serve, "chat": _chat, "cache": run_cache}
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] in ("-V", "--version", "version"):
        print(f"pyctl {__version__}")
        return 0
    try:
        if argv[0] not in commands:
            raise ConfigError(f"unknown command {argv[0]!r}; commands are {', '.join(commands)}")
        return commands[argv[0]](argv[1:])
    except ConfigError as error:
        print(f"pyctl: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _serve(argv: Sequence[str]) -> int:
    settings = parse_serve(argv)
    _start_log(settings.log.verbosity, settings.warnings)
    server = settings.server
    # The address is taken before the model is loaded: a port in use should not cost a minute.
    with bind(server.host, server.port) as sock:
        worker, chat_format, admin = _open(settings.model, settings.cache, settings.disk, settings.format)
        try:
            serve(
                create_app(worker, chat_format, chat_format.tokenizer, _server_settings(settings, admin)),
                sock,
                ssl_key_file=server.ssl_key_file,
                ssl_cert_file=server.ssl_cert_file,
                on_ready=lambda address: log.info("%s on %s", worker.info.model_path, address),
                on_stop=worker.close,
            )
        finally:
            worker.close()
    return 0


def _chat(argv: Sequence[str]) -> int:
    settings = parse_chat(argv)
    _start_log(min(settings.log.verbosity, 2), settings.warnings)
    terminal = settings.terminal
    with _chat_backend(settings) as backend:
        return run_chat(backend, prompt=terminal.prompt, system=terminal.system_prompt, stats=terminal.stats)


@contextmanager
def _chat_backend(settings: ChatSettings) -> Iterator[Backend]:
    terminal, sampling = settings.terminal, settings.sampling
    if terminal.url:
        remote = RemoteBackend(terminal.url, terminal.api_key, sampling.request_fields())
        try:
            yield remote
        finally:
            remote.close()
        return
    worker, chat_format, _ = _open(settings.model, settings.cache, settings.disk, settings.format)
    try:
        yield LocalBackend(
            worker,
            chat_format,
            sampling.sampling,
            sampling.n_predict,
            cache_prompt=settings.cache.cache_prompt,
            split=settings.format.reasoning_format != "none",
        )
    finally:
        worker.close()


def _open(
    model: ModelSettings, cache: CacheSettings, disk: DiskSettings, form: FormatSettings
) -> tuple[Worker, ChatFormat, CacheAdmin]:
    """Load the model and start the engine on it."""
    # Only now: the import loads llama.cpp, which --help and a running server at --url do not need.
    from pyctl.engine.llama import load, open_pinned

    if not model.path:
        path = builtin_model()
        print("no -m given: running the built-in model, which is tiny but remembers what you tell it", file=sys.stderr)
        model = replace(model, path=str(path), n_ctx=model.n_ctx or 65536)
        form = replace(form, template_kwargs={"enable_thinking": False, **form.template_kwargs})
    budget = None if cache.ram_mib < 0 else cache.ram_mib * 2**20
    if model.n_gpu_layers != 0:
        # While the model loads; what a restart will bring back goes into memory that is ready for it.
        open_pinned(budget, soon=_stored_bytes(disk) if disk.cache_dir else 0)
    with _loading(model.path) as progress:
        loaded = load(model, progress)
    try:
        template = Template(
            form.chat_template or loaded.info.chat_template, loaded.info.bos_token, loaded.info.eos_token
        )
        chat_format = ChatFormat(template, loaded.tokenizer, kwargs=form.template_kwargs)
        tier = _disk_tier(disk, loaded)
    except BaseException:
        loaded.backend.close()
        raise
    options = EngineOptions(min_step=cache.checkpoint_min_step, exact=cache.exact)
    engine = Engine(loaded.backend, RamCache(cache.n_slots, budget), options, tier)
    # What is loaded stays until the end; the collector need not look at it again.
    gc.collect()
    gc.freeze()
    worker = Worker(engine, loaded.info)
    return worker, chat_format, CacheAdmin(worker, engine)


def _stored_bytes(settings: DiskSettings) -> int:
    """What the cache directory holds; 0 for one that cannot be read, which `_disk_tier` will complain about."""
    try:
        with closing(Catalog(Path(settings.cache_dir).expanduser())) as catalog:
            return catalog.n_bytes
    except OSError:
        return 0


def _disk_tier(settings: DiskSettings, loaded: Loaded) -> DiskTier | None:
    from pyctl.engine.llama import take_block

    if not settings.cache_dir:
        return None
    directory = Path(settings.cache_dir).expanduser()
    mib = 2**20
    try:
        store = DiskStore(
            directory,
            loaded.info.fingerprint,
            settings.disk_mib * mib or None,
            min_tokens=settings.min_tokens,
            daily_bytes=settings.daily_mib * mib or None,
            space=take_block,
        )
    except OSError as error:
        raise ConfigError(f"cannot use --kv-cache-dir {directory}: {error.strerror or error}") from error
    policy = DiskPolicy.parse(settings.disk_policy)

    def text_of(tokens: Sequence[int]) -> str:
        return loaded.tokenizer.detokenize(tokens).decode("utf-8", "replace")

    return DiskTier(store, policy, min_tokens=settings.min_tokens, cold_max=settings.cold_max, text_of=text_of)


def _server_settings(settings: ServeSettings, admin: CacheAdmin) -> Settings:
    return Settings(
        sampling=settings.sampling.sampling,
        n_predict=settings.sampling.n_predict,
        cache_prompt=settings.cache.cache_prompt,
        reasoning_format=settings.format.reasoning_format,
        api_keys=settings.server.api_keys,
        ping_seconds=settings.server.sse_ping_interval,
        cache=admin,
        disk_policy=DiskPolicy.parse(settings.disk.disk_policy),
    )


def _start_log(verbosity: int, warnings: Sequence[str]) -> None:
    logging.basicConfig(
        level=LEVELS.get(verbosity, logging.DEBUG),
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    if verbosity <= 3:
        logging.getLogger("llama.cpp").setLevel(logging.ERROR)
    for warning in warnings:
        log.warning("%s", warning)


@contextmanager
def _loading(path: str) -> Iterator[Callable[[float], None] | None]:
    """A progress bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("loading {task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(os.path.basename(path), total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)


if __name__ == "__main__":
    sys.exit(main())

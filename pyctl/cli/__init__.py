"""The command `pyctl`: reads the settings, builds the objects, runs them; nothing else knows concrete classes."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyctl import __version__
from pyctl.cache.disk.directory import CacheDirectory
from pyctl.cache.disk.file_format import REPLIES
from pyctl.cache.disk.store import DiskStore
from pyctl.cache.disk_tier import DiskTier
from pyctl.cache.persist import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.replay import Replay
from pyctl.chat.template import Template
from pyctl.cli.arguments import parse_chat, parse_serve
from pyctl.cli.cache_command import run_cache
from pyctl.cli.logs import LoadProgress, start_log
from pyctl.cli.settings import Action, CacheSettings, ChatSettings, DiskSettings, FormatSettings, ServeSettings
from pyctl.engine.admin import CacheAdmin, EngineAdmin, SequenceAdmin
from pyctl.engine.engine import Engine, EngineOptions
from pyctl.engine.llama.model_settings import ModelSettings
from pyctl.engine.worker import Worker
from pyctl.errors import ConfigError
from pyctl.models import HubSettings, builtin_model
from pyctl.server.app import create_app
from pyctl.server.lifecycle import LoadingApp, bind, serve
from pyctl.server.middleware import Cors
from pyctl.server.service import Settings
from pyctl.terminal.chat_backend import ChatBackend, LocalBackend
from pyctl.terminal.interactive import run_chat
from pyctl.terminal.remote import RemoteBackend

if TYPE_CHECKING:
    from pyctl.engine.llama import Loaded, MemoryPlan

__all__ = ["main"]

USAGE = """usage: pyctl COMMAND [flags]

commands:
  serve    answer llama-server's HTTP API
  chat     talk in the terminal, in this process or with --url to a running server
  cache    look through a cache directory: ls, verify, prune, pin, unpin, rm

pyctl COMMAND --help lists the flags; pyctl --version prints the version.
"""

SWITCH_SECONDS = 0.0005

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
    if settings.action != "run":
        return _answer(settings.action)
    start_log(settings.log, settings.warnings)
    server = settings.server
    with bind(server.host, server.port) as sock:
        # Here and not behind the address: Ctrl-C must end a download.
        service = _Service(replace(settings, model=_found(settings.model, settings.hub)))
        try:
            serve(
                service.gate,
                sock,
                ssl_key_file=server.ssl_key_file,
                ssl_cert_file=server.ssl_cert_file,
                on_ready=service.open,
                on_stop=service.close,
            )
        finally:
            service.close()
    return 0


class _Service:
    """What answers at the address: a gate at once, behind it the application as soon as the model is loaded."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._closing = threading.Event()
        self._worker: Worker | None = None
        self.gate = LoadingApp(_cors(settings))

    def open(self, address: str) -> None:
        """Load the model and let requests through; may be stopped by `close` on another thread."""
        settings = self._settings
        log.debug("listening at %s, loading the model", address)
        worker, chat_format, engine = _open(
            settings.model,
            settings.cache,
            settings.disk,
            settings.format,
            sleep_seconds=settings.server.sleep_idle_seconds,
            go_on=lambda: not self._closing.is_set(),
        )
        self._worker = worker
        if self._closing.is_set():
            worker.close()
            return
        served = _server_settings(settings, worker, engine)
        self.gate.open(create_app(worker, chat_format, chat_format.tokenizer, served))
        log.info("%s on %s", worker.info.model_path, address)

    def close(self) -> None:
        """Stop loading, or end the engine. Idempotent."""
        self._closing.set()
        if self._worker is not None:
            self._worker.close()


def _chat(argv: Sequence[str]) -> int:
    settings = parse_chat(argv)
    if settings.action != "run":
        return _answer(settings.action)
    start_log(replace(settings.log, verbosity=min(settings.log.verbosity, 2)), settings.warnings)
    terminal = settings.terminal
    with _chat_backend(settings) as backend:
        return run_chat(backend, prompt=terminal.prompt, system=terminal.system_prompt, stats=terminal.stats)


@contextmanager
def _chat_backend(settings: ChatSettings) -> Iterator[ChatBackend]:
    terminal, sampling = settings.terminal, settings.sampling
    if terminal.url:
        remote = RemoteBackend(terminal.url, terminal.api_key, sampling.request_fields())
        try:
            yield remote
        finally:
            remote.close()
        return
    model = _found(settings.model, settings.hub)
    worker, chat_format, _ = _open(model, settings.cache, settings.disk, settings.format)
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


def _answer(action: Action) -> int:
    """Print what is asked for."""
    if action == "models":
        from pyctl.models.hub import cached_models

        for name in cached_models():
            print(name)
    else:
        from pyctl.engine.llama import devices

        for device in devices():
            memory = f" ({device.total // 2**20} MiB, {(device.free or 0) // 2**20} MiB free)" if device.total else ""
            print(f"{device.name}: {device.description}{memory}")
    return 0


def _found(model: ModelSettings, hub: HubSettings) -> ModelSettings:
    """With the path of the model that ``hub`` names, fetched if need be, unless there is a path."""
    if model.path or not (hub.hf_repo or hub.model_url):
        return model
    # Only now: the import takes a while, and most models are files.
    from pyctl.models.hub import fetch

    return replace(model, path=str(fetch(hub)), alias=model.alias or ((hub.hf_repo,) if hub.hf_repo else ()))


def _open(
    model: ModelSettings,
    cache: CacheSettings,
    disk: DiskSettings,
    form: FormatSettings,
    *,
    sleep_seconds: int = -1,
    go_on: Callable[[], bool] = lambda: True,
) -> tuple[Worker, ChatFormat, Engine]:
    """Load the model and start the engine on it; UnavailableError when ``go_on`` said no meanwhile."""
    # Only now: the import loads llama.cpp, which --help and a running server at --url do not need.
    from pyctl.engine.llama import load, reserve_pinned

    if not model.path:
        path = builtin_model()
        print("no -m given: running the built-in model, which is tiny but remembers what you tell it", file=sys.stderr)
        model = replace(model, path=str(path), n_ctx=model.n_ctx or 65536)
        form = replace(form, template_kwargs={"enable_thinking": False, **form.template_kwargs})
    budget = None if cache.ram_mib < 0 else cache.ram_mib * 2**20

    def announce(plan: MemoryPlan) -> None:
        _announce(plan, budget)
        if model.n_gpu_layers != 0:
            # While the model loads; what a restart will bring back goes into memory that is ready for it.
            reserve_pinned(budget, initial=_stored_bytes(disk) if disk.cache_dir else 0)

    with LoadProgress(model.path) as progress:

        def report(fraction: float) -> bool:
            progress.show(fraction)
            return go_on()

        loaded = load(model, report, announce, keep_vocabulary=sleep_seconds >= 0)
    try:
        template = Template(
            form.chat_template or loaded.info.chat_template, loaded.info.bos_token, loaded.info.eos_token
        )
        tier = _disk_tier(disk, loaded)
        # Beside the snapshots: the prompts of both must be the same after a restart.
        replies = tier.store.directory / tier.store.fingerprint / REPLIES if tier is not None else None
        replay = Replay(form.prompt_replay, path=replies)
        chat_format = ChatFormat(template, loaded.tokenizer, form.template_kwargs, replay)
    except BaseException:
        loaded.backend.unload()
        raise
    options = EngineOptions(min_step=cache.checkpoint_min_step, exact=cache.exact)
    engine = Engine(loaded.backend, RamCache(cache.n_slots, budget), options, tier)
    # What is loaded stays until the end; the collector need not look at it again.
    gc.collect()
    gc.freeze()
    worker = Worker(engine, loaded.info, sleep_seconds)
    return worker, chat_format, engine


def _announce(plan: MemoryPlan, budget: int | None) -> None:
    """Say what will be used: in the log, or where that is quiet, to a person at the terminal."""
    table = "\n  ".join(plan.lines(budget))
    if log.isEnabledFor(logging.INFO):
        log.info("memory:\n  %s", table)
    elif sys.stderr.isatty():
        print(f"memory:\n  {table}", file=sys.stderr)
    for warning in plan.warnings(budget):
        log.warning("%s", warning)


def _stored_bytes(settings: DiskSettings) -> int:
    """What the cache directory holds; 0 for one that cannot be read, which `_disk_tier` will complain about."""
    try:
        with closing(CacheDirectory(Path(settings.cache_dir).expanduser())) as directory:
            return directory.n_bytes
    except OSError:
        return 0


def _disk_tier(settings: DiskSettings, loaded: Loaded) -> DiskTier | None:
    from pyctl.engine.llama import allocate

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
            space=allocate,
        )
    except OSError as error:
        raise ConfigError(f"cannot use --kv-cache-dir {directory}: {error.strerror or error}") from error
    policy = DiskPolicy.parse(settings.disk_policy)

    def text_of(tokens: Sequence[int]) -> str:
        return loaded.tokenizer.detokenize(tokens).decode("utf-8", "replace")

    return DiskTier(store, policy, min_tokens=settings.min_tokens, cold_max=settings.cold_max, text_of=text_of)


def _server_settings(settings: ServeSettings, worker: Worker, engine: Engine) -> Settings:
    server = settings.server
    return Settings(
        sampling=settings.sampling.sampling,
        n_predict=settings.sampling.n_predict,
        n_batch=settings.model.n_batch,
        spm_infill=server.spm_infill,
        cache_prompt=settings.cache.cache_prompt,
        reasoning_budget=settings.format.reasoning_budget,
        reasoning_budget_message=settings.format.reasoning_budget_message,
        reasoning_format=settings.format.reasoning_format,
        api_keys=server.api_keys,
        ping_seconds=server.sse_ping_interval,
        cache=CacheAdmin(worker, engine),
        engine=EngineAdmin(worker, engine),
        slots=SequenceAdmin(worker, engine),
        disk_policy=DiskPolicy.parse(settings.disk.disk_policy),
        cors=_cors(settings),
        api_prefix=server.api_prefix,
        show_slots=server.slots,
        show_metrics=server.metrics,
        change_props=server.props,
        slots_debug=bool(os.environ.get("LLAMA_SERVER_SLOTS_DEBUG")),
        slot_save_path=Path(server.slot_save_path) if server.slot_save_path else None,
        embeddings=settings.model.embeddings,
        embd_normalize=server.embd_normalize,
    )


def _cors(settings: ServeSettings) -> Cors:
    server = settings.server
    return Cors(server.cors_origins, server.cors_methods, server.cors_headers, server.cors_credentials)


if __name__ == "__main__":
    sys.exit(main())

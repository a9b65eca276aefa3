"""The composition root: settings to objects. The import loads llama.cpp."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pyctl.cache.cache_settings import DiskSettings
from pyctl.cache.device_copies import max_unwritten
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.cache.ram_budget import RamBudget
from pyctl.cache.resume_points import ANYWHERE
from pyctl.chat.cached_tokenizer import readable
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.constraint import json_constraint
from pyctl.chat.replay import DEFAULT_REPLAY_BYTES, Replay
from pyctl.chat.template import Template
from pyctl.cli.arguments import CommandSettings
from pyctl.cli.defaults import cache_budget, is_full, stored_bytes
from pyctl.cli.logs import LoadProgress
from pyctl.disk.directory import CacheDirectory, note_model
from pyctl.disk.disk import Disk, WriteLimits
from pyctl.disk.file_format import REPLIES
from pyctl.disk.model_folder import ModelFolder
from pyctl.disk.reader import StoreReader
from pyctl.disk.remote_store import RemoteStore, connect
from pyctl.disk.writer import StoreWriter
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.backend import EngineInfo
from pyctl.engine.draft.cache_drafts import CacheDrafts
from pyctl.engine.draft.ngram import NgramSource, ngram_sources
from pyctl.engine.draft.speculation import ModelDrafts, Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.evictable_cache import EvictableEngineCache
from pyctl.engine.sampling import Sampling
from pyctl.engine.worker import Worker
from pyctl.errors import ConfigError, ModelError, PyctlError
from pyctl.llama.fit.memory_fit import has_room, wanted_memory
from pyctl.llama.images.image_encoder import MAX_ROWS_BYTES
from pyctl.llama.library.devices import check_gguf, file_head, model_files
from pyctl.llama.library.pinned_memory import allocate, reserve_pinned
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.memory_plan import MemoryPlan
from pyctl.llama.settings.resolved import Resolved
from pyctl.model_files import HubSettings, builtin_model
from pyctl.requests.reply_settings import ReplySettings
from pyctl.server.app_state import AppState, HttpService
from pyctl.server.models import Progress

__all__ = [
    "LoadContext",
    "ModelLoader",
    "assemble",
    "check_files",
    "found",
    "prepare_vocabulary",
    "too_many_threads",
]

log = logging.getLogger("pyctl")

MIB = 2**20

ROWS_PART = 16
"""The part of --cache-ram that rows of images may have at most."""


def found(settings: CommandSettings) -> CommandSettings:
    """Add the paths of the models that ``settings.hub`` names, which are fetched if need be.

    A model that has a path is not fetched; of a repository for drafts, the path is the file's in
    it. A model from a repository comes with the vision encoder in its repository, unless another is
    named.
    """
    model = settings.model
    drafts = settings.drafts
    vision = settings.vision
    hub = settings.hub
    is_fetched = not model.path and bool(hub.hf_repo or hub.model_url)
    if not (is_fetched or hub.draft_repo or hub.mmproj_url):
        return settings
    # Only now: the import takes a while, and most models are files.
    from pyctl.model_files.hub import fetch, fetch_companion

    if is_fetched:
        alias = model.alias or ((hub.hf_repo,) if hub.hf_repo else ())
        path = fetch(hub)
        model = replace(model, path=str(path), alias=alias)
        if (
            hub.hf_repo
            and hub.mmproj_auto
            and not (vision.mmproj_path or hub.mmproj_url or settings.pool.n_pooled)
        ):
            try:
                vision = replace(
                    vision, mmproj_path=str(fetch_companion(hub, path) or ""), is_optional=True
                )
            except ConfigError as error:
                log.warning("images disabled: %s", error)
    if hub.mmproj_url and not vision.mmproj_path:
        vision = replace(
            vision,
            mmproj_path=str(fetch(HubSettings(model_url=hub.mmproj_url, offline=hub.offline))),
        )
    if hub.draft_repo:
        of_drafts = replace(hub, hf_repo=hub.draft_repo, hf_file=drafts.draft_path, model_url="")
        drafts = replace(drafts, draft_path=str(fetch(of_drafts)))
    return replace(settings, model=model, drafts=drafts, vision=vision)


FLAG_OF = {"model": "-m", "draft model": "-md", "vision encoder": "--mmproj", "adapter": "--lora"}


def check_files(settings: CommandSettings) -> None:
    """Raise ModelError for a file that is missing, is not a GGUF file, or is one for another flag;
    loads nothing.
    """
    vision = "" if settings.vision.is_optional else settings.vision.mmproj_path
    adapters = (("adapter", path) for path, _ in settings.model.lora)
    named = (
        ("model", settings.model.path),
        ("draft model", settings.drafts.draft_path),
        ("vision encoder", vision),
    )
    for what, path in (pair for pair in (*named, *adapters) if pair[1]):
        check_gguf(Path(path), what)
        if (kind := file_head(Path(path)).kind) != what.removeprefix("draft "):
            raise ModelError(
                f"{path} is for {FLAG_OF[kind]} ({kind}), not for {FLAG_OF[what]} ({what})"
            )


@dataclass
class LoadContext:
    """Objects that the models of a process share. With ``ram`` there are several models within that
    budget.
    """

    shared: AppState
    ram: RamBudget | None = None
    n_encoders: int = 1
    """Encoders whose rows have a part of the budget; those that a reload of the models brings have
    none.
    """
    n_seeing: int = 0
    is_pinned: bool = False
    """Whether memory for snapshots is being pinned already, which happens once for all."""
    plan: MemoryPlan | None = None
    threads: tuple[int, int] = (0, 0)
    """Memory, and threads for prompts and replies, of the model that was loaded last."""

    def image_bytes(self, budget: int) -> int:
        """Return the bytes of --cache-ram that the rows of images may take of one model that has a
        part.
        """
        return min(MAX_ROWS_BYTES, budget // ROWS_PART // max(self.n_encoders, 1))


def assemble(
    settings: CommandSettings,
    report: Progress = lambda fraction: True,
    context: LoadContext | None = None,
) -> HttpService:
    """Load the model and start the engine on it; UnavailableError when ``report`` said not to go
    on.

    ``report`` gets fractions from 0 to 1. The caller closes the worker of the service.
    """
    context = context or LoadContext(AppState(settings.server))
    settings = _with_model(settings)
    check_files(settings)
    loaded, budget = _load(settings, report, context)
    context.threads = loaded.backend.threads
    if warning := too_many_threads(context.threads, os.cpu_count() or 1):
        log.warning("%s", warning)
    try:
        chat_format, tier = _chat_format(settings, loaded)
    except BaseException:
        loaded.backend.unload()
        raise
    remembered = CacheDrafts() if loaded.drafts.has("cache") else None
    speculation = _speculation(settings, loaded, remembered)
    info = replace(loaded.info, draft_types=speculation.names)
    if (
        loaded.images is not None and budget is not None
    ):  # what it makes of images counts within --cache-ram
        loaded.images.rows.limit = (
            context.image_bytes(budget) if context.n_seeing < context.n_encoders else 0
        )
        context.n_seeing += 1
        budget -= loaded.images.rows.limit if context.ram is None else 0
    cache = RamCache(settings.cache.n_slots, budget, shared=context.ram)
    engine = Engine(loaded.backend, cache, settings.engine, tier, speculation)
    engine.prefix_cache.saved_time = context.shared.saved.account(info.fingerprint)
    if remembered is not None:
        remembered.remember_all(
            one.prompt.tokens for one in engine.prefix_cache.recent.newest_first()
        )
        engine.prefix_cache.recent.listener = remembered.remember
    # What is loaded stays until the end; the collector need not look at it again.
    gc.collect()
    gc.freeze()
    # Of several models, the thread that loads them decides which sleeps.
    sleep_seconds = settings.engine.sleep_seconds if context.ram is None else -1
    worker = Worker(engine, info, sleep_seconds, settings.engine.stall_seconds)
    if context.ram is not None:
        context.ram.add(cache, EvictableEngineCache(worker, engine))
    replies = _with_recommended(settings.replies, info.sampling)
    admin = EngineAdmin(worker, engine)
    service = HttpService(worker, chat_format, replies, context.shared, admin=admin)
    if chat_format.capabilities.tools:
        service.post_reply.add(partial(prepare_vocabulary, worker))
    return service


def too_many_threads(threads: tuple[int, int], n_processors: int) -> str:
    """Return a warning about more ``threads`` than processors; "" for none."""
    if max(threads) <= n_processors:
        return ""
    return (
        f"{max(threads)} threads are slower than {n_processors} on this machine's "
        f"{n_processors} processors"
    )


class ModelLoader:
    """The loader of one of several models; ``settings`` are its own. The thread that loads models
    calls it.
    """

    def __init__(self, settings: CommandSettings, context: LoadContext) -> None:
        self._settings = settings
        self._load_context = context
        self._is_found = False
        self._plan: MemoryPlan | None = None
        self._is_loaded = False
        self._loaded: list[tuple[int, int, int]] = []

    def load(self, report: Progress) -> HttpService:
        """Load the model and return a new service of it."""
        settings = self._find()
        self._loaded = _files(settings)
        service = assemble(settings, report, self._load_context)
        self._plan = self._load_context.plan
        self._is_loaded = True
        return service

    def is_current(self) -> bool:
        """Return whether the files have not changed since the last `load`. Files that cannot be
        read now count as unchanged.
        """
        found = _files(self._settings) if self._loaded else []
        return not found or found == self._loaded

    def fits(self) -> bool:
        """Return whether the model has room next to those that are loaded, with the whole context
        that it requests.

        Raises ConfigError if the model cannot be loaded.
        """
        settings = self._find()
        check_files(settings)
        if not self.is_current():
            self._plan = None
            self._is_loaded = False
        if settings.pool.n_pooled and self._plan is None:
            return False  # a pool takes what it finds
        if self._plan is None:
            self._plan = wanted_memory(settings.model, settings.drafts, settings.vision)
        return has_room(self._plan, is_known=self._is_loaded)

    def _find(self) -> CommandSettings:
        if not self._is_found:
            alias = self._settings.model.alias
            settings = found(self._settings)
            self._settings = replace(settings, model=replace(settings.model, alias=alias))
            self._is_found = True
        return self._settings


def _files(settings: CommandSettings) -> list[tuple[int, int, int]]:
    """Return inode, size and time of each file of a model, which a new file does not share; empty
    if one cannot be read.
    """
    model = settings.model
    others = (settings.vision.mmproj_path, settings.drafts.draft_path)
    paths = [
        Path(path) for path in (model.path, *others, *(path for path, _ in model.lora)) if path
    ]
    try:
        found = [part.stat() for path in paths for part in model_files(path)]
    except (OSError, ConfigError):
        return []
    return [(each.st_ino, each.st_size, each.st_mtime_ns) for each in found]


def _with_model(settings: CommandSettings) -> CommandSettings:
    """Choose the built-in model if no other is named."""
    model = settings.model
    chat = settings.format
    drafts = settings.drafts
    if model.path:
        return settings
    path = builtin_model()
    log.warning("no -m given: running the built-in model, which only remembers what it is told")
    model = replace(model, path=str(path), n_ctx=model.n_ctx or 65536)
    chat = replace(chat, template_kwargs={"enable_thinking": False, **chat.template_kwargs})
    if not (drafts.draft_types or drafts.draft_path):
        drafts = replace(drafts, draft_types=("draft-mtp",))
    return replace(settings, model=model, drafts=drafts, format=chat)


def _with_recommended(replies: ReplySettings, recommended: Mapping[str, Any]) -> ReplySettings:
    """Replace sampling parameters that the user did not choose by the file's recommendations."""
    used = {name: value for name, value in recommended.items() if name not in replies.chosen}
    if not used:
        return replies
    shown = (
        f"{name} {';'.join(value) if name == 'samplers' else value}" for name, value in used.items()
    )
    log.info("sampling defaults of the file: %s", ", ".join(shown))
    return replace(replies, sampling=replace(replies.sampling, **used))


def _chat_format(settings: CommandSettings, loaded: Loaded) -> tuple[ChatFormat, Disk | None]:
    """Return the model's chat format, and the disk whose directory keeps its replies."""
    chat = settings.format
    info = loaded.info
    exact = settings.engine.exact
    template = _template(chat.chat_template, info)
    disk = _open_disk(settings.disk, loaded)
    # With the snapshots: the prompts of both must be the same after a restart.
    replay = Replay(chat.prompt_replay)
    if disk is not None:
        limit = disk.folder.auxiliary_limit(DEFAULT_REPLAY_BYTES)
        replay = Replay(
            chat.prompt_replay,
            path=disk.folder.path / REPLIES,
            max_file_bytes=limit,
            run_soon=disk.queue.run_soon,
            spend=disk.writer.reserve_write,
        )
    return ChatFormat(
        template, loaded.tokenizer, chat.template_kwargs, replay, loaded.images, keeps_order=exact
    ), disk


def _template(given: str, info: EngineInfo) -> Template:
    """Return the template that the user gave, or the model's own with its template for tools."""
    own = info.templates
    tokens = (info.bos_token, info.eos_token)
    if given or not own.tool_use.strip():
        return Template(given or own.chat, *tokens)
    if not own.chat.strip():
        return Template(own.tool_use, *tokens, of_tools=Template(own.tool_use, *tokens))
    try:
        of_tools = Template(own.tool_use, *tokens)
    except ModelError as error:
        log.warning("the model's template for tools is not used: %s", error)
        return Template(own.chat, *tokens)
    return Template(own.chat, *tokens, of_tools=of_tools)


def _load(
    settings: CommandSettings, report: Progress, context: LoadContext
) -> tuple[Loaded, int | None]:
    """Return the model and the bytes of RAM for snapshots, None for no limit, with memory made
    ready for them.
    """
    disk = settings.disk
    budget = context.ram.n_bytes if context.ram is not None else cache_budget(settings.cache, None)

    def announce(resolved: Resolved) -> None:
        """Log the plan of memory and its warnings, and start to pin memory for snapshots.

        The budget of the cache follows from the plan, so it comes first: all later lines depend on
        it.
        """
        nonlocal budget
        plan = resolved.memory
        context.plan = plan
        budget = cache_budget(settings.cache, plan) if context.ram is None else budget
        table = "\n  ".join(plan.lines(budget))
        log.info(f"memory:\n  {table}")
        for row in resolved.values:
            log.debug("%s %s: %s", row.flag, row.value, row.reason)
        for warning in plan.warnings(budget):
            log.warning("%s", warning)
        if settings.model.n_gpu_layers != 0 and not context.is_pinned:
            # While the model loads; what a restart will bring back goes into memory that is ready
            # for it.
            reserve_pinned(
                budget, stored_bytes(disk), max_unwritten(budget) if disk.cache_dir else 0
            )
            context.is_pinned = True

    with LoadProgress(settings.model.path) as progress:

        def show(fraction: float) -> bool:
            progress.show(fraction)
            return report(fraction)

        load_with = partial(
            load, settings.model, show, announce, settings.drafts, pool=settings.pool
        )
        try:
            loaded = load_with(settings.vision)
        except ModelError as error:
            if not (settings.vision.is_optional and settings.vision.mmproj_path):
                raise
            log.warning("images disabled: %s", error)
            loaded = load_with()
    return _checked(settings, loaded), budget


def _checked(settings: CommandSettings, loaded: Loaded) -> Loaded:
    """Check that with --exact the model is known to come back to the same bits, or is not
    cached.
    """
    backend = loaded.backend
    if settings.engine.exact:
        backend.check_restoring()
        info = replace(loaded.info, n_ctx=backend.facts.n_ctx, memory=backend.memory_text)
        # Other servers write also what they evaluated together with other sequences.
        mixed = hashlib.blake2b(
            f"{info.fingerprint} exact{loaded.split}".encode(), digest_size=16
        ).hexdigest()
        loaded = replace(loaded, info=replace(info, fingerprint=mixed))
    is_usual = backend.memory.shape.resume_points == ANYWHERE and not backend.memory.kv.reason
    level = logging.DEBUG if is_usual else logging.WARNING
    log.log(level, "memory of the model: %s", loaded.info.memory)
    return loaded


def _speculation(
    settings: CommandSettings, loaded: Loaded, remembered: CacheDrafts | None
) -> Speculation:
    """Return the speculation with the sources that the settings name; log why it is off."""
    drafts = loaded.drafts
    facts = loaded.backend.facts
    texts: list[NgramSource | CacheDrafts] = [*ngram_sources(drafts.ordered_types, settings.ngrams)]
    if remembered is not None:
        texts.append(remembered)
    model = None
    if facts.draft_type:
        model = ModelDrafts(loaded.backend, drafts.n_draft, drafts.n_draft_min)
    speculation, reason = Speculation.from_facts(
        facts, texts, model, n_draft=drafts.n_draft, exact=settings.engine.exact
    )
    if reason:
        level = logging.DEBUG if settings.drafts.is_automatic else logging.WARNING
        log.log(level, "drafts disabled: %s", reason)
    return speculation


LOWEST_PRIORITY = 19


def prepare_vocabulary(worker: Worker) -> None:
    """Prepare the vocabulary that grammars of calls need. It takes a second, for which no request
    without a grammar need wait, on a thread of the lowest priority.
    """

    def prepare() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        constraint = json_constraint({"type": "object"})
        with suppress(PyctlError):
            worker.check(Sampling(grammar=constraint.grammar, grammar_kind=constraint.kind))

    thread = threading.Thread(target=prepare, name="pyctl-rest", daemon=True)
    thread.start()
    thread.join()


def _open_disk(settings: DiskSettings, loaded: Loaded) -> Disk | None:
    """Open the disk cache of the model, and its object store if there is one; return None without a
    cache directory, or if the drive is full. Raises ConfigError if the directory cannot be used.
    """
    if not settings.cache_dir:
        return None
    path = Path(settings.cache_dir).expanduser()
    info = loaded.info
    try:
        directory = CacheDirectory(path, settings.disk_mib * MIB or None)
        folder = ModelFolder(directory, info.fingerprint, loaded.backend.memory.shape.sizes)
        note_model(path, info.fingerprint, info.model_alias or info.model_name)
    except OSError as error:  # it could be used before the model was loaded
        if is_full(path, error):
            log.warning("no disk cache: no space for %s; the next start tries again", path)
            return None
        raise ConfigError(f"cannot use --kv-cache-dir {path}: {error.strerror or error}") from error
    writer = StoreWriter(folder, settings.daily_mib * MIB or None)
    remote = None
    if settings.store_url:
        remote = RemoteStore(connect(settings.store_url), settings.store_url, writer)
    return Disk(
        StoreReader(folder, allocate),
        writer,
        DiskPolicy.of_server(settings.disk_policy),
        WriteLimits(settings.min_tokens, settings.cold_max),
        text_of=partial(readable, loaded.tokenizer),
        remote=remote,
    )

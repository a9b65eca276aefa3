"""The composition root: settings to objects. The import loads llama.cpp."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pyctl.cache.ram import RamCache
from pyctl.cache.ram_budget import RamBudget
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.constraint import json_constraint
from pyctl.chat.replay import DEFAULT_REPLAY_BYTES, Replay
from pyctl.chat.template import Template
from pyctl.cli.arguments import CommandSettings
from pyctl.cli.early_load import ModelLoad
from pyctl.cli.load_model import LoadMemory, Progress, load_model
from pyctl.cli.open_disk import open_disk
from pyctl.cli.receipts import open_receipts
from pyctl.disk.directory import CacheDirectory
from pyctl.disk.disk import Disk
from pyctl.disk.file_format import REPLIES
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.backend import EngineInfo
from pyctl.engine.draft.cache_drafts import CacheDrafts
from pyctl.engine.draft.ngram import NgramSource, ngram_sources
from pyctl.engine.draft.speculation import ModelDrafts, Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.evictable_cache import EvictableEngineCache
from pyctl.engine.sampling import Sampling
from pyctl.engine.worker import Worker
from pyctl.errors import ModelError, PyctlError
from pyctl.llama.images.image_encoder import MAX_ROWS_BYTES, ImageRows
from pyctl.llama.loader import Loaded
from pyctl.processes.process_memory import trim_heap
from pyctl.requests.reply_settings import ReplySettings
from pyctl.requests.request_pool import PostReplyQueue
from pyctl.server.app_state import AppState, HttpService

__all__ = [
    "LoadContext",
    "assemble",
    "prepare_later",
    "prepare_vocabulary",
    "too_many_threads",
]

log = logging.getLogger("pyctl")


ROWS_PART = 16
"""The part of --cache-ram that rows of images may have at most."""


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
    threads: tuple[int, int] = (0, 0)
    """Threads for prompts and replies of the model that was loaded last."""
    memory: LoadMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = LoadMemory(self.ram)

    def image_bytes(self, budget: int) -> int:
        """Return the bytes of --cache-ram that the rows of images may take of one model that has a
        part.
        """
        return min(MAX_ROWS_BYTES, budget // ROWS_PART // max(self.n_encoders, 1))

    def share_with_images(self, rows: ImageRows, budget: int) -> int:
        """Limit the ``rows`` that another model keeps of images, which count within --cache-ram;
        return what is left of the model's own ``budget``, in bytes.
        """
        rows.limit = self.image_bytes(budget) if self.n_seeing < self.n_encoders else 0
        self.n_seeing += 1
        return budget - rows.limit if self.ram is None else budget


def assemble(
    settings: CommandSettings,
    report: Progress = lambda fraction: True,
    context: LoadContext | None = None,
    loading: ModelLoad | None = None,
) -> HttpService:
    """Load the model, or take it from ``loading``, and start the engine on it;
    UnavailableError when ``report`` said not to go on.

    ``report`` gets fractions from 0 to 1. The caller closes the worker of the service.
    """
    context = context or LoadContext(AppState(settings.server))
    model = loading.take() if loading is not None else load_model(settings, report, context.memory)
    settings = model.settings
    loaded = model.loaded
    with ExitStack() as undone:  # if anything below fails, the caller gets nothing to close
        undone.callback(model.close)
        chat_format, tier = _chat_format(settings, loaded, model.directory)
        undone.pop_all()
    context.threads = loaded.backend.threads
    if warning := too_many_threads(context.threads, os.cpu_count() or 1):
        log.warning("%s", warning)
    remembered = CacheDrafts() if loaded.drafts.has("cache") else None
    speculation = _speculation(settings, loaded, remembered)
    info = replace(loaded.info, draft_types=speculation.names)
    budget = model.budget
    if loaded.images is not None and budget is not None:
        budget = context.share_with_images(loaded.images.rows, budget)
    cache = RamCache(settings.cache.n_slots, budget, shared=context.ram)
    receipts = open_receipts(
        settings.disk, tier, loaded, settings.pool, exact=settings.engine.exact
    )
    engine = Engine(loaded.backend, cache, settings.engine, tier, speculation)
    engine.recorder = receipts
    engine.prefix_cache.saved_time = context.shared.saved.account(info.fingerprint)
    if remembered is not None:
        _follow_recent(engine, remembered)
    _settle_memory()
    # Of several models, the thread that loads them decides which sleeps.
    sleep_seconds = settings.engine.sleep_seconds if context.ram is None else -1
    worker = Worker(engine, info, sleep_seconds, settings.engine.stall_seconds)
    if context.ram is not None:
        context.ram.add(cache, EvictableEngineCache(worker, engine))
    replies = _with_recommended(settings.replies, info.sampling)
    admin = EngineAdmin(worker, engine)
    service = HttpService(
        worker, chat_format, replies, context.shared, admin=admin, receipts=receipts
    )
    if chat_format.capabilities.tools:
        prepare_later(service.post_reply, worker)
    return service


def _settle_memory() -> None:
    """Give back the memory of the load, and exempt the other objects from garbage collection."""
    # Loaded objects stay until the end; the collector need not visit them again.
    gc.collect()
    gc.freeze()
    # The metadata of the file were read several times, with all texts of the vocabulary: freed
    # pages between what stayed would count for this process until its end.
    trim_heap()


def _follow_recent(engine: Engine, remembered: CacheDrafts) -> None:
    """Let drafts come from recent prompts, and from those that arrive later."""
    recent = engine.prefix_cache.recent
    remembered.remember_all(one.prompt.tokens for one in recent.newest_first())
    recent.listener = remembered.remember


def too_many_threads(threads: tuple[int, int], n_processors: int) -> str:
    """Return a warning about more ``threads`` than processors; "" for none."""
    if max(threads) <= n_processors:
        return ""
    return (
        f"{max(threads)} threads are slower than {n_processors} on this machine's "
        f"{n_processors} processors"
    )


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


def _chat_format(
    settings: CommandSettings, loaded: Loaded, directory: CacheDirectory | None
) -> tuple[ChatFormat, Disk | None]:
    """Return the model's chat format, and the disk whose ``directory`` keeps its replies."""
    chat = settings.format
    info = loaded.info
    exact = settings.engine.exact
    template = _template(chat.chat_template, info)
    disk = open_disk(settings.disk, directory, loaded) if directory is not None else None
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


PREPARE_SECONDS = 5.0
"""The time after a load before the vocabulary is prepared, if no request runs. The first request
often waits for the load, and on two cores it took three times as long beside the preparation.
"""

LOWEST_PRIORITY = 19


def prepare_later(
    queue: PostReplyQueue, worker: Worker, seconds: float = PREPARE_SECONDS
) -> threading.Timer:
    """Let ``queue`` prepare the vocabulary ``seconds`` from now, or as long after that as requests
    run; return the timer. A request with a grammar that arrives before prepares it itself.
    """

    def start() -> None:
        if worker.is_serving:
            prepare_later(queue, worker, seconds)
        else:
            queue.add(partial(prepare_vocabulary, worker))

    timer = threading.Timer(seconds, start)
    timer.daemon = True
    timer.start()
    return timer


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

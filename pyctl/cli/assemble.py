"""The composition root: settings to objects. The import loads llama.cpp."""

from __future__ import annotations

import gc
import hashlib
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from pyctl.cache import (
    ANYWHERE,
    REPLIES,
    DiskPolicy,
    DiskSettings,
    DiskStore,
    DiskTier,
    RamCache,
    most_behind,
)
from pyctl.chat.cached_tokenizer import readable
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.constraint import json_constraint
from pyctl.chat.replay import DEFAULT_REPLAY_BYTES, Replay
from pyctl.chat.template import Template
from pyctl.cli.arguments import CommandSettings
from pyctl.cli.defaults import cache_budget, stored_bytes
from pyctl.cli.logs import LoadProgress
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.draft.cache_drafts import BESIDE_MODEL, CacheDrafts
from pyctl.engine.draft.draft_length import DraftLengthController
from pyctl.engine.draft.ngram import ngram_sources
from pyctl.engine.draft.source import DraftSource
from pyctl.engine.draft.speculation import ModelDrafts, Speculation
from pyctl.engine.engine import Engine
from pyctl.engine.sampling import Sampling
from pyctl.engine.worker import Worker
from pyctl.errors import ConfigError, ModelError, PyctlError
from pyctl.llama import Loaded, MemoryPlan, allocate, load, reserve_pinned
from pyctl.llama.image_encoder import MOST_ROWS_BYTES
from pyctl.models import HubSettings, builtin_model
from pyctl.server.service import Service, Shared

__all__ = ["assemble", "found"]

log = logging.getLogger("pyctl")

MIB = 2**20

ROWS_PART = 16
"""The part of --cache-ram that rows of images may have at most."""


def found(settings: CommandSettings) -> CommandSettings:
    """With the paths of the models that ``settings.hub`` names, which are fetched if need be.

    A model that has a path is not fetched; of a repository for drafts, the path is that of the file in it. A model
    from a repository comes with the vision encoder in its repository, unless another is named.
    """
    model, drafts, vision, hub = settings.model, settings.drafts, settings.vision, settings.hub
    is_fetched = not model.path and bool(hub.hf_repo or hub.model_url)
    if not (is_fetched or hub.draft_repo or hub.mmproj_url):
        return settings
    # Only now: the import takes a while, and most models are files.
    from pyctl.models.hub import fetch, fetch_companion

    if is_fetched:
        alias = model.alias or ((hub.hf_repo,) if hub.hf_repo else ())
        path = fetch(hub)
        model = replace(model, path=str(path), alias=alias)
        if hub.hf_repo and hub.mmproj_auto and not (vision.mmproj_path or hub.mmproj_url or settings.pool.is_wanted):
            try:
                vision = replace(vision, mmproj_path=str(fetch_companion(hub, path) or ""), is_optional=True)
            except ConfigError as error:
                log.warning("images disabled: %s", error)
    if hub.mmproj_url and not vision.mmproj_path:
        vision = replace(vision, mmproj_path=str(fetch(HubSettings(model_url=hub.mmproj_url, offline=hub.offline))))
    if hub.draft_repo:
        of_drafts = replace(hub, hf_repo=hub.draft_repo, hf_file=drafts.draft_path, model_url="")
        drafts = replace(drafts, draft_path=str(fetch(of_drafts)))
    return replace(settings, model=model, drafts=drafts, vision=vision)


def assemble(settings: CommandSettings, go_on: Callable[[], bool] = lambda: True) -> Service:
    """Load the model and start the engine on it; UnavailableError when ``go_on`` said no meanwhile.

    The caller closes the worker of the service.
    """
    model, disk, chat, drafts = settings.model, settings.disk, settings.format, settings.drafts
    if not model.path:
        path = builtin_model()
        log.warning("no -m given: running the built-in model, which only remembers what you tell it")
        model = replace(model, path=str(path), n_ctx=model.n_ctx or 65536)
        chat = replace(chat, template_kwargs={"enable_thinking": False, **chat.template_kwargs})
        if not (drafts.draft_types or drafts.draft_path):
            drafts = replace(drafts, draft_types=("draft-mtp",))
    loaded, budget = _load(replace(settings, model=model, drafts=drafts), go_on)
    try:
        template = Template(
            chat.chat_template or loaded.info.chat_template, loaded.info.bos_token, loaded.info.eos_token
        )
        tier = _disk_tier(disk, loaded)
        # With the snapshots: the prompts of both must be the same after a restart.
        replay = Replay(chat.prompt_replay)
        if tier is not None:
            limit = tier.store.limit_beside(DEFAULT_REPLAY_BYTES)
            replay = Replay(
                chat.prompt_replay,
                path=tier.store.home / REPLIES,
                max_file_bytes=limit,
                run_soon=tier.queue.run_soon,
                spend=tier.store.spend,
            )
        chat_format = ChatFormat(template, loaded.tokenizer, chat.template_kwargs, replay, loaded.images)
    except BaseException:
        loaded.backend.unload()
        raise
    least = BESIDE_MODEL if loaded.backend.facts.draft_type else 1
    remembered = CacheDrafts(least=least) if loaded.drafts.has("cache") else None
    speculation = _speculation(settings, loaded, remembered)
    info = replace(loaded.info, draft_types=speculation.names)
    if loaded.images is not None and budget is not None:  # what it makes of images counts within --cache-ram
        loaded.images.rows.limit = min(MOST_ROWS_BYTES, budget // ROWS_PART)
        budget -= loaded.images.rows.limit
    engine = Engine(loaded.backend, RamCache(settings.cache.n_slots, budget), settings.engine, tier, speculation)
    if remembered is not None:
        remembered.follow(engine.prefix_cache.recent)
    # What is loaded stays until the end; the collector need not look at it again.
    gc.collect()
    gc.freeze()
    worker = Worker(engine, info, settings.engine.sleep_seconds, settings.engine.stall_seconds)
    if chat_format.capabilities.tools:
        threading.Thread(target=_prepare_vocabulary, args=(worker,), name="pyctl-vocabulary", daemon=True).start()
    return Service(worker, chat_format, EngineAdmin(worker, engine), settings.replies, Shared(settings.server))


def _load(settings: CommandSettings, go_on: Callable[[], bool]) -> tuple[Loaded, int | None]:
    """The model and the bytes of RAM for snapshots, None for no limit, with memory made ready for them."""
    disk, budget = settings.disk, cache_budget(settings.cache, None)

    def announce(plan: MemoryPlan) -> None:
        nonlocal budget
        budget = cache_budget(settings.cache, plan)
        _announce(plan, budget)
        if settings.model.n_gpu_layers != 0:
            # While the model loads; what a restart will bring back goes into memory that is ready for it.
            reserve_pinned(budget, stored_bytes(disk), most_behind(budget) if disk.cache_dir else 0)

    with LoadProgress(settings.model.path) as progress:

        def report(fraction: float) -> bool:
            progress.show(fraction)
            return go_on()

        load_with = partial(load, settings.model, report, announce, settings.drafts)
        load_with = partial(load_with, keep_vocabulary=settings.engine.sleep_seconds >= 0, pool=settings.pool)
        try:
            loaded = load_with(settings.vision)
        except ModelError as error:
            if not (settings.vision.is_optional and settings.vision.mmproj_path):
                raise
            log.warning("images disabled: %s", error)
            loaded = load_with()
    backend = loaded.backend
    if settings.engine.exact:
        backend.check_restoring()
        info = replace(loaded.info, n_ctx=backend.facts.n_ctx, memory=backend.memory_text)
        # Other servers write what they evaluated together with other sequences, too.
        mixed = hashlib.blake2b(f"{info.fingerprint} exact".encode(), digest_size=16).hexdigest()
        loaded = replace(loaded, info=replace(info, fingerprint=mixed))
    level = logging.DEBUG if backend.memory.shape.places == ANYWHERE else logging.WARNING
    log.log(level, "memory of the model: %s", loaded.info.memory)
    return loaded, budget


def _speculation(settings: CommandSettings, loaded: Loaded, remembered: CacheDrafts | None) -> Speculation:
    """The sources of drafts: none unless a flag asks for it, or where a memory takes nothing back."""
    backend, drafts = loaded.backend, loaded.drafts
    ngrams = ngram_sources(drafts.ordered_types, settings.ngrams)
    sources: list[DraftSource] = [*ngrams, remembered] if remembered is not None else [*ngrams]
    model = ModelDrafts(backend, drafts.n_draft, drafts.n_draft_min) if backend.facts.draft_type else None
    lengths = [source.most for source in ngrams]
    lengths += [remembered.most] if remembered is not None else []
    lengths += [model.n_max] if model is not None else []
    longest = max(lengths, default=0)
    if longest and not backend.facts.most_drafts:
        log.warning("drafts disabled: this model's memory has no rollback")
        return Speculation()
    exact = settings.engine.exact
    width = min(drafts.n_draft, backend.facts.n_rollback) if exact else 0
    if longest and exact and not width:
        # A way back to a mark evaluates tokens again, in other batches than before.
        log.warning("drafts disabled: with --exact, this model takes drafts from a head or a draft model only")
        return Speculation()
    lengths_of = None if exact else DraftLengthController(backend.facts.n_rollback)
    speculation = Speculation(sources, model, lengths=lengths_of, width=width)
    speculation.calibrate(backend, longest)
    return speculation


def _prepare_vocabulary(worker: Worker) -> None:
    """Make ready what grammars are compiled on, a second's work that the first request with tools need not wait for."""
    constraint = json_constraint({"type": "object"})
    with suppress(PyctlError):
        worker.check(Sampling(grammar=constraint.grammar, grammar_kind=constraint.kind))


def _announce(plan: MemoryPlan, budget: int | None) -> None:
    """Log what will be used."""
    table = "\n  ".join(plan.lines(budget))
    log.info(f"memory:\n  {table}")
    for warning in plan.warnings(budget):
        log.warning("%s", warning)


def _disk_tier(settings: DiskSettings, loaded: Loaded) -> DiskTier | None:
    if not settings.cache_dir:
        return None
    directory = Path(settings.cache_dir).expanduser()
    try:
        store = DiskStore(
            directory,
            loaded.info.fingerprint,
            settings.disk_mib * MIB or None,
            min_tokens=settings.min_tokens,
            daily_bytes=settings.daily_mib * MIB or None,
            sizes=loaded.backend.memory.shape.sizes,
            space=allocate,
        )
    except OSError as error:  # it could be used before the model was loaded
        raise ConfigError(f"cannot use --kv-cache-dir {directory}: {error.strerror or error}") from error
    policy, text_of = DiskPolicy.of_server(settings.disk_policy), partial(readable, loaded.tokenizer)
    return DiskTier(store, policy, cold_max=settings.cold_max, text_of=text_of)

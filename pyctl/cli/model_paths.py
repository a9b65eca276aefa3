"""The files of a model: fetched if need be, checked before a load, and compared after one."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from pyctl.cli.arguments import CommandSettings
from pyctl.errors import ConfigError, ModelError
from pyctl.llama.library.devices import check_gguf, file_head, model_files
from pyctl.model_files import HubSettings, builtin_model

__all__ = [
    "check_files",
    "fetches_files",
    "file_states",
    "is_router",
    "resolve_files",
    "with_model",
]

log = logging.getLogger("pyctl")

FLAG_OF = {"model": "-m", "draft model": "-md", "vision encoder": "--mmproj", "adapter": "--lora"}

BUILTIN_CTX = 65_536
"""Context of the built-in model, whose rows are small."""


def fetches_files(settings: CommandSettings) -> bool:
    """Return whether `resolve_files` fetches a file, or looks for it among those fetched before."""
    hub = settings.hub
    return _fetches_model(settings) or bool(hub.draft_repo or hub.mmproj_url)


def _fetches_model(settings: CommandSettings) -> bool:
    hub = settings.hub
    return not settings.model.path and bool(hub.hf_repo or hub.model_url)


def resolve_files(settings: CommandSettings) -> CommandSettings:
    """Add the paths of the models that ``settings.hub`` names, which are fetched if need be.

    A model that has a path is not fetched; of a repository for drafts, the path is the file's in
    it. A model from a repository comes with the vision encoder in its repository, unless another is
    named.
    """
    model = settings.model
    drafts = settings.drafts
    vision = settings.vision
    hub = settings.hub
    if not fetches_files(settings):
        return settings
    is_fetched = _fetches_model(settings)
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


def with_model(settings: CommandSettings) -> CommandSettings:
    """Choose the built-in model if no other is named."""
    model = settings.model
    chat = settings.format
    drafts = settings.drafts
    if model.path:
        return settings
    path = builtin_model()
    log.warning("no -m given: running the built-in model, which repeats facts of the conversation")
    model = replace(model, path=str(path), n_ctx=model.n_ctx or BUILTIN_CTX)
    chat = replace(chat, template_kwargs={"enable_thinking": False, **chat.template_kwargs})
    if not (drafts.draft_types or drafts.draft_path):
        drafts = replace(drafts, draft_types=("draft-mtp",))
    return replace(settings, model=model, drafts=drafts, format=chat)


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


def file_states(settings: CommandSettings) -> list[tuple[int, int, int]]:
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


def is_router(settings: CommandSettings) -> bool:
    """Return whether requests choose among several models: flags give some, and name none."""
    hub = settings.hub
    return settings.router.is_router and not (settings.model.path or hub.hf_repo or hub.model_url)

"""The first half of the load of a model that settings name: its files and its memory."""

from __future__ import annotations

import logging

from pyctl.cli.arguments import CommandSettings
from pyctl.cli.model_paths import check_files
from pyctl.errors import ModelError
from pyctl.llama.prepare_load import PreparedLoad, prepare_load

__all__ = ["prepare_model", "prepare_without_images"]

log = logging.getLogger("pyctl")


def prepare_model(settings: CommandSettings) -> PreparedLoad:
    """Check the files of the model and fit it into memory; without an optional encoder of images
    that cannot be used.

    Raises ConfigError and ModelError if it cannot be loaded.
    """
    check_files(settings)
    vision = settings.vision
    try:
        return prepare_load(settings.model, settings.drafts, vision, pool=settings.pool)
    except ModelError as error:
        if not (vision.is_optional and vision.mmproj_path):
            raise
        return prepare_without_images(settings, error)


def prepare_without_images(settings: CommandSettings, error: ModelError) -> PreparedLoad:
    """Fit the model into memory without its encoder of images, which ``error`` excludes."""
    log.warning("images disabled: %s", error)
    return prepare_load(settings.model, settings.drafts, pool=settings.pool)

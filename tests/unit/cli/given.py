"""Command lines as users type them, and their settings."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.chat import keep_reasoning
from pyctl.cli.arguments import FLAGS, CommandSettings, parse_chat, parse_serve
from pyctl.cli.flag_aliases import IGNORED, NO_OP, REJECTED
from pyctl.errors import ConfigError
from pyctl.settings.setting import CHAT, GENERAL

WITHOUT_USE = {**NO_OP, **IGNORED, **REJECTED}


SERVE_FLAGS = tuple(
    flag for section, flags in FLAGS.items() if section not in (GENERAL, CHAT) for flag in flags
)


PRESERVED = keep_reasoning(True)


def serve(*argv: str, **environ: str) -> CommandSettings:
    return parse_serve(["-m", "model.gguf", *argv], environ)


def chat(*argv: str, **environ: str) -> CommandSettings:
    return parse_chat(["-m", "model.gguf", *argv], environ)


def at(settings: object, path: str) -> Any:
    for name in path.split("."):
        settings = getattr(settings, name)
    return settings


def refused(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        serve(*argv, **environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)

"""The public facts of a model before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelCard"]


@dataclass(frozen=True)
class ModelCard:
    """The public facts of a model before it is loaded; ``origin`` is the place where it was found,
    ``preset`` its section of a preset file, ``args`` its flags. One that ``is_hidden`` is in no
    list.
    """

    name: str
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    path: str = ""
    origin: str = "preset"
    args: tuple[str, ...] = ()
    preset: str = ""
    vision: bool = False
    is_hidden: bool = False

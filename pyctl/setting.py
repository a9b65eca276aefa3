"""Settings that users can set: the field of a frozen dataclass says its default, its flag, its variable and its help.

    @dataclass(frozen=True)
    class ServerSettings:
        port: int = SERVER.flag(8080, "--port", "port to listen on", integer(0, 65535), "LLAMA_ARG_PORT")

Every class of settings stands next to its reader, and that is all: the command line finds the flags through the
fields (`flags_of`) and fills the class with what was given (`fill`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

from pyctl.convert import Convert

__all__ = [
    "CACHE",
    "CHAT",
    "CONTEXT",
    "DISK",
    "FORMAT",
    "GENERAL",
    "HUB",
    "LOG",
    "MODEL",
    "SAMPLING",
    "SERVER",
    "SPECULATION",
    "Flag",
    "Section",
    "fill",
    "flags_of",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """One way to set the field ``dest``; ``names`` and ``off`` are separated by blanks, ``off`` are negations.

    Without ``convert`` it is a switch that stores ``const``. ``bare`` is the text that counts where no value follows
    ("-fa -c 0" means "-fa on -c 0"). ``many``: given twice, the tuples are joined. ``default`` is what --help shows.
    """

    names: str
    help: str
    convert: Convert | None = None
    env: str = ""
    metavar: str = "N"
    off: str = ""
    const: Any = True
    bare: str | None = None
    many: bool = False
    dest: str = ""
    default: str = ""

    def spellings(self) -> list[str]:
        """Everything that may be typed for it."""
        return [*self.names.split(), *self.off.split()]


@dataclass(frozen=True)
class Section:
    """A part of --help."""

    title: str

    def flag(
        self,
        default: T,
        names: str,
        help: str,
        convert: Convert | None = None,
        env: str = "",
        metavar: str = "N",
        *,
        off: str = "",
        const: Any = True,
        bare: str | None = None,
        many: bool = False,
        also: tuple[Flag, ...] = (),
        shown: str | None = None,
        **facts: object,
    ) -> T:
        """A field with ``default``, set by this flag and by those of ``also``.

        --help shows ``shown`` where the default reads badly. ``facts`` go into the field's metadata, for others.
        """
        text = _shown(default, convert) if shown is None else shown
        first = Flag(names, help, convert, env, metavar, off, const, bare, many, default=text)
        kept = {"section": self, "flags": (first, *also), **facts}
        if default.__hash__ is None:
            return field(default_factory=lambda: default, metadata=kept)
        return field(default=default, metadata=kept)


def _shown(default: object, convert: Convert | None) -> str:
    """A default as users would write it; empty where there is nothing to say."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple) and default and all(isinstance(item, int) for item in default):
        return ",".join(map(str, default))
    return str(default) if convert is not None and isinstance(default, (int, float, str)) else ""


GENERAL = Section("general")
MODEL = Section("model")
HUB = Section("model from the network")
CONTEXT = Section("context")
CACHE = Section("cache")
DISK = Section("disk cache")
SAMPLING = Section("sampling")
SPECULATION = Section("speculative decoding")
FORMAT = Section("chat format")
LOG = Section("log")
SERVER = Section("server")
CHAT = Section("chat")


def flags_of(owner: type[Any]) -> list[tuple[Section, Flag]]:
    """The flags of ``owner``'s fields, in order, each with its destination and its part of --help."""
    return [
        (item.metadata["section"], replace(flag, dest=item.name))
        for item in fields(owner)
        for flag in item.metadata.get("flags", ())
    ]


def fill(owner: Callable[..., T], values: Mapping[str, Any], **more: Any) -> T:
    """An ``owner`` with those of ``values`` that are named as its fields, and ``more``."""
    names = {item.name for item in fields(cast(Any, owner))}
    return owner(**{name: value for name, value in values.items() if name in names}, **more)

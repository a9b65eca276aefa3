"""User settings: the field of a frozen dataclass declares its default, flag, environment variable
and help.

    @dataclass(frozen=True)
    class ServerSettings:
        port: int = SERVER.flag(8080, "--port", "port to listen on", integer(0, 65535),
        "LLAMA_ARG_PORT")

Each settings class stands in the module that reads it. The command line collects the flags from the
fields (`class_flags`) and fills the class with the parsed values (`fill`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

from pyctl.settings.convert import Convert

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
    "TOOLS",
    "Flag",
    "Section",
    "class_flags",
    "fill",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """A flag that sets the field ``dest``; ``names`` and ``off`` are separated by blanks, ``off``
    are negations.

    Without ``convert`` the flag is a switch that stores ``const``. ``bare`` is the value if none
    follows the flag ("-fa -c 0" means "-fa on -c 0"). With ``many``, repeated flags join their
    tuples. --help shows ``default``.
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
        """Return all spellings, negations included."""
        return [*self.names.split(), *self.off.split()]


@dataclass(frozen=True)
class Section:
    """A section of --help."""

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
        """Return a field with ``default``, set by this flag and by ``also``.

        ``shown`` replaces the default in --help. ``facts`` are added to the metadata of the field;
        one with ``secret`` is or may hold a secret, such as a key in an address, and is shown to no
        client.
        """
        text = _default_text(default, convert) if shown is None else shown
        first = Flag(names, help, convert, env, metavar, off, const, bare, many, default=text)
        metadata = {"section": self, "flags": (first, *also), **facts}
        if default.__hash__ is None:
            return field(default_factory=lambda: default, metadata=metadata)
        return field(default=default, metadata=metadata)


def _default_text(default: object, convert: Convert | None) -> str:
    """Return the default as users type it; empty if it has no textual form."""
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
TOOLS = Section("tools")
CHAT = Section("chat")


def class_flags(owner: type[Any]) -> list[tuple[Section, Flag]]:
    """Return the flags of ``owner``'s fields, in order, each with its destination, and their
    sections of --help.
    """
    return [
        (item.metadata["section"], replace(flag, dest=item.name))
        for item in fields(owner)
        for flag in item.metadata.get("flags", ())
    ]


def fill(owner: Callable[..., T], values: Mapping[str, Any], **more: Any) -> T:
    """Construct ``owner`` from those ``values`` whose names are fields of it, and ``more``."""
    names = {item.name for item in fields(cast(Any, owner))}
    return owner(**{name: value for name, value in values.items() if name in names}, **more)

"""What binds a reply."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Constraint"]


@dataclass(frozen=True)
class Constraint:
    """``grammar`` (GBNF) binds the whole reply, which goes on from ``prefill``.

    With ``triggers`` (regular expressions) it binds nothing until the reply matches one of them, and from there on.
    """

    grammar: str
    triggers: tuple[str, ...] = ()
    prefill: str = ""

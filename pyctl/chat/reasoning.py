"""The limit on the reasoning in a reply: read from a template and a request, kept to by the
engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ReasoningLimit"]


@dataclass(frozen=True)
class ReasoningLimit:
    """The limit of ``n_tokens`` between the text ``start`` and one of ``end_texts``; at the limit,
    the tokens ``forced`` follow.

    The block starts where the reply does, after blanks; one that ``recurs`` starts at any
    ``start``, and each has the full limit. ``read`` are tokens of a block that the prompt already
    opens, its start included. ``texts`` are texts of the control tokens in these tags; no other
    control token has any.
    """

    n_tokens: int
    start: str
    end_texts: tuple[str, ...]
    forced: tuple[int, ...]
    read: tuple[int, ...] = ()
    texts: Mapping[int, bytes] = field(default_factory=dict, hash=False)
    recurs: bool = False

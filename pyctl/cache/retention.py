"""Announcements of clients about the next use of their prompts."""

from __future__ import annotations

import msgspec

from pyctl.settings.limit import limit

__all__ = ["MAX_SECONDS", "NO_RETENTION", "Retention"]

MAX_SECONDS = limit(
    86_400, "`prompt_seconds` and `head_seconds` of `cache_retention`", "400", "request", "s"
)
"""A day: a prompt that is not sent again for longer is as well loaded from disk."""


class Retention(msgspec.Struct, frozen=True):
    """The announcement of a client about the next use of its prompt.

    It weighs an eviction and never forbids one: a prefix counts as one more expected resume until
    its seconds are over, so that a client that announces everything gains nothing over others that
    do, and cannot take the memory of requests that announce nothing.

    Attributes:
        prompt_seconds: Seconds within which a prompt will resume at the end of this one; 0 for no
            announcement.
        head_seconds: The same for its head, the system message and the tools.
        evict_on_complete: Whether nothing resumes where only this request could: it may resume at
            snapshots of others, and leaves none.
    """

    prompt_seconds: int = 0
    head_seconds: int = 0
    evict_on_complete: bool = False

    @property
    def is_announced(self) -> bool:
        """True if some prefix will be used again."""
        return max(self.prompt_seconds, self.head_seconds) > 0


NO_RETENTION = Retention()
"""No announcement: the cache expects the next use by its own rules."""

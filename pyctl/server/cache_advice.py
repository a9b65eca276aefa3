"""The explanation of the tokens that a request evaluated again, and the remedy."""

from __future__ import annotations

from typing import Any

import msgspec

from pyctl.cache.plan import MIN_SHARED
from pyctl.cache.prompt_comparison import PromptComparison, Section

__all__ = ["Explanation", "explain"]

_REMEDIES: dict[Section, str] = {
    "tools": "send the same tools in the same order in all requests of a conversation",
    "system": "move text that changes from the system message to the last message",
    "variables": "keep chat_template_kwargs and reasoning_effort the same in a conversation",
    "message": "append messages instead of changing earlier ones",
    "template": "use a template that renders earlier messages the same when others follow",
    "text": "append to the text instead of changing its beginning",
    "model": "stay with one model in a conversation",
}
"""The action of a client that avoids the evaluation, by the first section that differs."""

_NOT_KEPT = "give the cache more memory: --cache-ram, or --kv-cache-dir on a disk"


class Explanation(msgspec.Struct, frozen=True):
    """The reason for which a request evaluated tokens of an earlier prompt again.

    Attributes:
        difference: The first section that differs, in words, such as "message 3 of 12"; empty if
            none does.
        n_changed: The tokens that were evaluated because of the difference.
        n_lost: The equal tokens that were evaluated because no snapshot of them was left.
        remedy: The action that avoids it.
    """

    difference: str
    n_changed: int
    n_lost: int
    remedy: str

    @property
    def text(self) -> str:
        """The explanation in one line, without the words of any prompt."""
        parts = []
        if self.n_changed:
            parts.append(f"change in {self.difference}: {self.n_changed:,} tokens evaluated again")
        if self.n_lost:
            parts.append(f"{self.n_lost:,} equal tokens without a snapshot")
        return f"{'; '.join(parts)} ({self.remedy})"

    def as_json(self) -> dict[str, Any]:
        """Return the members of ``why`` in GET /cache."""
        return {
            "difference": self.difference,
            "changed": self.n_changed,
            "lost": self.n_lost,
            "remedy": self.remedy,
        }


def explain(
    comparison: PromptComparison | None, n_prompt: int, n_cached: int
) -> Explanation | None:
    """Return why a prompt of ``n_prompt`` tokens, ``n_cached`` of them restored, evaluated tokens
    of an earlier one again; None if these are fewer than unrelated prompts share.
    """
    if comparison is None:
        return None
    n_changed = comparison.n_changed(n_prompt) if comparison.is_same_conversation else 0
    n_lost = comparison.n_lost(n_cached)
    if comparison.section == "model":
        n_changed = n_prompt - n_cached
    if n_changed + n_lost < MIN_SHARED:
        return None
    if n_lost < MIN_SHARED <= n_changed:
        n_lost = 0  # less than a batch: no snapshot is so close
    remedy = _NOT_KEPT
    if comparison.section is not None and n_changed >= n_lost:
        remedy = _REMEDIES[comparison.section]
    return Explanation(
        difference=_difference(comparison),
        n_changed=n_changed,
        n_lost=n_lost,
        remedy=remedy,
    )


def _difference(comparison: PromptComparison) -> str:
    """Return the first section that differs, in words."""
    section = comparison.section
    if section is None:
        return "the end" if not comparison.is_continued else ""
    if section == "message":
        return f"message {comparison.message} of {comparison.n_messages}"
    if section == "variables":
        return "template variables"
    return section

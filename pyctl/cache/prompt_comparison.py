"""The comparison of a prompt with the nearest remembered one, by sections.

Without sections, as in raw text and after a restart, the comparison is of tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from pyctl.cache.plan import MIN_SHARED
from pyctl.cache.recent import RecentMatches, RecentPrompt
from pyctl.prompt import Prompt, PromptSections

__all__ = ["PromptComparison", "Section", "compare_prompts"]

Section: TypeAlias = Literal["tools", "system", "variables", "message", "template", "text", "model"]
"""The first section in which a prompt differs from an earlier one.

``variables`` are the template's, such as `enable_thinking`. ``template``: all messages are equal,
but the template rendered one of them differently. ``text`` is raw text, or a chat whose sections
are unknown. ``model``: the earlier request went to another model.
"""


class PromptComparison(msgspec.Struct, frozen=True):
    """A prompt compared with an earlier one.

    Attributes:
        common: The number of leading tokens that both have.
        n_earlier: The number of tokens of the earlier prompt.
        is_continued: Whether the new prompt has all of the earlier one, up to its generation
            header.
        is_same_conversation: Whether the new prompt belongs to the conversation of the earlier one.
        section: The first section that differs, None if none does.
        message: The number of the first message that differs, from 1, after the system message; 0
            if it is not known.
        n_messages: The number of messages of the new prompt after the system message.
    """

    common: int
    n_earlier: int
    is_continued: bool = False
    is_same_conversation: bool = False
    section: Section | None = None
    message: int = 0
    n_messages: int = 0

    def n_changed(self, n_prompt: int) -> int:
        """Return the tokens after the first difference that an append would not have evaluated."""
        return 0 if self.is_continued else max(min(self.n_earlier, n_prompt) - self.common, 0)

    def n_lost(self, n_cached: int) -> int:
        """Return the equal tokens that were evaluated again: their snapshot was evicted, or there
        was none at that position.
        """
        return max(self.common - n_cached, 0)


def compare_prompts(
    prompt: Prompt, matches: RecentMatches, *, may_read_prompts: bool = True
) -> PromptComparison | None:
    """Return the comparison with the nearest of the recent prompts; None if nothing is in common.

    Nearest is the prompt that shares most tokens, unless an earlier prompt of the same conversation
    has another head: then that one, however few tokens they share.

    Clients see the kind of their request. A client that may not read prompts could find prompts of
    others token by token, if the kind depended on the number of shared tokens. Therefore only
    whole prompts and whole messages count for it.
    """
    closest = matches.closest()
    if closest is None:
        return None
    pairs = list(zip(matches.recent, matches.shared, strict=True))
    if not may_read_prompts:
        continued = next((pair for pair in pairs if pair[1] >= pair[0].prompt.end), None)
        related = continued or _latest_of_conversation(prompt, pairs)
        return _compare(prompt, *related) if related is not None else None
    nearest = (closest.recent, closest.common)
    if not closest.is_continued and not _is_same_conversation(prompt, *nearest):
        # Its head may have changed: then other conversations share as many tokens with it.
        nearest = _latest_of_conversation(prompt, pairs) or nearest
    return _compare(prompt, *nearest)


def _latest_of_conversation(
    prompt: Prompt, pairs: Iterable[tuple[RecentPrompt, int]]
) -> tuple[RecentPrompt, int] | None:
    """Return the newest of the recent prompts with the first message of ``prompt``, and the length
    that they share; None without one.
    """
    given = prompt.sections
    if given is None:
        return None
    for recent, n_shared in pairs:
        earlier = recent.prompt.sections
        if earlier is not None and _have_one_conversation(given, earlier):
            return recent, n_shared
    return None


def _compare(prompt: Prompt, nearest: RecentPrompt, common: int) -> PromptComparison:
    """Return the comparison of ``prompt`` with ``nearest``; they share ``common`` tokens."""
    is_continued = common >= nearest.prompt.end
    section: Section | None = None
    message = 0
    sections = prompt.sections
    if not is_continued and common < len(prompt):
        section, message = _first_difference(sections, nearest.prompt.sections)
    return PromptComparison(
        common=common,
        n_earlier=len(nearest.prompt),
        is_continued=is_continued,
        is_same_conversation=is_continued or _is_same_conversation(prompt, nearest, common),
        section=section,
        message=message,
        n_messages=sections.n_messages if sections is not None else 0,
    )


def _first_difference(
    given: PromptSections | None, earlier: PromptSections | None
) -> tuple[Section | None, int]:
    """Return the first section that differs, with the number of the message if it is one.

    The head of a prompt has tools and system message; the order of the two depends on the template.
    """
    if given is None or earlier is None:
        return "text", 0
    if given.tools != earlier.tools:
        return "tools", 0
    if given.system != earlier.system:
        return "system", 0
    if given.variables != earlier.variables:
        return "variables", 0
    n_equal = given.n_equal_messages(earlier)
    if n_equal < min(given.n_messages, earlier.n_messages):
        return "message", n_equal + 1
    if given.n_messages < earlier.n_messages:
        return None, 0  # the conversation went back to an earlier message
    return "template", 0


def _is_same_conversation(prompt: Prompt, recent: RecentPrompt, common: int) -> bool:
    """Return whether both prompts belong to one conversation. Without sections, they share the
    first reply; in raw text, more than unrelated prompts share.
    """
    given = prompt.sections
    earlier = recent.prompt.sections
    if given is None or earlier is None:
        return common >= (prompt.opening or MIN_SHARED)
    return _have_one_conversation(given, earlier)


def _have_one_conversation(given: PromptSections, earlier: PromptSections) -> bool:
    """Return whether the first messages are equal, and of tools and system message at least one.

    A request for a title repeats the first message of its conversation, but has neither the tools
    nor the system message.
    """
    has_head = given.tools == earlier.tools or given.system == earlier.system
    return has_head and bool(given.first_message) and given.first_message == earlier.first_message

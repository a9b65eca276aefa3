"""The reasoning budget of a request: its fields, and the tokens that the engine counts and forces."""

from __future__ import annotations

from pyctl.chat.format import Turn
from pyctl.engine.budget import ReasoningLimit
from pyctl.server.fields import Fields
from pyctl.server.settings import Service

__all__ = ["reasoning_limit"]


def reasoning_limit(fields: Fields, service: Service, turn: Turn | None) -> ReasoningLimit | None:
    """What ``fields``, or else the server's settings, allow; None without a limit. Raises RequestError.

    A chat knows its own tags; any other request has to name them (``reasoning_budget_start_tag`` and ``..._end_tags``).
    """
    n_tokens = fields.integer("reasoning_budget_tokens", "thinking_budget_tokens", default=-1, low=-1)
    message = fields.string("reasoning_budget_message", service.settings.reasoning_budget_message if turn else "")
    if turn is None:
        start, read = fields.string("reasoning_budget_start_tag", ""), fields.string("generation_prompt", "")
        named = "reasoning_budget_end_tags" if "reasoning_budget_end_tags" in fields else "reasoning_budget_end_tag"
        ends = [tag for tag in fields.strings(named) or () if tag]
    else:
        tags = service.chat.tags
        start, ends = tags.open, [tags.close, *tags.interrupts]
        if "<function=" in service.chat.template.source:  # Qwen's newer form, which has the tag on a line of its own
            ends.insert(0, f"\n{tags.close}")
        read = turn.opened + turn.prefill if turn.where == "reasoning" else ""
        n_tokens = n_tokens if n_tokens >= 0 else service.settings.reasoning_budget
    if n_tokens < 0 or not start or not ends:
        return None

    def ids(text: str) -> tuple[int, ...]:
        return tuple(service.tokenizer.tokenize(text, add_special=False, parse_special=True))

    return ReasoningLimit(
        n_tokens, ids(start), tuple(ids(end) for end in ends), (*ids(message), *ids(ends[0])), ids(read) if read else ()
    )

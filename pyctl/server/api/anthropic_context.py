"""Anthropic's ``context_management``: edits that shorten a conversation before it is rendered.

``clear_thinking_20251015`` and ``clear_tool_uses_20250919`` are applied as their options demand.
``compact_20260112`` writes a summary once the prompt is long enough; until then there is nothing to
do, and after that the request is refused: this server writes none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from pyctl.errors import NotSupportedError, RequestError
from pyctl.requests.body_reader import Body, Integer, at_most, items, strings
from pyctl.settings.limit import limit

__all__ = ["EditedContext", "edit_context"]

_MAX_EDITS = limit(8, "`context_management.edits`", "400", "request")

_CLEAR_THINKING = "clear_thinking_20251015"
_CLEAR_TOOL_USES = "clear_tool_uses_20250919"
_COMPACT = "compact_20260112"

_CLEARED = "[cleared to save context]"
"""The text in place of a result."""

_THINKING = ("thinking", "redacted_thinking")


class _Amount(Body, frozen=True):
    """A number of tokens, turns or uses."""

    type: str = ""
    value: Annotated[int, Integer(low=0)] = 0


class _Edit(Body, frozen=True):
    """An edit; its type determines its fields."""

    type: str = ""
    keep: Any = None
    trigger: _Amount | None = None
    clear_at_least: _Amount | None = None
    clear_tool_inputs: Any = None
    exclude_tools: Annotated[tuple[str, ...], strings] = ()


class EditedContext(msgspec.Struct, frozen=True):
    """The result of all edits.

    Attributes:
        values: The body of the request after them.
        n_original: The tokens of the prompt before them.
        n_tokens: Its tokens now.
        applied: The edits that changed something, in Anthropic's form.
    """

    values: Mapping[str, Any]
    n_original: int
    n_tokens: int
    applied: tuple[dict[str, Any], ...] = ()

    def answer(self) -> dict[str, Any]:
        """Return the member ``context_management`` of a message."""
        return {"applied_edits": list(self.applied)}


def edit_context(
    values: Mapping[str, Any], count: Callable[[Mapping[str, Any]], int]
) -> EditedContext | None:
    """Return the body ``values`` after its edits, None without any; ``count`` returns the tokens of
    a body's prompt.

    Raises RequestError, and NotSupportedError for an edit that would be due and cannot be made.
    """
    requested = values.get("context_management")
    if requested is None:
        return None
    if not isinstance(requested, dict):
        raise RequestError("'context_management' must be an object")
    listed = requested.get("edits")
    edits = [] if listed is None else items(listed, "context_management.edits")
    at_most(_MAX_EDITS, len(edits), "context_management.edits")
    n_tokens = count(values)
    edited = EditedContext(values, n_tokens, n_tokens)
    for index, edit in enumerate(edits):
        where = f"context_management.edits[{index}]"
        if not isinstance(edit, dict):
            raise RequestError(f"'{where}' must be an object")
        edited = _apply(_Edit.from_json(edit), where, edited, count)
    return edited


def _apply(
    edit: _Edit, where: str, before: EditedContext, count: Callable[[Mapping[str, Any]], int]
) -> EditedContext:
    """Return the context after ``edit``, unchanged if it is not due or not worth it."""
    messages = before.values.get("messages")
    if not isinstance(messages, list):
        return before  # reading the conversation reports it
    if edit.type == _COMPACT:
        _refuse_summary(edit, where, before.n_tokens)
        return before
    if edit.type == _CLEAR_THINKING:
        shorter, n_cleared = _without_thinking(messages, _kept_turns(edit.keep, where))
        counted = "cleared_thinking_turns"
    elif edit.type == _CLEAR_TOOL_USES:
        shorter, n_cleared = _without_tool_uses(messages, edit, where, before.n_tokens)
        counted = "cleared_tool_uses"
    else:
        raise NotSupportedError(f"'{where}' of type {edit.type[:80]!r} is not supported")
    if not n_cleared:
        return before
    values = {**before.values, "messages": shorter}
    n_tokens = count(values)
    n_saved = before.n_tokens - n_tokens
    if edit.clear_at_least is not None and n_saved < edit.clear_at_least.value:
        return before
    report = {"type": edit.type, "cleared_input_tokens": max(n_saved, 0), counted: n_cleared}
    return EditedContext(values, before.n_original, n_tokens, (*before.applied, report))


def _refuse_summary(edit: _Edit, where: str, n_tokens: int) -> None:
    """Raise NotSupportedError if a summary is due."""
    trigger = edit.trigger or _Amount(type="input_tokens", value=150_000)
    if n_tokens > trigger.value:
        raise NotSupportedError(
            f"'{where}' would summarise the conversation, since it has more than {trigger.value} "
            "tokens; request the summary in a message"
        )


# -- reasoning
# ----------------------------------------------------------------------------------


def _kept_turns(keep: Any, where: str) -> int | None:
    """Return how many turns keep their reasoning, None for all."""
    if keep is None:
        return 1
    if keep == "all":
        return None
    if not isinstance(keep, dict):
        raise RequestError(f"'{where}.keep' must be all or an object")
    amount = _Amount.from_json(keep)
    if amount.type not in ("all", "thinking_turns"):
        raise RequestError(f"'{where}.keep.type' must be all or thinking_turns")
    return None if amount.type == "all" else amount.value


def _without_thinking(messages: list[Any], n_kept: int | None) -> tuple[list[Any], int]:
    """Return the messages with the reasoning of the last ``n_kept`` turns that have some, and the
    number of turns that lost theirs.
    """
    thinking = [index for index, message in enumerate(messages) if _thinks(message)]
    n_cleared = 0 if n_kept is None else max(len(thinking) - n_kept, 0)
    cleared = messages.copy()
    for index in thinking[:n_cleared]:
        message = messages[index]
        content = [block for block in message["content"] if not _has_type(block, _THINKING)]
        cleared[index] = {**message, "content": content}
    return cleared, n_cleared


def _thinks(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return False
    return any(_has_type(block, _THINKING) for block in _blocks(message))


# -- uses of tools
# ----------------------------------------------------------------------------------


def _without_tool_uses(
    messages: list[Any], edit: _Edit, where: str, n_tokens: int
) -> tuple[list[Any], int]:
    """Return the messages without the results of the oldest uses of tools, and the number of uses
    that lost theirs; unchanged if the edit is not due.
    """
    names = _uses(messages)
    if not _is_due(edit.trigger, where, n_tokens, len(names)):
        return messages, 0
    n_kept = 3 if edit.keep is None else _kept_uses(edit.keep, where)
    oldest = list(names)[: max(len(names) - n_kept, 0)]
    excluded = frozenset(edit.exclude_tools)
    cleared = {use_id for use_id in oldest if names[use_id] not in excluded}
    emptied = _emptied_inputs(edit.clear_tool_inputs, where, cleared, names)
    n_cleared = 0
    shorter = []
    for message in messages:
        blocks = []
        for block in _blocks(message):
            if _is_result_of(block, cleared) and block.get("content") != _CLEARED:
                n_cleared += 1
                blocks.append({**block, "content": _CLEARED})
            elif _has_type(block, ("tool_use",)) and block.get("id") in emptied:
                blocks.append({**block, "input": {}})
            else:
                blocks.append(block)
        shorter.append({**message, "content": blocks} if blocks else message)
    return shorter, n_cleared


def _uses(messages: list[Any]) -> dict[str, str]:
    """Return the names of the tools that were used, by the id of the use, the oldest first."""
    names: dict[str, str] = {}
    for message in messages:
        for block in _blocks(message):
            if _has_type(block, ("tool_use",)) and isinstance(block.get("id"), str):
                names[block["id"]] = str(block.get("name"))
    return names


def _is_due(trigger: _Amount | None, where: str, n_tokens: int, n_uses: int) -> bool:
    if trigger is None:
        return n_tokens > 100_000
    if trigger.type == "input_tokens":
        return n_tokens > trigger.value
    if trigger.type == "tool_uses":
        return n_uses > trigger.value
    raise RequestError(f"'{where}.trigger.type' must be input_tokens or tool_uses")


def _kept_uses(keep: Any, where: str) -> int:
    amount = _Amount.from_json(keep) if isinstance(keep, dict) else _Amount()
    if amount.type != "tool_uses":
        raise RequestError(f"'{where}.keep' must be an object of type tool_uses")
    return amount.value


def _emptied_inputs(
    requested: Any, where: str, cleared: set[str], names: Mapping[str, str]
) -> set[str]:
    """Return the ids of the ``cleared`` uses that also lose their input."""
    if not requested:
        return set()
    if requested is True:
        return cleared
    tools = frozenset(strings(requested, f"{where}.clear_tool_inputs"))
    return {use_id for use_id in cleared if names[use_id] in tools}


def _is_result_of(block: Any, use_ids: set[str]) -> bool:
    if not _has_type(block, ("tool_result",)):
        return False
    use_id = block.get("tool_use_id")
    return isinstance(use_id, str) and use_id in use_ids


# -- blocks
# ----------------------------------------------------------------------------------


def _blocks(message: Any) -> list[Any]:
    """Return the blocks of a message, none for a text."""
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, list) else []


def _has_type(block: Any, kinds: tuple[str, ...]) -> bool:
    return isinstance(block, dict) and block.get("type") in kinds

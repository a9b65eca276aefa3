"""Anthropic's ``thread``: a request that continues a conversation as the whole of it.

``{"type": "create"}`` keeps the conversation under the id of the reply; ``{"type": "continue",
"previous_message_id": ...}`` brings only the new messages. The prompt equals the one of a
client that sends everything. A thread whose request fails or is cancelled stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from pyctl.errors import RequestError, ThreadError, ThreadMismatchError
from pyctl.requests.body_reader import Body, items
from pyctl.requests.json_text import parse_json
from pyctl.server.http import encode
from pyctl.server.threads import KeptThread, Threads

__all__ = ["THREAD_SECONDS", "ThreadTurn", "read_turn", "with_thread_seconds"]

THREAD_SECONDS = 3600
"""The seconds for which the cache expects the next turn of a thread."""

_HEAD = ("system", "tools")
"""The fields that a thread has from its first request."""

_FORGETS = ("cache_prompt", "fallbacks")
"""Fields whose request cannot be kept, or whose reply may be another model's."""


class _ThreadBody(Body, frozen=True):
    type: Any = None
    previous_message_id: str = ""


class ThreadTurn(msgspec.Struct, frozen=True):
    """A turn of a thread.

    Attributes:
        values: The body of the request with the whole conversation.
        thread: The conversation up to the reply.
        continued: The id of the reply that it continues, empty for a new thread.
    """

    values: dict[str, Any]
    thread: KeptThread
    continued: str = ""

    def keep(self, threads: Threads, message_id: str, blocks: list[dict[str, Any]]) -> None:
        """Keep the thread under the id of its reply, whose content is ``blocks``."""
        reply = encode({"role": "assistant", "content": blocks})
        thread = replace(self.thread, messages=(*self.thread.messages, reply))
        threads.keep(message_id, thread, self.continued)


def read_turn(values: dict[str, Any], threads: Threads, owner: bytes) -> ThreadTurn | None:
    """Return the turn that the body ``values`` describes; None without a ``thread``.

    Raises LostThreadError for an unknown thread, ThreadMismatchError if the request changes a field
    of the thread, ThreadError if the conversation cannot be kept, and RequestError.
    """
    requested = values.get("thread")
    if requested is None:
        return None
    if not isinstance(requested, dict):
        raise RequestError("'thread' must be an object")
    body = _ThreadBody.from_json(requested)
    if body.type not in ("create", "continue"):
        raise RequestError("'thread.type' must be create or continue")
    _check_can_keep(values)
    given = items(values.get("messages"), "messages")
    new = tuple(encode(message) for message in given)
    if body.type == "create":
        head = {name: values[name] for name in _HEAD if values.get(name) is not None}
        thread = KeptThread(owner, encode(head), new)
        thread.check_size()
        return ThreadTurn(values, thread)
    if not body.previous_message_id:
        raise RequestError("'thread.previous_message_id' is required to continue a thread")
    earlier = threads.find(body.previous_message_id, owner)
    head = msgspec.json.decode(earlier.head)
    _check_head(values, head)
    thread = replace(earlier, messages=(*earlier.messages, *new))
    thread.check_size()
    # Bounded as one body is: a thread grows by many of them.
    history = parse_json(b"[" + b",".join(earlier.messages) + b"]")
    whole = {**values, **head, "messages": [*history, *given]}
    return ThreadTurn(whole, thread, body.previous_message_id)


def with_thread_seconds(retention: Any) -> dict[str, Any]:
    """Return the field ``cache_retention`` of a turn, which another turn will follow."""
    fields = dict(retention) if isinstance(retention, dict) else {}
    announced = fields.get("prompt_seconds")
    if not isinstance(announced, int) or announced < THREAD_SECONDS:
        fields["prompt_seconds"] = THREAD_SECONDS
    return fields


def _check_can_keep(values: Mapping[str, Any]) -> None:
    """Raise ThreadError for a request whose conversation cannot be continued by its id."""
    for name in _FORGETS:
        value = values.get(name)
        excludes = value is False if name == "cache_prompt" else bool(value)
        if excludes:
            raise ThreadError(
                f"'thread' and '{name}' exclude each other; send the conversation without 'thread'",
                (name,),
            )


def _check_head(values: Mapping[str, Any], head: Mapping[str, Any]) -> None:
    """Raise ThreadMismatchError if ``values`` change the ``head`` of a thread."""
    changed = [
        name for name in _HEAD if values.get(name) is not None and values[name] != head.get(name)
    ]
    if changed:
        raise ThreadMismatchError(changed)

"""Anthropic's Messages API: endpoints and replies; `anthropic_request` has the requests.

Names and members of replies are llama-server's. Differences, after Anthropic's own API and its
clients:

* A block is closed before the next one is opened; llama-server closes all of them at the end.
* ``stop_reason`` is stop_sequence where one ended the reply; llama-server's is end_turn.
* A tool_use block starts with an empty ``input``: typed clients read it.
* Usage has ``cache_creation_input_tokens``, the evaluated tokens at which later prompts can resume;
  at the start of a stream it is 0, as they are not evaluated yet.
* The last usage repeats the cached tokens.
* ``max_tokens`` 0 evaluates the prompt, and the message is empty.
* A silent stream gets ping events, not comments, which the watchdogs of some clients do not see.
* Errors carry ``"type": "error"`` in addition to ``error``, in bodies and in events, and
  Anthropic's types; a prompt that does not fit is also refused in Anthropic's words, by which
  agents find that they have to shorten it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from pyctl.chat.reply import ReplyDelta
from pyctl.engine.request import Done
from pyctl.errors import ThreadError
from pyctl.requests.body import ChatBody
from pyctl.requests.json_text import parse_object
from pyctl.requests.prepare import prepare
from pyctl.requests.prepared_reply import PreparedReply
from pyctl.requests.request_pool import Fetched
from pyctl.server.api.anthropic_context import EditedContext, edit_context
from pyctl.server.api.anthropic_diagnostics import Diagnostics, diagnostics_of
from pyctl.server.api.anthropic_request import chat_fields
from pyctl.server.api.anthropic_thread import ThreadTurn, read_turn, with_thread_seconds
from pyctl.server.api.token_counts import count_chat_tokens
from pyctl.server.app_state import HttpService
from pyctl.server.http import JsonResponse, anthropic_error, named_frames, owner_of
from pyctl.server.reply import EventReply, identity
from pyctl.server.sending import respond

__all__ = ["count_tokens", "messages"]

_PING = named_frames([{"type": "ping"}])


class RequestedParts(msgspec.Struct, frozen=True):
    """The parts of a request besides its message, None for those that it lacks.

    Attributes:
        turn: The turn of a thread.
        diagnostics: The diagnosis of a cache miss.
        context: The conversation after its edits.
    """

    turn: ThreadTurn | None = None
    diagnostics: Diagnostics | None = None
    context: EditedContext | None = None

    def members(self, n_cached: int) -> dict[str, Any]:
        """Return the requested members of a message, ``n_cached`` tokens of whose prompt were
        restored.
        """
        if self.diagnostics is None:
            return self.edits()
        return {"diagnostics": self.diagnostics.answer(n_cached), **self.edits()}

    def edits(self) -> dict[str, Any]:
        """Return the member that reports edits, if the request has any."""
        return {} if self.context is None else {"context_management": self.context.answer()}


class MessageReply(EventReply):
    """A message: blocks of thinking, text and tool use, in the order in which the model writes
    them.
    """

    error_form = staticmethod(anthropic_error)

    def __init__(
        self,
        service: HttpService,
        prepared: PreparedReply,
        requested: RequestedParts,
    ) -> None:
        """Answer the ``prepared`` request with the ``requested`` members."""
        super().__init__(service, prepared)
        self._threads = service.shared.threads
        self._requested = requested
        self._blocks: list[dict[str, Any]] = []
        self._parts: list[str] = []  # texts sent for the last block
        self._id, self._model = (identity(service)[name] for name in ("id", "model"))

    def ping(self) -> bytes:
        return _PING

    def error_event(self, error: Exception) -> bytes:
        return named_frames([anthropic_error(error)])

    def begin(self) -> list[dict[str, Any]]:
        cached = self.progress.n_cached if self.progress is not None else 0
        usage = _usage(len(self.request.prompt), cached, n_written=0, n_predicted=0)
        message = self._message([], None, None, usage) | self._requested.members(cached)
        return [{"type": "message_start", "message": message}]

    def more(self, delta: ReplyDelta) -> list[dict[str, Any]]:
        events = []
        if delta.reasoning:
            events += self._fill("thinking", "thinking", delta.reasoning)
        if delta.content:
            events += self._fill("text", "text", delta.content)
        for call in delta.calls:
            if call.name:
                events += self._open(
                    {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                )
            if call.arguments:
                self._parts.append(call.arguments)
                events.append(self._delta("input_json", "partial_json", call.arguments))
        return events

    def close(self, done: Done) -> list[dict[str, Any]]:
        reason, word = self._stopped(done)
        delta = {"stop_reason": reason, "stop_sequence": word}
        closing = self._close()
        self._remember()
        ended = {"type": "message_delta", "delta": delta, "usage": _usage_json(done)}
        return [*closing, ended | self._requested.edits(), {"type": "message_stop"}]

    def body(self, done: Done) -> dict[str, Any]:
        self._close()
        self._remember()
        message = self._message(self._blocks, *self._stopped(done), _usage_json(done))
        return message | self._requested.members(done.timings.n_cached)

    def _remember(self) -> None:
        """Keep the data that later requests name by the id of this message, now that it is
        complete.
        """
        turn = self._requested.turn
        if turn is not None:
            turn.keep(self._threads, self._id, self._blocks)
        diagnostics = self._requested.diagnostics
        if diagnostics is not None:
            diagnostics.remember(self._id)

    def _message(
        self,
        blocks: list[dict[str, Any]],
        reason: str | None,
        word: str | None,
        usage: dict[str, int],
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": blocks,
            "model": self._model,
            "stop_reason": reason,
            "stop_sequence": word,
            "usage": usage,
        }

    def _stopped(self, done: Done) -> tuple[str, str | None]:
        """Return ``stop_reason`` and ``stop_sequence``."""
        word = done.stopping_word if done.stop_type == "word" else None
        if done.stop_type == "limit":
            return "max_tokens", None
        if any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use", word
        return ("end_turn" if word is None else "stop_sequence"), word

    def _fill(self, kind: str, member: str, text: str) -> list[dict[str, Any]]:
        events = []
        if not self._parts or self._blocks[-1]["type"] != kind:
            events = self._open({"type": kind, member: ""})
        self._parts.append(text)
        return [*events, self._delta(kind, member, text)]

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close()
        self._blocks.append(block)
        return [
            *events,
            {
                "type": "content_block_start",
                "index": len(self._blocks) - 1,
                "content_block": dict(block),
            },
        ]

    def _delta(self, kind: str, member: str, text: str) -> dict[str, Any]:
        delta = {"type": f"{kind}_delta", member: text}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        """Complete the last block, if it is still open."""
        if not self._blocks:
            return []
        block = self._blocks[-1]
        text = "".join(self._parts)
        self._parts.clear()
        events = []
        if block["type"] == "thinking":
            block |= {"thinking": text, "signature": ""}
            events.append(self._delta("signature", "signature", ""))
        elif block["type"] == "text":
            block["text"] = text
        else:
            block["input"] = _object(text)
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; an empty object if they are not an object."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage_json(done: Done) -> dict[str, int]:
    stats = done.stats
    return _usage(
        stats.n_prompt,
        done.timings.n_cached,
        n_written=stats.n_written,
        n_predicted=done.timings.n_predicted,
    )


def _usage(n_prompt: int, n_cached: int, *, n_written: int, n_predicted: int) -> dict[str, int]:
    """Return the tokens of a message; the prompt's are the sum of the first three."""
    return {
        "cache_creation_input_tokens": n_written,
        "cache_read_input_tokens": n_cached,
        "input_tokens": n_prompt - n_cached - n_written,
        "output_tokens": n_predicted,
    }


async def messages(service: HttpService, request: Request) -> ASGIApp:
    """Answer POST /v1/messages."""
    body = await request.body()
    threads = service.shared.threads
    owner = owner_of(request.headers)

    def read(fetched: Fetched) -> MessageReply:
        """Return the reply to prepare; edits apply to the whole conversation of a thread."""
        values = parse_object(body)
        turn = read_turn(values, threads, owner)
        if turn is not None:
            values = turn.values
        context = edit_context(values, partial(_count_tokens, service, fetched))
        chat = chat_fields(values if context is None else context.values)
        if turn is not None:
            chat["cache_retention"] = with_thread_seconds(chat.get("cache_retention"))
        (prepared,) = prepare(service, ChatBody.from_json(chat), fetched)
        diagnostics = diagnostics_of(
            values,
            service.shared.request_records,
            owner,
            service.model,
            prepared.request.prompt,
        )
        return MessageReply(service, prepared, RequestedParts(turn, diagnostics, context))

    return respond(service, request, [await service.shared.pool.read(request, read)])


async def count_tokens(service: HttpService, request: Request) -> ASGIApp:
    """Answer POST /v1/messages/count_tokens."""
    body = await request.body()

    def count(fetched: Fetched) -> dict[str, Any]:
        values = parse_object(body)
        if values.get("thread") is not None:
            raise ThreadError("tokens of a 'thread' are not counted; send the whole conversation")
        context = edit_context(values, partial(_count_tokens, service, fetched))
        if context is None:
            return {"input_tokens": _count_tokens(service, fetched, values)}
        original = {"original_input_tokens": context.n_original}
        return {"input_tokens": context.n_tokens, "context_management": original}

    return JsonResponse(await service.shared.pool.read(request, count))


def _count_tokens(service: HttpService, fetched: Fetched, values: Mapping[str, Any]) -> int:
    """Return the tokens of the prompt that a body is rendered to."""
    return count_chat_tokens(service, chat_fields(values), fetched)

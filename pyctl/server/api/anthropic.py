"""Anthropic's Messages API: endpoints and replies; `anthropic_request` has the requests.

Names and members of replies are llama-server's. What differs, after Anthropic's own API and its
clients:

* A block is closed before the next one is opened; llama-server closes all of them at the end.
* ``stop_reason`` is stop_sequence where one ended the reply; llama-server's is end_turn.
* A tool_use block starts with an empty ``input``, and usage has ``cache_creation_input_tokens``,
  always 0: typed clients read both.
* The last usage repeats the cached tokens.
* A silent stream gets ping events, not comments, which the watchdogs of some clients do not see.
* Errors carry ``"type": "error"`` in addition to ``error``, in bodies and in events, and
  Anthropic's types; a prompt that does not fit is also refused in Anthropic's words, by which
  agents find that they have to shorten it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from pyctl.chat.reply import ReplyDelta
from pyctl.engine.request import Done
from pyctl.requests.body import ChatBody
from pyctl.requests.json_text import parse_object
from pyctl.requests.prepare import prepare
from pyctl.requests.prepared_reply import PreparedReply
from pyctl.requests.service import Service
from pyctl.server.api.anthropic_request import chat_fields
from pyctl.server.api.token_counts import n_input_tokens
from pyctl.server.app_state import HttpService
from pyctl.server.http import JsonResponse, anthropic_error, named_frames
from pyctl.server.reply import EventReply, identity
from pyctl.server.sending import respond

__all__ = ["count_tokens", "messages"]

_PING = named_frames([{"type": "ping"}])


class MessageReply(EventReply):
    """A message: blocks of thinking, text and tool use, in the order in which the model writes
    them.
    """

    error_form = staticmethod(anthropic_error)

    def __init__(self, service: Service, prepared: PreparedReply) -> None:
        super().__init__(service, prepared)
        self._blocks: list[dict[str, Any]] = []
        self._parts: list[str] = []  # texts sent for the last block
        self._id, self._model = (identity(service)[name] for name in ("id", "model"))

    def ping(self) -> bytes:
        return _PING

    def error_event(self, error: Exception) -> bytes:
        return named_frames([anthropic_error(error)])

    def begin(self) -> list[dict[str, Any]]:
        cached = self.progress.n_cached if self.progress is not None else 0
        usage = _usage(len(self.request.prompt), cached, 0)
        return [{"type": "message_start", "message": self._message([], None, None, usage)}]

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
        return [
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": _usage_json(done)},
            {"type": "message_stop"},
        ]

    def body(self, done: Done) -> dict[str, Any]:
        self._close()
        return self._message(self._blocks, *self._stopped(done), _usage_json(done))

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
    return _usage(done.stats.n_prompt, done.timings.n_cached, done.timings.n_predicted)


def _usage(n_prompt: int, n_cached: int, n_predicted: int) -> dict[str, int]:
    return {
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "input_tokens": n_prompt - n_cached,
        "output_tokens": n_predicted,
    }


async def messages(service: HttpService, request: Request) -> ASGIApp:
    """Answer POST /v1/messages."""
    body = await request.body()
    (prepared,) = await service.shared.pool.read(
        request,
        lambda fetched: prepare(
            service, ChatBody.from_json(chat_fields(parse_object(body))), fetched
        ),
    )
    return respond(service, request, [MessageReply(service, prepared)])


async def count_tokens(service: HttpService, request: Request) -> ASGIApp:
    """Answer POST /v1/messages/count_tokens."""
    return JsonResponse({"input_tokens": await n_input_tokens(service, request, chat_fields)})

"""OpenAI's Responses API: endpoints and replies; `responses_request` reads their requests.

Names and members are llama-server's, with those that OpenAI's own clients read in addition:
sequence numbers, indices, the request's settings in the body, the ends of reasoning and of
arguments. Differences from llama-server:

* An item is done before the next one is added; llama-server ends all of them at the end.
* The response opens with the prefill, and a silent stream repeats ``response.in_progress``: some
  clients do not count comments as life.
* A reply that was cut off has the status incomplete, with the reason, and so has its last item;
  llama-server's are completed. The event remains ``response.completed``, which its clients wait
  for. Half of a call's arguments has no ``done`` event, since clients run a call by it.
* A failure is a ``response.failed`` and an ``error`` event; llama-server sends data without a name,
  which some clients skip.
* ``store`` is false: each request brings its whole input, and the cache makes that cheap.
* ``encrypted_content`` carries the reasoning to clients that request it with ``include``;
  llama-server leaves it empty.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pyctl.chat.reply import CallDelta, ReplyDelta
from pyctl.engine.backend import TopTokens
from pyctl.engine.request import Done, Piece, Progress
from pyctl.engine.sampling import Sampling
from pyctl.errors import RequestError
from pyctl.requests.body import ChatBody
from pyctl.requests.cache_diagnosis import RequestRecord
from pyctl.requests.chat_request import parallel_calls
from pyctl.requests.json_text import decode, parse_object
from pyctl.requests.prepare import prepare
from pyctl.requests.prepared_reply import PreparedReply
from pyctl.requests.request_pool import Fetched
from pyctl.server.api.custom_tool import unwrap_input
from pyctl.server.api.openai_cache import ComparedReply
from pyctl.server.api.responses_request import ResponseRequest, ResponsesBody, seal
from pyctl.server.api.token_counts import n_input_tokens
from pyctl.server.app_state import HttpService
from pyctl.server.http import JsonResponse, error_body, named_frames, owner_of
from pyctl.server.reply import EventReply
from pyctl.server.reply_json import progress_json, timings_json
from pyctl.server.sending import respond
from pyctl.text import random_id

__all__ = ["create", "input_tokens"]


class ResponseReply(EventReply):
    """A response: items of reasoning, message and calls, in the order in which the model writes
    them.
    """

    def __init__(
        self,
        service: HttpService,
        prepared: PreparedReply,
        asked: ResponseRequest,
        comparison: ComparedReply,
    ) -> None:
        """Prepare the reply to ``asked``; ``comparison`` explains its misses of the cache."""
        super().__init__(service, prepared)
        self._asked = asked
        self._comparison = comparison
        self._seals = "reasoning.encrypted_content" in asked.body.include
        self._settings = {
            **_settings(asked.body, prepared.request.sampling, service),
            **asked.caching.applied(),
        }
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []  # texts sent for the last item
        self._probs: list[dict[str, Any]] = []  # log-probabilities of its tokens
        self._held_probs: list[TopTokens] = []  # of tokens whose text may not be sent yet
        self._open = False
        self._n_events = 0

    def ping(self) -> bytes:
        return named_frames([self._still()]) if self.begun else super().ping()

    def error_event(self, error: Exception) -> bytes:
        body = error_body(error)["error"]
        code = body["type"]
        message = body["message"]
        failure = {"error": {"code": code, "message": message}}
        return named_frames(
            [
                *self._close_item("incomplete"),
                self._lifecycle("failed", "failed", failure),
                self._event("error", code=code, message=message, param=None, error=body),
            ]
        )

    def begin(self) -> list[dict[str, Any]]:
        return [self._lifecycle(name, "in_progress") for name in ("created", "in_progress")]

    def reported(self, events: list[dict[str, Any]], progress: Progress) -> list[dict[str, Any]]:
        events = events or [self._still()]
        events[-1] |= {**self._timings(), "prompt_progress": progress_json(progress, self.options)}
        return events

    def frames(self, events: list[dict[str, Any]]) -> bytes:
        if events:
            events[-1] |= self._timings()
        return named_frames(events)

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        self._held_probs += piece.probs
        return super()._take(piece)

    def more(self, delta: ReplyDelta) -> list[dict[str, Any]]:
        events = []
        if delta.reasoning:
            events += self._reason(delta.reasoning)
        if delta.content:
            events += self._emit(delta.content)
        for call in delta.calls:
            events += self._call(call)
        if events:  # only texts of messages have log-probabilities
            self._held_probs.clear()
        return events

    def close(self, done: Done) -> list[dict[str, Any]]:
        events = self._close_item(self._status(done))
        completed = self._event("response.completed", response=self.body(done))
        timings = timings_json(done.timings, done.stats, done.receipt)
        return [*events, {**completed, "timings": timings}]

    def body(self, done: Done) -> dict[str, Any]:
        status = self._status(done)
        self._close_item(status)
        self._comparison.remember(self._settings["id"])
        cut = status == "incomplete"
        members = {
            "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": self._usage(done),
            **self._comparison.diagnostics(done.timings.n_cached),
        }
        return self._body(status, members)

    def _status(self, done: Done) -> str:
        """Return the status of the reply and of its last item."""
        is_cut = done.stop_type == "limit" and not self._asked.caching.is_prewarm
        return "incomplete" if is_cut else "completed"

    def _body(self, status: str, members: dict[str, Any]) -> dict[str, Any]:
        return {**self._settings, "status": status, "output": list(self._items), **members}

    def _event(self, kind: str, **members: Any) -> dict[str, Any]:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **members}

    def _lifecycle(
        self, name: str, status: str, members: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return self._event(f"response.{name}", response=self._body(status, members or {}))

    def _still(self) -> dict[str, Any]:
        """Return the event for a time without news, with the fields of the first events."""
        response = {"id": self._settings["id"], "object": "response", "status": "in_progress"}
        return self._event("response.in_progress", response=response)

    def _timings(self) -> dict[str, Any]:
        return (
            {"timings": timings_json(self._timings_so_far())}
            if self.options.timings_per_token
            else {}
        )

    def _indices(self, *, part: bool = True) -> dict[str, Any]:
        """Return the place of an event: the last item, and its only part."""
        indices = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return {**indices, "content_index": 0} if part else indices

    def _reason(self, text: str) -> list[dict[str, Any]]:
        events = []
        if not self._is_open("reasoning"):
            item = {"id": "rs_" + random_id(), "summary": [], "type": "reasoning", "content": []}
            events = self._add({**item, "encrypted_content": ""})
        self._texts.append(text)
        return [
            *events,
            self._event("response.reasoning_text.delta", **self._indices(), delta=text),
        ]

    def _emit(self, text: str) -> list[dict[str, Any]]:
        """Return the events for a part of the reply's text; the first part opens a message."""
        events = []
        if not self._is_open("message"):
            events = self._add(
                {"content": [], "id": "msg_" + random_id(), "role": "assistant", "type": "message"}
            )
            events.append(
                self._event("response.content_part.added", **self._indices(), part=_text_part(""))
            )
        self._texts.append(text)
        probs = self.logprobs(self._held_probs)["content"]
        self._probs += probs
        return [
            *events,
            self._event(
                "response.output_text.delta", **self._indices(), delta=text, logprobs=probs
            ),
        ]

    def _call(self, call: CallDelta) -> list[dict[str, Any]]:
        """Return the events for a part of a call. The first part opens an item, of a function or a
        custom tool.
        """
        events = []
        if call.name:
            space, tool = self._asked.tools.get(
                call.name, (None, {"type": "function", "name": call.name})
            )
            name = call.id.removeprefix("call_")
            item: dict[str, Any] = {"id": f"fc_{name}", "arguments": "", "type": "function_call"}
            if tool["type"] == "custom":
                item = {"id": f"ctc_{name}", "input": "", "type": "custom_tool_call"}
            if call.name != tool["name"]:
                item["namespace"] = space
            events = self._add({**item, "call_id": f"call_{name}", "name": tool["name"]})
        self._texts.append(call.arguments)
        if call.arguments and self._is_open("function_call"):
            indices = self._indices(part=False)
            events.append(
                self._event(
                    "response.function_call_arguments.delta", **indices, delta=call.arguments
                )
            )
        return events

    def _is_open(self, kind: str) -> bool:
        return self._open and self._items[-1]["type"] == kind

    def _add(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close_item()
        item["status"] = "in_progress"
        self._items.append(item)
        self._open = True
        added = self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=dict(item)
        )
        return [*events, added]

    def _close_item(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the last item with ``status``, if it is still open; a call that is whole is completed
        in any case.
        """
        if not self._open:
            return []
        self._open = False
        item = self._items[-1]
        text = "".join(self._texts)
        probs = self._probs
        self._probs = []
        self._texts.clear()
        if item["type"] in ("function_call", "custom_tool_call") and _is_object(text):
            status = "completed"  # the reply was cut off after it
        item["status"] = status
        if item["type"] == "reasoning":
            item["content"] = [{"text": text, "type": "reasoning_text"}]
            item["encrypted_content"] = seal(text) if self._seals else ""
            events = [self._event("response.reasoning_text.done", **self._indices(), text=text)]
        elif item["type"] == "message":
            item["content"] = [_text_part(text, probs)]
            events = [
                self._event(
                    "response.output_text.done", **self._indices(), text=text, logprobs=probs
                ),
                self._event(
                    "response.content_part.done", **self._indices(), part=_text_part(text, probs)
                ),
            ]
        elif item["type"] == "custom_tool_call":
            kind = "response.custom_tool_call_input"
            item["input"] = unwrap_input(text)
            events = [
                self._event(f"{kind}.delta", **self._indices(part=False), delta=item["input"])
            ]
            if status == "completed":
                events.append(
                    self._event(f"{kind}.done", **self._indices(part=False), input=item["input"])
                )
        else:
            item["arguments"] = text
            members = {**self._indices(part=False), "name": item["name"], "arguments": text}
            is_whole = status == "completed"
            events = (
                [self._event("response.function_call_arguments.done", **members)]
                if is_whole
                else []
            )
        return [
            *events,
            self._event(
                "response.output_item.done", output_index=len(self._items) - 1, item=dict(item)
            ),
        ]

    def _usage(self, done: Done) -> dict[str, Any]:
        n_prompt = done.stats.n_prompt
        n_predicted = done.timings.n_predicted
        return {
            "input_tokens": n_prompt,
            "output_tokens": n_predicted,
            "total_tokens": n_prompt + n_predicted,
            "input_tokens_details": {
                "cached_tokens": done.timings.n_cached,
                "cache_write_tokens": done.stats.n_written,
            },
            "output_tokens_details": {"reasoning_tokens": self.prepared.splitter.n_reasoning},
        }


def _settings(body: ResponsesBody, sampling: Sampling, service: HttpService) -> dict[str, Any]:
    """Return the settings of its request that a response repeats."""
    return {
        "created_at": int(time.time()),
        "id": "resp_" + random_id(),
        "model": service.model,
        "object": "response",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": parallel_calls(service, body.parallel_tool_calls),
        "previous_response_id": None,
        "reasoning": {name: body.reasoning.get(name) for name in ("effort", "summary")},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": body.text.format or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


def _is_object(arguments: str) -> bool:
    """Return whether the arguments of a call are a whole object."""
    try:
        decode(arguments.encode(), dict[str, Any])
    except (RequestError, msgspec.ValidationError):
        return False
    return True


def _text_part(text: str, probs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": list(probs), "text": text}


async def create(service: HttpService, request: Request) -> ASGIApp:
    """Answer POST /v1/responses."""
    values = parse_object(await request.body())
    owner = owner_of(request.headers)
    reply = await service.shared.pool.read(
        request, lambda fetched: _reply(service, values, owner, fetched)
    )
    return respond(service, request, [reply])


async def input_tokens(service: HttpService, request: Request) -> Response:
    """Answer POST /v1/responses/input_tokens."""
    n = await n_input_tokens(
        service, request, lambda values: ResponseRequest.from_json(values).chat
    )
    return JsonResponse({"input_tokens": n, "object": "response.input_tokens"})


def _reply(
    service: HttpService, values: dict[str, Any], owner: bytes, fetched: Fetched
) -> ResponseReply:
    asked = ResponseRequest.from_json(values)
    (prepared,) = prepare(service, ChatBody.from_json(asked.chat), fetched)
    record = RequestRecord.from_prompt(owner, service.model, prepared.request.prompt)
    comparison = ComparedReply(asked.caching, service.shared.request_records, record)
    return ResponseReply(service, prepared, asked, comparison)

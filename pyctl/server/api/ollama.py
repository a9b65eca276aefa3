"""Ollama's API: endpoints, requests as chats and completions, and replies as lines of JSON.

It has the engine, the cache, the tools and the images of all other APIs. Differences from Ollama:

* The server has its own model, whatever name a request gives. Models are chosen when the server
  starts, so `reject_path` answers all other paths. Names in lists have the tag ``latest``, by which
  clients look for them.
* ``options`` that load a model (num_ctx, num_gpu, ...) have no effect, nor has ``keep_alive``: the
  model is loaded.
* A prompt that does not fit is refused; Ollama leaves out old messages.
* Without ``options``, sampling parameters are the server's.
* ``think`` true or absent leaves it to the template whether the model reasons; a template without
  reasoning ignores it.
* ``template`` and ``context`` of /api/generate are refused.
* Tool calls come in one chunk, after all text. One that was cut off is left out; the done_reason is
  length then.
* ``logprobs`` are refused.
* ``load_duration`` is the time before the evaluation of the prompt, in the queue or until a
  sleeping model is loaded.
* A silent stream repeats an empty chunk.

Fields that Ollama's API lacks (cache_prompt, prefix_cache, tool_choice, ...) are passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pyctl.chat.call_formats.scan import parse_json
from pyctl.chat.reply import ReplyDelta
from pyctl.engine.request import Done
from pyctl.errors import NotSupportedError, RequestError
from pyctl.requests.body import AnyBody
from pyctl.requests.body_reader import Body, Integer, items
from pyctl.requests.json_text import parse_object
from pyctl.requests.prepare import prepare
from pyctl.requests.prepared_reply import PreparedReply
from pyctl.server.api.embeddings import embed_texts, normalised
from pyctl.server.api.ollama_request import chat_body, generate_body
from pyctl.server.app_state import HttpService
from pyctl.server.http import JsonResponse, json_lines, ollama_error
from pyctl.server.reply import EventReply
from pyctl.server.sending import respond

__all__ = ["chat", "embed", "generate", "reject_path", "version"]

API_VERSION = "0.13.0"
"""The release of Ollama that has these endpoints; clients read it before they use an
ability.
"""


class _EmbedBody(Body, frozen=True):
    """The body of POST /api/embed."""

    input: Any = None
    truncate: bool = True
    dimensions: Annotated[int | None, Integer(low=1)] = None


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _ns(ms: float) -> int:
    return int(ms * 1e6)


class OllamaReply(EventReply):
    """The reply of /api/chat: thinking and content as they come, tool calls in the end."""

    media_type = "application/x-ndjson"
    error_form = staticmethod(ollama_error)
    read: Callable[[Mapping[str, Any]], AnyBody | None] = staticmethod(chat_body)

    @staticmethod
    def said(thinking: str, content: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the members of a chunk that hold more of the reply."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def sent(self, events: list[dict[str, Any]]) -> bytes:
        return json_lines(events)

    def ping(self) -> bytes:
        return self.sent([self._chunk("", "", [])])

    def error_event(self, error: Exception) -> bytes:
        return self.sent([self.error_form(error)])

    def more(self, delta: ReplyDelta) -> list[dict[str, Any]]:
        text = delta.reasoning or delta.content
        return [self._chunk(delta.reasoning, delta.content, [])] if text else []

    def close(self, done: Done) -> list[dict[str, Any]]:
        calls = self._calls(done)
        last = {**self._chunk("", "", []), **self._end(done)}
        return [self._chunk("", "", calls), last] if calls else [last]

    def body(self, done: Done) -> dict[str, Any]:
        reply = self.prepared.splitter.reply
        return {**self._chunk(reply.reasoning, reply.content, self._calls(done)), **self._end(done)}

    def _chunk(self, thinking: str, content: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        members = self.said(thinking, content, calls)
        return {"model": self.service.model, "created_at": _now(), **members, "done": False}

    def _end(self, done: Done) -> dict[str, Any]:
        timings = done.timings
        waited_ms = max(timings.first_token_ms - timings.prompt_ms, 0.0)
        return {
            "done": True,
            "done_reason": "length" if done.stop_type == "limit" else "stop",
            "total_duration": _ns(waited_ms + timings.prompt_ms + timings.predicted_ms),
            "load_duration": _ns(waited_ms),
            "prompt_eval_count": done.stats.n_prompt,
            "prompt_eval_duration": _ns(timings.prompt_ms),
            "eval_count": timings.n_predicted,
            "eval_duration": _ns(timings.predicted_ms),
        }

    def _calls(self, done: Done) -> list[dict[str, Any]]:
        """Return the calls of the reply, without one that was cut off."""
        calls = []
        for call in self.prepared.splitter.reply.calls:
            try:
                arguments = parse_json(call.arguments)
            except ValueError:
                arguments = None
            is_whole = isinstance(arguments, dict)
            if not is_whole and done.stop_type == "limit":
                continue
            function = {
                "index": call.index,
                "name": call.name,
                "arguments": arguments if is_whole else {},
            }
            calls.append({"id": call.id, "function": function})
        return calls


class OllamaTextReply(OllamaReply):
    """The reply of /api/generate."""

    read = staticmethod(generate_body)

    @staticmethod
    def said(thinking: str, content: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": content, **({"thinking": thinking} if thinking else {})}


async def chat(service: HttpService, request: Request) -> ASGIApp:
    """Answer POST /api/chat."""
    return await _answer(service, request, OllamaReply)


async def generate(service: HttpService, request: Request) -> ASGIApp:
    """Answer POST /api/generate."""
    return await _answer(service, request, OllamaTextReply)


async def _answer(service: HttpService, request: Request, form: type[OllamaReply]) -> ASGIApp:
    body = await request.body()

    def prepared(fetched: Mapping[str, bytes]) -> list[PreparedReply]:
        options = form.read(parse_object(body))
        return prepare(service, options, fetched) if options is not None else []

    replies = await service.shared.pool.read(request, prepared)
    if not replies:
        await asyncio.wrap_future(service.worker.call(lambda: None, needs_model=True))
        loaded = {"model": service.model, "created_at": _now(), **form.said("", "", [])}
        return JsonResponse({**loaded, "done": True, "done_reason": "load"})
    return respond(service, request, [form(service, replies[0])])


async def embed(service: HttpService, request: Request) -> Response:
    """Answer POST /api/embed: vectors of length 1. Raises RequestError unless the input is text."""
    body = _EmbedBody.parse(await request.body())
    texts = [body.input] if isinstance(body.input, str) else items(body.input, "input")
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("'input' must be a string or a list of strings")
    began = asyncio.get_running_loop().time()
    vectors, n_tokens = await embed_texts(service, request, texts, cut=body.truncate)
    seconds = asyncio.get_running_loop().time() - began
    return JsonResponse(
        {
            "model": service.model,
            "embeddings": [
                normalised(rows[:, : body.dimensions], 2)[0].tolist() for rows in vectors
            ],
            "total_duration": _ns(seconds * 1e3),
            "load_duration": 0,
            "prompt_eval_count": n_tokens,
        }
    )


async def version(service: object, request: Request) -> Response:
    """Answer GET /api/version."""
    return JsonResponse({"version": API_VERSION})


async def reject_path(service: object, request: Request) -> Response:
    """Raise NotSupportedError for all other paths below /api/."""
    raise NotSupportedError(
        "of Ollama's API this server has version, tags, show, ps, chat, generate and embed; "
        "choose models when it starts, by `pyctl serve -m FILE` or `-hf USER/REPO`"
    )

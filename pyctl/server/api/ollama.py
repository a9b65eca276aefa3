"""Ollama's API: endpoints, requests as chats and completions, and replies as lines of JSON.

It has the engine, the cache, the tools and the images of all other APIs. What differs from Ollama:

* The server has its own model, whatever name a request gives. Models are chosen when the server
  starts, so `refuse` answers all other paths. Names in lists have the tag ``latest``, by which
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
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

from msgspec import field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pyctl.chat.call_formats.scan import parse_json
from pyctl.chat.reply import ReplyDelta
from pyctl.engine.request import Done
from pyctl.engine.sampling import Sampling
from pyctl.errors import NotSupportedError, RequestError
from pyctl.requests.body import AnyBody, ChatBody, CompletionBody, InfillBody
from pyctl.requests.body_reader import Body, Integer, items, others
from pyctl.requests.body_reader import refuse as refuse_fields
from pyctl.requests.image_sources import ImagePart
from pyctl.requests.json_text import parse_object
from pyctl.requests.prepare import prepare
from pyctl.requests.prepared_reply import PreparedReply
from pyctl.server.api.embeddings import normalised, vectors_of
from pyctl.server.app_state import HttpService
from pyctl.server.http import JsonResponse, encode, json_lines, ollama_error
from pyctl.server.models import Models
from pyctl.server.reply import EventReply
from pyctl.server.sending import respond

__all__ = [
    "chat",
    "chat_body",
    "embed",
    "generate",
    "generate_body",
    "loaded_models",
    "refuse",
    "show",
    "tags",
    "version",
]

log = logging.getLogger(__name__)

API_VERSION = "0.13.0"
"""The release of Ollama that has what these endpoints have; clients read it before they use an
ability.
"""

# -- requests
# ----------------------------------------------------------------------------------


class OllamaBody(Body, frozen=True):
    """The fields that /api/chat and /api/generate have in common."""

    stream: bool = True
    format: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    think: Any = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class OllamaChatBody(OllamaBody, frozen=True):
    """The body of POST /api/chat."""

    messages: list[Any] = field(default_factory=list)
    tools: list[Any] | None = None


class OllamaGenerateBody(OllamaBody, frozen=True):
    """The body of POST /api/generate."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    images: list[Any] = field(default_factory=list)
    raw: bool = False
    template: str = ""
    context: Any = None


class _Message(Body, frozen=True):
    role: Any = None
    content: Any = ""
    thinking: str | None = None
    images: list[Any] = field(default_factory=list)
    tool_calls: list[Any] = field(default_factory=list)
    tool_name: str | None = None
    tool_call_id: str | None = None


class _EmbedBody(Body, frozen=True):
    """The body of POST /api/embed."""

    input: Any = None
    truncate: bool = True
    dimensions: Annotated[int | None, Integer(low=1)] = None


_IGNORED = frozenset(
    {"model", "keep_alive", "truncate", "shift", "tools", "n", "n_cmpl"}
    | {"n_probs", "post_sampling_probs", "logprobs", "top_logprobs"}
)
"""Fields that mean nothing to us, and of other APIs what this one lacks or expresses in another
way.
"""

_SAMPLING = (
    frozenset(item.name for item in fields(Sampling) if not item.name.startswith("grammar"))
    - _IGNORED
)

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}
"""Levels of ``think``. No template has a fourth one under this name."""


def chat_body(values: Mapping[str, Any]) -> ChatBody | None:
    """Return the chat completion that /api/chat describes, None if it only loads the model. Raises
    RequestError.
    """
    body = OllamaChatBody.of(values)
    chat = _generation(values, body)
    chat["messages"] = _messages(body.messages)
    if body.tools is not None:
        chat["tools"] = [
            {"type": "function", **tool} if isinstance(tool, dict) else tool for tool in body.tools
        ]
    return ChatBody.of(chat) if body.messages else None


def generate_body(values: Mapping[str, Any]) -> AnyBody | None:
    """Return the completion for /api/generate, None if it only loads the model. Raises RequestError
    or NotSupportedError.
    """
    body = OllamaGenerateBody.of(values)
    if body.raw and (body.template or body.system or body.context):
        raise RequestError("raw mode does not support template, system, or context")
    if body.template:
        raise NotSupportedError(
            "'template' is not supported: 'raw' takes a prompt that is rendered already"
        )
    if body.context:
        raise NotSupportedError(
            "'context' is not supported: /api/chat takes the whole conversation"
        )
    if body.images and (body.raw or body.suffix):
        raise RequestError("'images' cannot be combined with 'raw' or 'suffix'")
    if not (body.prompt or body.suffix or body.images):
        return None
    options = _generation(values, body)
    if body.suffix:
        return InfillBody.of({**options, "input_prefix": body.prompt, "input_suffix": body.suffix})
    if body.raw:
        return CompletionBody.of({**options, "prompt": body.prompt})
    system = [{"role": "system", "content": body.system}] if body.system else []
    content = _content(body.prompt, body.images, "images")
    return ChatBody.of({**options, "messages": [*system, {"role": "user", "content": content}]})


def _generation(values: Mapping[str, Any], body: OllamaBody) -> dict[str, Any]:
    """Return the fields of a completion that control the answer."""
    refuse_fields(values, {"logprobs": ("/v1/chat/completions has them",)})
    options = {
        **others(values, type(body), _IGNORED),
        **_options(body.options),
        "stream": body.stream,
    }
    if body.format == "json":
        options["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        options["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    elif body.format not in (None, ""):
        raise RequestError("'format' must be \"json\" or a JSON schema")
    switch = {"enable_thinking": body.think} if isinstance(body.think, bool) else {}
    options["chat_template_kwargs"] = {**switch, **body.chat_template_kwargs}
    if isinstance(body.think, str) and body.think in _EFFORTS:
        options["reasoning_effort"] = _EFFORTS[body.think]
    elif body.think is not None and not switch:
        raise RequestError(f"'think' must be true, false or one of {', '.join(_EFFORTS)}")
    return options


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in options.items() if name in _SAMPLING or name == "stop"}
    n_predict = options.get("num_predict")
    if n_predict is not None:
        n = Integer(is_limit=True)(n_predict, "options.num_predict")
        fields["max_tokens"] = n if n > 0 else -1
    if ignored := sorted(options.keys() - fields.keys() - {"num_predict"}):
        log.debug("options without effect, since the model is loaded: %.200s", ", ".join(ignored))
    return fields


def _messages(values: list[Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat completion. Calls without ids get some, and so do their
    results: templates may need them.
    """
    messages: list[dict[str, Any]] = []
    open_calls: list[tuple[Any, str]] = []  # name and id of calls without a result
    n_calls = 0
    for index, value in enumerate(values):
        where = f"messages[{index}]"
        if not isinstance(value, dict):
            raise RequestError(f"{where} must be an object")
        message = _Message.of(value)
        role = message.role.lower() if isinstance(message.role, str) else message.role
        converted = {
            "role": role,
            "content": _content(message.content, message.images, f"{where}.images"),
        }
        if message.thinking:
            converted["reasoning_content"] = message.thinking
        if message.tool_calls:
            converted["tool_calls"] = calls = [
                _call(call, n_calls + n, f"{where}.tool_calls[{n}]")
                for n, call in enumerate(message.tool_calls)
            ]
            n_calls += len(calls)
            open_calls = [(call["function"]["name"], str(call["id"])) for call in calls]
        if role == "tool":
            if message.tool_name is not None:
                converted["name"] = message.tool_name
            converted["tool_call_id"] = message.tool_call_id or _answered(
                open_calls, message.tool_name
            )
        messages.append(converted)
    return messages


def _content(text: Any, images: list[Any], where: str) -> Any:
    """Return a text, or parts with the images before it, as Ollama has them."""
    if not images:
        return text
    if not isinstance(text, str):
        raise RequestError(f"the content next to {where} must be a string")
    parts: list[dict[str, Any]] = [
        ImagePart(image, f"{where}[{number}]") for number, image in enumerate(images)
    ]
    return [*parts, {"type": "text", "text": text}]


def _call(call: Any, number: int, where: str) -> dict[str, Any]:
    """Return a call as OpenAI writes it, with its arguments as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError(f"{where} must be an object with a function")
    arguments = function.get("arguments")
    text = (
        encode({} if arguments is None else arguments).decode()
        if not isinstance(arguments, str)
        else arguments
    )
    call_id = call.get("id") or f"call{number:05}"
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": text},
    }


def _answered(open_calls: list[tuple[Any, str]], name: str | None) -> str | None:
    """Return the id of the first open call of the tool ``name``, else of the first open one, and
    close it; None without any.
    """
    index = next((i for i, (called, _) in enumerate(open_calls) if called == name), 0)
    return open_calls.pop(index)[1] if open_calls else None


# -- replies
# ----------------------------------------------------------------------------------


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
        return [
            *([self._chunk("", "", calls)] if calls else ()),
            {**self._chunk("", "", []), **self._end(done)},
        ]

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
            if isinstance(arguments, dict) or done.stop_type != "limit":
                members = arguments if isinstance(arguments, dict) else {}
                calls.append(
                    {
                        "id": call.id,
                        "function": {"index": call.index, "name": call.name, "arguments": members},
                    }
                )
        return calls


class OllamaTextReply(OllamaReply):
    """The reply of /api/generate."""

    read = staticmethod(generate_body)

    @staticmethod
    def said(thinking: str, content: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": content, **({"thinking": thinking} if thinking else {})}


# -- endpoints
# ----------------------------------------------------------------------------------


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
    vectors, n_tokens = await vectors_of(service, request, texts, cut=body.truncate)
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


async def tags(models: Models, request: Request) -> Response:
    """Answer GET /api/tags; of a model that was not loaded yet, only the name is given."""
    unknown = [model.name for model in models if model.service is None]
    named = [
        {"name": f"{name}:latest", "model": f"{name}:latest", "details": {"format": "gguf"}}
        for name in unknown
    ]
    return JsonResponse({"models": [*map(_model, models.services), *named]})


async def loaded_models(models: Models, request: Request) -> Response:
    """Answer GET /api/ps: the models that are loaded and do not sleep."""
    running = [service for service in models.services if not service.worker.is_sleeping]
    facts = {"expires_at": _NEVER}
    return JsonResponse(
        {
            "models": [
                {**_model(each), **facts, "context_length": each.info.n_ctx} for each in running
            ]
        }
    )


_NEVER = "2318-01-01T00:00:00Z"


async def show(service: HttpService, request: Request) -> Response:
    """Answer POST /api/show: the model, for any name."""
    parse_object(await request.body())
    info = service.info
    model = _model(service)
    return JsonResponse(
        {
            "template": service.chat.template.source,
            "details": model["details"],
            "model_info": {
                "general.architecture": info.arch,
                "general.basename": info.model_name,
                "general.parameter_count": info.n_params,
                f"{info.arch}.context_length": info.n_ctx,
                f"{info.arch}.embedding_length": info.n_embd,
                f"{info.arch}.vocab_size": info.n_vocab,
            },
            "capabilities": _capabilities(service),
            "modified_at": model["modified_at"],
        }
    )


def _capabilities(service: HttpService) -> list[str]:
    chat = service.chat
    capabilities = {
        "completion": True,
        "tools": chat.capabilities.tools,
        "insert": {"pre", "suf", "mid"} <= service.tokenizer.fim_tokens().keys(),
        "vision": service.info.vision,
        "thinking": chat.dialect.tags.is_known,
        "embedding": service.settings.embeddings,
    }
    return [name for name, has in capabilities.items() if has]


def _model(service: HttpService) -> dict[str, Any]:
    """Return the model as lists have it. ``digest`` identifies it, and how it is evaluated; it is
    not the file's.
    """
    info = service.info
    name = service.model if ":" in service.model else f"{service.model}:latest"
    return {
        "name": name,
        "model": name,
        "modified_at": _modified_at(info.model_path),
        "size": info.model_size,
        "digest": info.fingerprint,
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": info.arch,
            "families": [info.arch],
            "parameter_size": _size(info.n_params),
            "quantization_level": info.ftype_name,
        },
    }


def _modified_at(path: str) -> datetime:
    try:
        seconds = Path(path).stat().st_mtime
    except OSError:  # the file may be gone; the model is in memory
        seconds = 0.0
    return datetime.fromtimestamp(seconds, timezone.utc)


def _size(n_params: int) -> str:
    """Return a number of weights as Ollama writes it: 27.4B."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n_params >= unit:
            return f"{n_params / unit:.1f}{name}"
    return str(n_params)


async def version(service: object, request: Request) -> Response:
    """Answer GET /api/version."""
    return JsonResponse({"version": API_VERSION})


async def refuse(service: object, request: Request) -> Response:
    """Raise NotSupportedError for all other paths below /api/."""
    raise NotSupportedError(
        "of Ollama's API this server has version, tags, show, ps, chat, generate and embed; "
        "choose models when it starts, by `pyctl serve -m FILE` or `-hf USER/REPO`"
    )

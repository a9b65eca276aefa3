"""Chat and text completions in OpenAI's forms, and llama-server's own completion: endpoints and
replies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyctl.chat.reply import CallDelta, ReplyDelta
from pyctl.engine.backend import TopTokens
from pyctl.engine.request import Done, Piece, Progress
from pyctl.errors import NotSupportedError, RequestError
from pyctl.prompt import Prompt
from pyctl.requests.body import ChatBody, CompletionBody, InfillBody
from pyctl.requests.body_reader import Body
from pyctl.requests.cache_diagnosis import RequestRecord
from pyctl.requests.json_text import parse_object
from pyctl.requests.prepare import prepare
from pyctl.requests.prepared_reply import PreparedReply
from pyctl.requests.request_pool import Fetched
from pyctl.requests.service import Service
from pyctl.server.api.openai_cache import ComparedReply, PromptCaching
from pyctl.server.app_state import HttpService
from pyctl.server.http import JsonResponse, encode, frame, owner_of
from pyctl.server.models import Models
from pyctl.server.reply import Reply, identity
from pyctl.server.reply_json import settings_json, usage_json
from pyctl.server.sending import ReplyResponse, respond

__all__ = ["chat_completions", "completions", "control", "infill", "native_completion"]


class _ControlBody(Body, frozen=True):
    """The body of POST /v1/chat/completions/control."""

    id: str = ""
    action: str = ""


class NativeReply(Reply):
    """The reply of /completion."""

    def __init__(self, service: Service, prepared: PreparedReply) -> None:
        super().__init__(service, prepared)
        self._has_new_line = False

    def progress_frames(self, progress: Progress) -> bytes:
        return self._chunk(Piece("", ()), self.extras(progress))

    def piece_frames(self, piece: Piece) -> bytes:
        self._has_new_line = self._has_new_line or "\n" in piece.text
        return self._chunk(piece, self.extras())

    def ended(self, done: Done) -> bytes:
        return frame(encode(self._chosen(self._final(done, "", [], self._has_new_line))))

    def whole(self, done: Done) -> dict[str, Any]:
        text = "".join(self.texts)
        tokens = self.tokens if self.options.return_tokens else []
        body = self._final(done, text, tokens, "\n" in text)
        if self.request.n_probs is not None:
            body["completion_probabilities"] = self.logprobs(self.probs)["content"]
        return self._chosen(body)

    def _chunk(self, piece: Piece, extras: bytes) -> bytes:
        body: dict[str, Any] = {
            "index": self.index,
            "content": piece.text,
            "tokens": piece.tokens,
            "stop": False,
            "id_slot": self.progress.seq if self.progress is not None else 0,
            "tokens_predicted": self.n_predicted,
            "tokens_evaluated": len(self.request.prompt),
        }
        if piece.probs:
            body["completion_probabilities"] = self.logprobs(list(piece.probs))["content"]
        return frame(encode(body)[:-1] + extras + b"}")

    def _final(
        self, done: Done, content: str, tokens: list[int], has_new_line: bool
    ) -> dict[str, Any]:
        """Return llama-server's last object of a reply: ``content`` and ``tokens``, with settings
        and timings.
        """
        n_prompt = done.stats.n_prompt
        n_predicted = done.timings.n_predicted
        settings = settings_json(
            self.request,
            self.options,
            self.service.info.draft_types,
            self._generation_prompt(),
        )
        return {
            "index": self.index,
            "content": content,
            "tokens": tokens,
            "id_slot": done.seq,
            "stop": True,
            "model": self.service.model,
            "tokens_predicted": n_predicted,
            "tokens_evaluated": n_prompt,
            "generation_settings": settings,
            "prompt": self.prepared.prompt_text,
            "has_new_line": has_new_line,
            "truncated": n_prompt + n_predicted >= self.service.info.n_ctx,
            "stop_type": done.stop_type if n_prompt else "none",
            "stopping_word": done.stopping_word,
            "tokens_cached": n_prompt + max(n_predicted - 1, 0),
            "timings": self.timings(done),
        }

    def _generation_prompt(self) -> str | None:
        """Return the part of a chat's prompt that belongs to the reply: all that follows its last
        boundary.
        """
        prompt = self.request.prompt
        if self.prepared.chat is None:
            return None
        if not prompt.boundaries:
            return ""
        tokens = prompt.tokens[prompt.boundaries[-1] :]
        return self.service.readable(tokens.tolist())

    def _chosen(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.options.response_fields:
            return body
        return _pick(body, self.options.response_fields)


def _pick(body: dict[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """Return the members at ``paths`` (``a/b`` is member b of a), each under its path; those that
    are missing are omitted.
    """
    picked: dict[str, Any] = {}
    for path in paths:
        value: Any = body
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            picked[path] = value
    return picked


class _Answer:
    """The state that the replies of one answer share: its members, whether it is verbose unless a
    request chooses, the counts of tokens so far, and for a chat its cache options and its
    comparison with an earlier one.
    """

    def __init__(self, service: HttpService) -> None:
        self.fields = identity(service)
        self.is_verbose = service.shared.settings.is_verbose
        self.usages: list[dict[str, Any]] = []
        self.prompts: list[Prompt] = []
        self.caching = PromptCaching()
        self.comparison: ComparedReply | None = None

    def cache_members(self, done: Done) -> dict[str, Any]:
        """Return the members about the prompt cache that the request asked for, now that its reply
        is ``done``, and let later requests compare with it.
        """
        if self.comparison is None:
            return {}
        diagnostics = self.comparison.diagnostics(done.timings.n_cached)
        self.comparison.remember(str(self.fields["id"]))
        return {**self.caching.applied(), **diagnostics}


class _OpenAIReply(Reply):
    """The members that the two forms have in common."""

    end = frame(b"[DONE]")
    kind: str
    chunk_kind: str

    @property
    def n_reasoning(self) -> int | None:
        """The tokens of reasoning, None if they are not counted."""
        return None

    def __init__(self, service: Service, prepared: PreparedReply, answer: _Answer) -> None:
        super().__init__(service, prepared)
        self._answer = answer
        self._repeats = any(prompt is self.request.prompt for prompt in answer.prompts[-1:])
        answer.prompts.append(self.request.prompt)
        self.id = str(answer.fields["id"])
        self._tail = b"," + encode({**answer.fields, "object": self.chunk_kind})[1:-1]

    def usage(self, done: Done) -> dict[str, Any]:
        """Return the counts of tokens; a prompt counts once, with the first of its replies."""
        has_prediction = self.prepared.has_prediction
        usage = usage_json(done, self.n_reasoning, has_prediction=has_prediction)
        if self._repeats:
            usage |= {
                "prompt_tokens": 0,
                "total_tokens": usage["completion_tokens"],
                "prompt_tokens_details": {},
            }
        return usage

    def usage_frame(self, done: Done) -> bytes:
        """Return the tokens of all replies, after the last of them, if the client requests them."""
        self._answer.usages.append(self.usage(done))
        is_last = len(self._answer.usages) == len(self._answer.prompts)
        if not is_last or not self.options.stream_options.include_usage:
            return b""
        usage = encode(_sum(self._answer.usages))
        timings = encode(self.timings(done))
        return frame(
            b'{"choices":[]' + self._tail + b',"usage":' + usage + b',"timings":' + timings + b"}"
        )

    def body(self, choice: dict[str, Any], done: Done) -> dict[str, Any]:
        """Return the whole answer, with one choice."""
        body = {
            "choices": [choice],
            **self._answer.fields,
            "object": self.kind,
            "usage": self.usage(done),
            **self._answer.cache_members(done),
        }
        body["timings"] = self.timings(done)
        asked = self.options.verbose
        if self._answer.is_verbose if asked is None else asked:
            native = NativeReply(self.service, self.prepared)
            native.texts = self.texts
            native.tokens = self.tokens
            body["__verbose"] = native.whole(done)
        return body


class ChatReply(_OpenAIReply):
    """A chat completion: the reply taken apart into reasoning, content and tool calls."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, service: Service, prepared: PreparedReply, answer: _Answer) -> None:
        super().__init__(service, prepared, answer)
        self._splitter = prepared.splitter
        chat = prepared.chat
        streams_echo = chat is None or self.options.echo or not chat.is_continued
        echo = prepared.splitter.echo
        has_echo = streams_echo and bool(echo.reasoning or echo.content)
        self._echo = echo if has_echo else None  # until the first delta
        self._said_role = False
        self._called = False
        self._held_probs: list[TopTokens] = []
        self._before = b'{"choices":[{"finish_reason":null,"index":%d,"delta":' % self.index
        self._content_before = self._before + b'{"content":'
        self._reasoning_before = self._before + b'{"reasoning_content":'
        self._after = b"}}]" + self._tail + b"}"
        self._plain = not self.options.timings_per_token and self.request.n_probs is None

    @property
    def n_reasoning(self) -> int:
        return self._splitter.n_reasoning

    def collect(self, piece: Piece) -> None:
        super().collect(piece)
        self._splitter.feed(piece.text, piece.tokens)

    def progress_frames(self, progress: Progress) -> bytes:
        return self._chunk(_ROLE, extras=self.extras(progress))

    def piece_frames(self, piece: Piece) -> bytes:
        frames = b"" if self._said_role else self._role()
        self._held_probs += piece.probs
        delta = self._splitter.feed(piece.text, piece.tokens)
        if self._echo is not None:
            delta = self._with_echo(delta)
        return frames + self._deltas(delta)

    def ended(self, done: Done) -> bytes:
        frames = self._role() + self._deltas(self._with_echo(self._splitter.finish()))
        timings = b',"timings":' + encode(self.timings(done))
        usage = self.usage_frame(done)
        finish = encode(self._finish(done)), self.index, self._probs_json()
        last = b'{"choices":[{"finish_reason":%s,"index":%d,"delta":{}%s}]' % finish
        members = self._answer.cache_members(done)
        about_cache = b"," + encode(members)[1:-1] if members else b""
        timings = b"" if usage else timings
        return frames + frame(last + self._tail + about_cache + timings + b"}") + usage

    def whole(self, done: Done) -> dict[str, Any]:
        self._splitter.finish()
        message = self._splitter.reply.message(self._splitter.echo)
        self._called = "tool_calls" in message
        choice: dict[str, Any] = {
            "finish_reason": self._finish(done),
            "index": self.index,
            "message": message,
        }
        if self.request.n_probs is not None:
            choice["logprobs"] = self.logprobs(self.probs)
        return self.body(choice, done)

    def _with_echo(self, delta: ReplyDelta) -> ReplyDelta:
        """Return the deltas with the prefill of the reply in the first one, unless the client sent
        that.
        """
        echo = self._echo
        if echo is None:
            return delta
        self._echo = None
        return ReplyDelta(
            echo.reasoning + delta.reasoning, echo.content + delta.content, delta.calls
        )

    def _finish(self, done: Done) -> str:
        if self._answer.caching.is_prewarm:
            return "stop"
        return "tool_calls" if self._called and done.stop_type != "limit" else _finish(done)

    def _role(self) -> bytes:
        if self._said_role:
            return b""
        self._said_role = True
        return self._chunk(_ROLE)

    def _deltas(self, delta: ReplyDelta) -> bytes:
        """Return the chunks for ``delta``.

        A reply without log-probabilities and extras has fixed text around each delta, which is
        encoded once. Otherwise the last chunk carries them.
        """
        if delta.calls:
            self._called = True
        if self._plain and not delta.calls:
            frames = b""
            if delta.reasoning:
                frames = frame(self._reasoning_before + encode(delta.reasoning) + self._after)
            if delta.content:
                frames += frame(self._content_before + encode(delta.content) + self._after)
            return frames
        parts = []
        if delta.reasoning:
            parts.append(encode({"reasoning_content": delta.reasoning}))
        if delta.content:
            parts.append(encode({"content": delta.content}))
        parts += [encode({"tool_calls": [_call_json(call)]}) for call in delta.calls]
        frames = b"".join(self._chunk(part) for part in parts[:-1])
        if not parts:
            return frames
        return frames + self._chunk(parts[-1], self._probs_json(), self.extras())

    def _probs_json(self) -> bytes:
        """Return the log-probabilities that are not sent yet, as a member of a choice."""
        probs = self._held_probs
        self._held_probs = []
        return b',"logprobs":' + encode(self.logprobs(probs)) if probs else b""

    def _chunk(self, delta: bytes, logprobs: bytes = b"", extras: bytes = b"") -> bytes:
        return frame(self._before + delta + logprobs + b"}]" + self._tail + extras + b"}")


class TextReply(_OpenAIReply):
    """A text completion. Raises NotSupportedError for log-probabilities of an echo."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, service: Service, prepared: PreparedReply, answer: _Answer) -> None:
        super().__init__(service, prepared, answer)
        bos = service.info.bos_token if service.tokenizer.add_bos else ""
        self._echo = prepared.prompt_text.removeprefix(bos) if self.options.echo else ""
        if self.options.echo and self.request.n_probs is not None:
            raise NotSupportedError(
                "'logprobs' is not supported with 'echo': prompts have no log-probabilities"
            )

    def progress_frames(self, progress: Progress) -> bytes:
        return self._chunk("", [], self.extras(progress))

    def piece_frames(self, piece: Piece) -> bytes:
        echo = self._echo
        self._echo = ""
        return self._chunk(echo + piece.text, list(piece.probs), self.extras())

    def ended(self, done: Done) -> bytes:
        choice = {
            "text": self._echo,
            "index": self.index,
            "logprobs": None,
            "finish_reason": _finish(done),
        }
        body = self.body(choice, done)
        if len(self._answer.prompts) == 1:  # as llama-server sends it
            return frame(encode(body))
        del body["usage"]
        return frame(encode(body)) + self.usage_frame(done)

    def whole(self, done: Done) -> dict[str, Any]:
        logprobs = self.logprobs(self.probs) if self.request.n_probs is not None else None
        text = self._echo + "".join(self.texts)
        choice = {
            "text": text,
            "index": self.index,
            "logprobs": logprobs,
            "finish_reason": _finish(done),
        }
        return self.body(choice, done)

    def _chunk(self, text: str, probs: list[TopTokens], extras: bytes) -> bytes:
        logprobs = self.logprobs(probs) if probs else None
        choice = {"text": text, "index": self.index, "logprobs": logprobs, "finish_reason": None}
        return frame(b'{"choices":[' + encode(choice) + b"]" + self._tail + extras + b"}")


_ROLE = b'{"role":"assistant","content":null}'


def _call_json(call: CallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _finish(done: Done) -> str:
    return "length" if done.stop_type == "limit" else "stop"


async def chat_completions(service: HttpService, request: Request) -> ReplyResponse:
    """Answer POST /v1/chat/completions."""
    values = parse_object(await request.body())
    owner = owner_of(request.headers)
    answer = _Answer(service)

    def read(fetched: Fetched) -> list[PreparedReply]:
        answer.caching = PromptCaching.from_json(values, values.get("messages"))
        body = ChatBody.from_json(answer.caching.with_chat_fields(values))
        prepared = prepare(service, body, fetched)
        record = RequestRecord.from_prompt(owner, service.model, prepared[0].request.prompt)
        answer.comparison = ComparedReply(answer.caching, service.shared.request_records, record)
        return prepared

    prepared = await service.shared.pool.read(request, read)
    replies = [ChatReply(service, each, answer) for each in prepared]
    return respond(service, request, replies, _combine)


async def control(models: Models, request: Request) -> Response:
    """Answer POST /v1/chat/completions/control, which ends the reasoning of a reply. Raises
    RequestError without id or action.
    """
    body = _ControlBody.parse(await request.body())
    if not body.id:
        raise RequestError("missing completion id")
    if body.action != "reasoning_end":
        raise RequestError("unknown control action")
    handles = models.shared.running.get(body.id)
    if handles is None:
        return JsonResponse({"success": False, "message": "no active completion for this id"})
    if not handles:
        return JsonResponse(
            {"success": False, "message": "reasoning control not enabled for this completion"}
        )
    for handle in handles:
        handle.end_reasoning()
    return JsonResponse({"success": True})


async def completions(service: HttpService, request: Request) -> ReplyResponse:
    """Answer POST /v1/completions."""
    form = partial(TextReply, service, answer=_Answer(service))
    return await _answer(service, request, CompletionBody, form)


async def native_completion(service: HttpService, request: Request) -> ReplyResponse:
    """Answer POST /completion."""
    return await _answer(service, request, CompletionBody, partial(NativeReply, service))


async def infill(service: HttpService, request: Request) -> ReplyResponse:
    """Answer POST /infill."""
    return await _answer(service, request, InfillBody, partial(NativeReply, service))


async def _answer(
    service: HttpService,
    request: Request,
    kind: type[CompletionBody],
    form: Callable[[PreparedReply], Reply],
) -> ReplyResponse:
    body = await request.body()
    prepared = await service.shared.pool.read(
        request, lambda fetched: prepare(service, kind.parse(body), fetched)
    )
    return respond(service, request, [form(each) for each in prepared], _combine)


def _combine(bodies: list[dict[str, Any]]) -> Any:
    """Return one body unchanged; several of OpenAI's as one with all choices, and llama-server's
    own as a list.
    """
    if len(bodies) == 1:
        return bodies[0]
    if "choices" not in bodies[0]:
        return bodies
    choices = [choice for body in bodies for choice in body["choices"]]
    return {**bodies[0], "choices": choices, "usage": _sum([body["usage"] for body in bodies])}


def _sum(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of counts by their names, and so within objects of counts."""
    total: dict[str, Any] = {}
    for name, n in (count for usage in usages for count in usage.items()):
        total[name] = (
            _sum([total.get(name, {}), n]) if isinstance(n, dict) else total.get(name, 0) + n
        )
    return total

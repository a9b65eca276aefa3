"""Replies of all kinds: the engine's events become the bytes that the client reads, streamed or as one body."""

from __future__ import annotations

import asyncio
import codecs
import ctypes
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyctl.cache import Divergence, RequestStats
from pyctl.chat.cached_tokenizer import Tokenizer
from pyctl.chat.chat_format import PreparedChat
from pyctl.chat.reply import ReplyDelta, ReplySplitter
from pyctl.engine.backend import TopTokens
from pyctl.engine.handle import RequestHandle
from pyctl.engine.pool import PoolPlan, StreamCounts
from pyctl.engine.request import Done, DraftCounts, Event, Failed, Piece, Progress, Request, Timings
from pyctl.engine.sampling import Sampling
from pyctl.errors import EngineError, PyctlError
from pyctl.server.body import ReplyOptions
from pyctl.server.http import (
    PING,
    ErrorForm,
    JsonResponse,
    encode,
    error_body,
    error_response,
    frame,
    named_frames,
)
from pyctl.server.request_pool import client_left
from pyctl.server.service import Service
from pyctl.text import random_id

__all__ = [
    "EventReply",
    "Identity",
    "PreparedReply",
    "Reply",
    "ReplyResponse",
    "log_error",
    "merged",
    "progress_json",
    "respond",
    "settings_json",
    "timings_json",
    "usage_json",
    "without_long",
]

TextOf: TypeAlias = Callable[[Sequence[int]], str]
"""The text of some tokens, for people."""

_LOWEST = -3.4028234663852886e38

"""Stands for minus infinity, which JSON does not have: the lowest float32."""


def probs_json(probs: Iterable[TopTokens], tokenizer: Tokenizer, after_sampling: bool = False) -> list[dict[str, Any]]:
    """One object per token, with ``top_logprobs`` inside; ``after_sampling``, with ``prob`` and ``top_probs``."""
    name, top = ("prob", "top_probs") if after_sampling else ("logprob", "top_logprobs")
    return [
        {
            **_entry(token[0], tokenizer, name),
            top: [_entry(candidate, tokenizer, name) for candidate in token[1:]],
        }
        for token in probs
    ]


def _entry(candidate: tuple[int, float], tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    token, value = candidate
    piece = tokenizer.piece(token, special=False)
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(piece)  # without half a character at the end
    return {"id": token, "token": text, "bytes": list(piece), name: max(value, _LOWEST)}


def timings_json(timings: Timings, report: RequestStats | None = None) -> dict[str, Any]:
    """Counts are tokens. The first predicted token comes with the prompt, so n tokens are n - 1 steps.

    Drafts are counted if there were any, and with --kv-pool the rows that attention read from RAM. A complete
    ``report`` adds fields that llama-server does not have: the time of lookup, restore and save within the prompt's,
    and the tokens evaluated before the request came, if any. Numbers only, as typed clients require.
    """
    n_steps = max(timings.n_predicted - 1, 0)
    drafts = timings.drafts
    counts: dict[str, float] = {}
    if drafts.n_drafted:
        counts = {"draft_n": drafts.n_drafted, "draft_n_accepted": drafts.n_accepted}
    if timings.streamed is not None:
        counts |= {"streamed_bytes": timings.streamed.n_bytes, "stream_wait_ms": timings.streamed.wait_ms}
    return {
        "cache_n": timings.n_cached,
        "prompt_n": timings.n_evaluated,
        "prompt_ms": timings.prompt_ms,
        "prompt_per_token_ms": _ratio(timings.prompt_ms, timings.n_evaluated),
        "prompt_per_second": _ratio(timings.n_evaluated, timings.prompt_ms, 1e3),
        "predicted_n": timings.n_predicted,
        "predicted_ms": timings.predicted_ms,
        "predicted_per_token_ms": _ratio(timings.predicted_ms, n_steps),
        "predicted_per_second": _ratio(n_steps, timings.predicted_ms, 1e3),
        **counts,
        **(_cache_times(report) if report is not None else {}),
    }


def _cache_times(report: RequestStats) -> dict[str, Any]:
    return {
        **({"warmed_n": report.n_warmed} if report.n_warmed else {}),
        "lookup_ms": report.lookup_ms,
        "restore_ms": report.restore_ms,
        "save_ms": report.save_ms,
    }


def cache_json(report: RequestStats, text_of: TextOf | None) -> dict[str, Any]:
    """Where the prompt was restored from, the ids of the snapshots in GET /cache, and where it left a recent prompt.

    ``text_of`` shows the words there, which may be another client's; None leaves them out.
    """
    body: dict[str, Any] = {
        "source": report.source,
        "restored": report.restored,
        "saved": report.saved,
    }
    if report.miss is not None:
        miss = report.miss
        body["miss"] = {"position": miss.position, "nearest": miss.nearest}
        if text_of is not None:
            body["miss"] |= {"was": text_of(miss.recent), "is": text_of(miss.given)}
    return body


def usage_json(done: Done, n_reasoning: int | None = None) -> dict[str, Any]:
    """OpenAI's account of a reply, with the part of the cached tokens that was evaluated for it before it came.

    ``n_reasoning`` tokens are reasoning, None if they are not counted.
    """
    warmed = {"warmed_tokens": done.stats.n_warmed} if done.stats.n_warmed else {}
    n_prompt, n_predicted = done.stats.n_prompt, done.timings.n_predicted
    return {
        "completion_tokens": n_predicted,
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + n_predicted,
        "prompt_tokens_details": {"cached_tokens": done.timings.n_cached, **warmed},
        **({} if n_reasoning is None else {"completion_tokens_details": {"reasoning_tokens": n_reasoning}}),
    }


def progress_json(progress: Progress, options: ReplyOptions) -> dict[str, Any]:
    """llama-server's ``prompt_progress``; with ``return_cache`` also ``left_ms``, the estimate for the rest."""
    left = {"left_ms": round(progress.seconds_left * 1e3)} if options.return_cache and progress.seconds_left else {}
    return {
        "total": progress.n_prompt,
        "cache": progress.n_cached,
        "processed": progress.n_processed,
        "time_ms": int(progress.ms),
        **left,
    }


def _ratio(value: float, by: float, factor: float = 1.0) -> float:
    return value * factor / by if by > 0 else 0.0


_ELSEWHERE = frozenset({"logit_bias", "grammar_kind", "grammar_triggers", "grammar_hidden", "grammar_prefill"})
"""Members of Sampling that are shown in another form, or not at all."""

_LONG = frozenset(
    ("stop", "logit_bias", "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens", "dry_sequence_breakers")
)


def settings_json(
    request: Request, options: ReplyOptions, draft_types: Sequence[str], generation_prompt: str | None = None
) -> dict[str, Any]:
    """All settings; ``draft_types`` name what proposes drafts, ``generation_prompt`` is what a chat's prompt holds of
    the reply, None without a chat."""
    sampling = request.sampling
    form = "deepseek" if options.reasoning_format in (None, "auto") else options.reasoning_format
    return {
        **{item.name: _shown(getattr(sampling, item.name)) for item in fields(Sampling) if item.name not in _ELSEWHERE},
        "stop": request.stop,
        "max_tokens": request.max_tokens,
        "n_predict": request.max_tokens,
        "n_keep": options.n_keep,
        "n_discard": options.n_discard,
        "stream": options.stream,
        "logit_bias": [{"bias": bias, "token": token} for token, bias in sampling.logit_bias],
        "n_probs": request.n_probs,
        "grammar_triggers": [{"type": 2, "value": pattern} for pattern in sampling.grammar_triggers],
        "preserved_tokens": [],
        "chat_format": "Content-only" if generation_prompt is None else "peg-native",
        "reasoning_format": form,
        "reasoning_in_content": options.stream and form == "deepseek-legacy",
        "generation_prompt": generation_prompt or "",
        "speculative.types": ",".join(draft_types) or "none",
        "timings_per_token": options.timings_per_token,
        "backend_sampling": options.backend_sampling,
        "lora": [{"id": number, "scale": scale} for number, scale in options.lora],
        "cache_prompt": request.cache_prompt,
    }


def _shown(value: Any) -> Any:
    return ctypes.c_float(value).value if isinstance(value, float) else value  # llama-server has no doubles


def without_long(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The ``settings`` in /props and /slots: all but those that may be long."""
    return {key: value for key, value in settings.items() if key not in _LONG}


# -- kinds of replies ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreparedReply:
    """Reply number ``index`` of a request: what the engine is asked, how the client wants it, and the prompt as text.

    ``splitter`` takes the reply apart; of a raw prompt's, everything is content. ``chat`` is the conversation that the
    reply continues, None for a raw prompt.
    """

    request: Request
    options: ReplyOptions
    prompt_text: str
    splitter: ReplySplitter
    index: int = 0
    chat: PreparedChat | None = None


class Identity:
    """Members that all events of one answer share."""

    def __init__(self, service: Service) -> None:
        self.fields: dict[str, Any] = {
            "created": int(time.time()),
            "id": "chatcmpl-" + random_id(),
            "model": service.model,
            "system_fingerprint": service.info.build,
        }

    def tail(self, kind: str) -> bytes:
        """The shared members as JSON, to follow ``{"choices":[...]``."""
        return b"," + encode({**self.fields, "object": kind})[1:-1]


class Reply(ABC):
    """The reply to one prompt, as ``prepared``.

    A stream calls `progressed`, `continued` and `ended` and sends what they return; anything else calls `keep` for each
    piece and then `whole`. Of a stream nothing is kept that the end does not need.
    """

    media_type = "text/event-stream"
    """Of a stream."""

    error_form: ErrorForm = staticmethod(error_body)
    """The form of errors."""

    end: bytes = b""
    """The end of a stream after the last reply."""

    id: str = ""
    """By what clients may control it while it runs; empty for nothing."""

    def __init__(self, service: Service, prepared: PreparedReply) -> None:
        self.service = service
        self.prepared = prepared
        self.request = prepared.request
        self.options = prepared.options
        self.index = prepared.index
        self.n_predicted = 0
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.probs: list[TopTokens] = []
        self.progress: Progress | None = None
        self.handle: RequestHandle | None = None  # of the request, once it is on its way
        self.sees_texts = False  # the client may read texts of other clients
        self._first = 0.0

    def progressed(self, progress: Progress) -> bytes:
        """Events for a report of the prefill, if the client wants them."""
        self.progress = progress
        return self.progress_frames(progress) if self.options.return_progress else b""

    def continued(self, piece: Piece) -> bytes:
        """Events for more of the reply."""
        if not self.n_predicted:
            self._first = time.perf_counter()
        self.n_predicted += len(piece.tokens)
        return self.piece_frames(piece)

    def keep(self, piece: Piece) -> None:
        """Remember more of a reply that is sent as a whole."""
        self.texts.append(piece.text)
        self.tokens.extend(piece.tokens)
        self.probs.extend(piece.probs)

    @abstractmethod
    def progress_frames(self, progress: Progress) -> bytes:
        """Events for a report of the prefill."""

    @abstractmethod
    def piece_frames(self, piece: Piece) -> bytes:
        """Events for more of the reply."""

    @abstractmethod
    def ended(self, done: Done) -> bytes:
        """The last events of this reply."""

    @abstractmethod
    def whole(self, done: Done) -> dict[str, Any]:
        """The reply as one body."""

    def ping(self) -> bytes:
        """A sign of life for a silent stream."""
        return PING

    def error_event(self, error: Exception) -> bytes:
        """``error`` as the last event of a stream that has begun."""
        return frame(encode(self.error_form(error)))

    def error_response(self, error: Exception) -> Response:
        """``error`` as the whole answer."""
        return error_response(error, self.error_form)

    def timings(self, done: Done) -> dict[str, Any]:
        """The account of a reply that has ended, with the cache's if the client asked for it."""
        body = timings_json(done.timings, done.stats)
        if self.options.return_cache:
            body["cache"] = cache_json(done.stats, self.service.text_of if self.sees_texts else None)
        return body

    def text(self) -> str:
        """The text that `keep` got."""
        return "".join(self.texts)

    def logprobs(self, probs: list[TopTokens]) -> dict[str, Any]:
        """``probs`` as the OpenAI endpoints write them."""
        return {"content": probs_json(probs, self.service.tokenizer, self.request.sampling.post_sampling_probs)}

    def extras(self, progress: Progress | None = None) -> bytes:
        """``,"timings":...`` and ``,"prompt_progress":...`` for an event before the end, where they were asked for."""
        parts = b""
        if self.options.timings_per_token:
            parts += b',"timings":' + encode(timings_json(self._timings_so_far()))
        if progress is not None:
            parts += b',"prompt_progress":' + encode(progress_json(progress, self.options))
        return parts

    def _timings_so_far(self) -> Timings:
        total, cached, prompt_ms = len(self.request.prompt), 0, 0.0
        if self.progress is not None:
            cached, prompt_ms = self.progress.n_cached, self.progress.ms
        predicted_ms = (time.perf_counter() - self._first) * 1e3 if self.n_predicted else 0.0
        drafts = self.handle.drafts if self.handle is not None else DraftCounts()
        return Timings(cached, total - cached, prompt_ms, self.n_predicted, predicted_ms, 0.0, drafts)


class EventReply(Reply):
    """A reply of events, which are objects: `begin`, then `more` for each part, then `close`."""

    def __init__(self, service: Service, prepared: PreparedReply) -> None:
        super().__init__(service, prepared)
        self.begun = False
        self._splitter = prepared.splitter
        self._open_reasoning = prepared.splitter.opening

    @abstractmethod
    def begin(self) -> list[dict[str, Any]]:
        """The events that come before all others."""

    @abstractmethod
    def reported(self, events: list[dict[str, Any]], progress: Progress) -> list[dict[str, Any]]:
        """``events``, which are about to be sent, with a report of the prefill."""

    @abstractmethod
    def more(self, delta: ReplyDelta) -> list[dict[str, Any]]:
        """Events for more of the reply; what the end needs of it is kept."""

    @abstractmethod
    def close(self, done: Done) -> list[dict[str, Any]]:
        """The last events."""

    @abstractmethod
    def body(self, done: Done) -> dict[str, Any]:
        """The reply that `more` has been told, as one body."""

    def progressed(self, progress: Progress) -> bytes:
        self.progress = progress
        events = self._begin()
        if self.options.return_progress:
            events = self.reported(events, progress)
        return self.sent(events)

    def progress_frames(self, progress: Progress) -> bytes:
        return self.sent(self.reported([], progress))

    def piece_frames(self, piece: Piece) -> bytes:
        return self.sent(self._begin()) + self.frames(self._take(piece))

    def ended(self, done: Done) -> bytes:
        return self.sent(self._begin()) + self.frames(self._rest()) + self.sent(self.close(done))

    def keep(self, piece: Piece) -> None:
        self.n_predicted += len(piece.tokens)
        self._take(piece)

    def whole(self, done: Done) -> dict[str, Any]:
        self._rest()
        return self.body(done)

    def sent(self, events: list[dict[str, Any]]) -> bytes:
        """``events`` as they are sent."""
        return named_frames(events)

    def frames(self, events: list[dict[str, Any]]) -> bytes:
        """``events`` of one piece, as they are sent."""
        return self.sent(events)

    def _begin(self) -> list[dict[str, Any]]:
        if self.begun:
            return []
        self.begun = True
        return self.begin()

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        text, self._open_reasoning = self._open_reasoning + piece.text, ""
        return self.more(self._splitter.feed(text, piece.tokens))

    def _rest(self) -> list[dict[str, Any]]:
        """Events of the text that was held back until the end; all that the prompt has opened, if no token came."""
        events = self.more(self._splitter.feed(self._open_reasoning)) if self._open_reasoning else []
        return events + self.more(self._splitter.finish())


# -- sending and the log ---------------------------------------------------------------------------------------------

log = logging.getLogger("pyctl.server")

MIB = 2**20


def cache_header(known: Done | Progress) -> dict[str, str]:
    """``x-pyctl-cache``: where the prompt was restored from, and tokens restored and evaluated."""
    if isinstance(known, Done):
        source, cached, evaluated = known.stats.source, known.stats.n_cached, known.stats.n_evaluated
    else:
        source, cached, evaluated = known.source, known.n_cached, known.n_prompt - known.n_cached
    return {"x-pyctl-cache": f"source={source}; cached={cached}; evaluated={evaluated}"}


def log_done(path: str, done: Done, reply: Reply) -> None:
    """Log a served request in one line, a miss in a second one, and at -lv 4 the details."""
    report, timings = done.stats, done.timings
    source = "RAM" if report.source == "ram" else report.source
    cached = f"{report.n_cached:,} from {source}" if report.n_cached else "0 cached"
    drafts = timings.drafts
    fields = [
        f"{_endpoint(path)} {report.n_prompt:7,} tokens",
        f"{cached:>19}",
        f"{report.n_evaluated:7,} new",
        f"{f'first {timings.first_token_ms / 1e3:.2f} s':>14}",
        f"{timings.n_predicted:6,}{_speed(timings.n_predicted - 1, timings.predicted_ms)}",
        *([f"drafts {drafts.n_accepted:,}/{drafts.n_drafted:,}"] if drafts.n_drafts else ()),
    ]
    log.info("%s", "  ".join(fields).rstrip(), extra={"strong": cached.strip() if report.n_cached else ""})
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s %s", _endpoint(path), "  ".join(_details(done, reply)))
    if report.miss is not None:
        reply.service.afterwards.add(partial(_log_miss, path, report.miss, reply))


def _details(done: Done, reply: Reply) -> Iterable[str]:
    """With a pool, also the MiB of restored rows that went to the device and that stayed in RAM."""
    report, timings, pool = done.stats, done.timings, reply.service.info.pool
    yield f"restore {_time(report.lookup_ms + report.restore_ms)}"
    yield f"stop {done.stop_type}"
    if report.n_warmed:
        yield f"{report.n_warmed:,} prewarmed"
    if timings.drafts.n_drafts:
        yield f"{timings.drafts.n_accepted / timings.drafts.n_drafts:.2f} tokens accepted a draft"
    if pool is not None and report.n_loaded:
        yield from _moved(pool, report.n_loaded)
    yield from _streamed(timings.streamed)


def _log_miss(path: str, miss: Divergence, reply: Reply) -> None:
    """Log where a prompt differs from a recent one, and whether another reasoning effort is the reason."""
    was, given = reply.service.text_of(miss.recent), reply.service.text_of(miss.given)
    chat = reply.prepared.chat
    reason = chat.effort_change(was, given) if chat is not None else ""
    log.info(
        "%s token %s differs from a recent prompt  nearest snapshot %s  %swas %r  is %r",
        *(_endpoint(path), f"{miss.position:,}", f"{miss.nearest:,}", reason and f"{reason}  ", was, given),
    )


def _endpoint(path: str) -> str:
    """The endpoint as lines of the log begin with it: "chat" for /v1/chat/completions."""
    return f"{path.rpartition('/v1/')[2].strip('/').removesuffix('/completions'):<12}"


def _moved(pool: PoolPlan, n: int) -> Iterable[str]:
    row_bytes = pool.layer_bytes / pool.n_rows / MIB
    up, kept = (n * row_bytes * n_layers for n_layers in (pool.n_resident, pool.n_streamed))
    yield f"K and V: {up:,.0f} MiB to the device, {kept:,.0f} MiB in RAM"


def _streamed(counts: StreamCounts | None) -> Iterable[str]:
    if counts is not None and counts.n_bytes:
        yield f"{counts.n_bytes / MIB:,.0f} MiB read from RAM, waited {_time(counts.wait_ms)}"


def log_error(path: str, error: Exception) -> None:
    """Log a request that ended with an error, with a traceback if it is unexpected."""
    if isinstance(error, PyctlError):
        log.warning("%s: %s", _endpoint(path).rstrip(), error)
    else:
        log.error("%s: unexpected error", _endpoint(path).rstrip(), exc_info=error)


def log_disconnect(path: str, replies: Sequence[Reply]) -> None:
    """Log a request whose client closed the connection."""
    n_predicted = sum(max(reply.n_predicted, len(reply.tokens)) for reply in replies)
    log.info("%s cancelled: the client disconnected  %s generated", _endpoint(path), f"{n_predicted:,}")


def _time(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:.1f} s"


def _speed(n: int, ms: float) -> str:
    if n <= 0 or ms <= 0:
        return ""
    speed = n * 1e3 / ms
    return f" at {speed:.1f}/s" if speed < 100 else f" at {speed:.0f}/s"


async def merged(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """(number of the handle, events that waited together) until all handles have ended."""
    if len(handles) == 1:  # by far the most common: nothing between the engine and the stream
        async for event in handles[0]:
            yield 0, [event, *handles[0].drain()]
        return
    found: asyncio.Queue[tuple[int, list[Event]] | Exception | None] = asyncio.Queue()

    async def take(number: int, handle: RequestHandle) -> None:
        try:
            async for event in handle:
                found.put_nowait((number, [event, *handle.drain()]))
            found.put_nowait(None)
        except Exception as error:
            found.put_nowait(error)

    tasks = [asyncio.ensure_future(take(number, handle)) for number, handle in enumerate(handles)]
    n_running = len(tasks)
    try:
        while n_running:
            item = await found.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                n_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class ActiveReply:
    """A request on its way through the engine, and the reply that is made of its events."""

    handle: RequestHandle
    reply: Reply


class ReplyResponse:
    """An ASGI application that sends ``replies``; ``combine`` makes one body of whole ones, in their order.

    When the client leaves, all work is cancelled. An error becomes a response of its own as long as nothing has been
    sent, and an event after that. A stream begins with the first event, or after one ping interval without any.
    """

    def __init__(
        self, service: Service, replies: Sequence[ActiveReply], combine: Callable[[list[dict[str, Any]]], Any]
    ) -> None:
        self._replies = replies
        self._combine = combine
        self._running = service.shared.running
        options = replies[0].reply.options
        self._streams = options.stream
        self._ping_seconds = (
            service.shared.settings.ping_seconds if options.ping_seconds is None else options.ping_seconds
        )
        self._sending = asyncio.Lock()
        self._begun = False
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        reply = self._replies[0].reply
        if reply.id:
            is_armed = reply.options.reasoning_control
            self._running[reply.id] = tuple(each.handle for each in self._replies) if is_armed else ()
        make = self._stream if self._streams else self._whole
        work = asyncio.ensure_future(make(path, scope, receive, send))
        gone = asyncio.ensure_future(client_left(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._running.pop(reply.id, None)
            for each in self._replies:
                each.handle.cancel()
            if not work.done():
                log_disconnect(path, [each.reply for each in self._replies])
                work.cancel()
            gone.cancel()
            await asyncio.wait((work, gone))
        if not work.cancelled():
            work.result()

    async def _whole(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            finals = [await _finished(each) for each in self._replies]
            bodies = [each.reply.whole(done) for each, done in zip(self._replies, finals, strict=True)]
            headers = cache_header(finals[0]) if len(finals) == 1 else {}
            response: Response = JsonResponse(self._combine(bodies), headers=headers)
            for each, done in zip(self._replies, finals, strict=True):
                log_done(path, done, each.reply)
        except Exception as error:
            log_error(path, error)
            response = self._replies[-1].reply.error_response(error)
        await response(scope, receive, send)

    async def _stream(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        reply = self._replies[-1].reply
        pinger = asyncio.ensure_future(self._ping(send, self._ping_seconds))
        try:
            async with aclosing(self._batches(path)) as batches:
                async for batch in batches:
                    await self._send(send, batch)
            await self._send(send, reply.end)
        except Exception as error:
            pinger.cancel()
            log_error(path, error)
            if not self._begun:
                return await reply.error_response(error)(scope, receive, send)
            await self._send(send, reply.error_event(error))
        finally:
            pinger.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _batches(self, path: str) -> AsyncGenerator[bytes, None]:
        """Frames as they come; those of events that wait together are joined. Raises the error of a Failed."""
        async with aclosing(merged([each.handle for each in self._replies])) as found:
            async for number, events in found:
                frames: list[bytes] = []
                for event in events:
                    if isinstance(event, Failed):
                        if any(frames):
                            yield b"".join(frames)
                        raise event.error
                    frames.append(_frames(self._replies[number].reply, event))
                    if isinstance(event, Done):
                        log_done(path, event, self._replies[number].reply)
                yield b"".join(frames)

    async def _send(self, send: Send, body: bytes) -> None:
        async with self._sending:
            if not self._begun:
                self._begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self._headers()})
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        self._last_sent = asyncio.get_running_loop().time()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        progress = self._replies[0].reply.progress if len(self._replies) == 1 else None
        headers = {
            "content-type": self._replies[0].reply.media_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **(cache_header(progress) if progress is not None else {}),
        }
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    async def _ping(self, send: Send, seconds: int) -> None:
        """Send a sign of life whenever the stream has been silent for ``seconds``; never if that is not above 0."""
        loop = asyncio.get_running_loop()
        while seconds > 0:
            rest = self._last_sent + seconds - loop.time()
            if rest > 0:
                await asyncio.sleep(rest)
            else:
                await self._send(send, self._replies[-1].reply.ping())


def _frames(reply: Reply, event: Progress | Piece | Done) -> bytes:
    if isinstance(event, Piece):
        return reply.continued(event)
    return reply.progressed(event) if isinstance(event, Progress) else reply.ended(event)


async def _finished(active: ActiveReply) -> Done:
    """Take in all events; raises what a Failed holds."""
    event: Event
    async for event in active.handle:
        if isinstance(event, Piece):
            active.reply.keep(event)
        elif isinstance(event, Failed):
            raise event.error
        elif isinstance(event, Done):
            return event
    raise EngineError("the reply ended without a result")


def respond(
    service: Service,
    replies: Sequence[Reply],
    combine: Callable[[list[dict[str, Any]]], Any] = lambda bodies: bodies[0],
) -> ReplyResponse:
    """Ask the engine for ``replies`` and answer with them. Raises ContextSizeError and UnavailableError."""
    active: list[ActiveReply] = []
    try:
        for reply in replies:
            reply.handle = service.worker.submit(reply.request)
            active.append(ActiveReply(reply.handle, reply))
    except Exception:
        for each in active:
            each.handle.cancel()
        raise
    return ReplyResponse(service, active, combine)

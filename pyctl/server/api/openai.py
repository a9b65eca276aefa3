"""Replies in OpenAI's forms, with llama-server's additions: chat completions and text completions."""

from __future__ import annotations

import time
from typing import Any

from pyctl.chat.reasoning import CallDelta, ReplyDelta
from pyctl.chat.reply_splitter import ParsedReply
from pyctl.engine.backend import TopTokens
from pyctl.engine.request import Done, Piece, Progress
from pyctl.server.api.native import NativeReply
from pyctl.server.generate.payload import usage_json
from pyctl.server.generate.prepare import PreparedReply
from pyctl.server.generate.reply import Reply
from pyctl.server.http import encode, frame
from pyctl.server.service import Service
from pyctl.text import random_id

__all__ = ["ChatReply", "Identity", "TextReply"]


class Identity:
    """What all events of one answer share."""

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


class _OpenAIReply(Reply):
    """The members that the two forms have in common."""

    end = frame(b"[DONE]")
    kind: str
    chunk_kind: str

    def __init__(self, service: Service, prepared: PreparedReply, identity: Identity) -> None:
        super().__init__(service, prepared)
        self._identity = identity
        self.id = str(identity.fields["id"])
        self._tail = identity.tail(self.chunk_kind)

    def body(self, choice: dict[str, Any], done: Done) -> dict[str, Any]:
        """The whole answer, with one choice."""
        body = {"choices": [choice], **self._identity.fields, "object": self.kind, "usage": usage_json(done)}
        body["timings"] = self.timings(done)
        is_verbose = self.options.verbose
        if self.service.settings.is_verbose if is_verbose is None else is_verbose:
            native = NativeReply(self.service, self.prepared)
            native.texts, native.tokens = self.texts, self.tokens
            body["__verbose"] = native.whole(done)
        return body


class ChatReply(_OpenAIReply):
    """A chat completion: the reply taken apart into reasoning, content and tool calls."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, service: Service, prepared: PreparedReply, identity: Identity) -> None:
        super().__init__(service, prepared, identity)
        self._splitter = prepared.splitter()
        self._echo = prepared.echo
        self._said_role = False
        self._called = False
        self._held_probs: list[TopTokens] = []
        self._before = b'{"choices":[{"finish_reason":null,"index":%d,"delta":' % self.index
        self._content_before = self._before + b'{"content":'
        self._reasoning_before = self._before + b'{"reasoning_content":'
        self._after = b"}}]" + self._tail + b"}"
        self._plain = not self.options.timings_per_token and not self.request.n_probs

    def progress_frames(self, progress: Progress) -> bytes:
        return self._chunk(_ROLE, extras=self.extras(progress))

    def piece_frames(self, piece: Piece) -> bytes:
        frames = self._role()
        self._held_probs += piece.probs
        return frames + self._deltas(self._with_echo(self._splitter.feed(piece.text, piece.tokens)))

    def ended(self, done: Done) -> bytes:
        frames = self._role() + self._deltas(self._with_echo(self._splitter.finish()))
        timings = b',"timings":' + encode(self.timings(done))
        usage = b""
        if self.options.stream_options.include_usage:
            usage = frame(b'{"choices":[]' + self._tail + b',"usage":' + encode(usage_json(done)) + timings + b"}")
        last = b'{"choices":[{"finish_reason":%s,"index":%d,"delta":{}}]' % (encode(self._finish(done)), self.index)
        return frames + frame(last + self._tail + (b"" if usage else timings) + b"}") + usage

    def whole(self, done: Done) -> dict[str, Any]:
        reply = ParsedReply()
        reply.add(self._splitter.feed(self.text(), self.tokens))
        reply.add(self._splitter.finish())
        message = reply.message(self.prepared.echo)
        self._called = "tool_calls" in message
        choice: dict[str, Any] = {"finish_reason": self._finish(done), "index": self.index, "message": message}
        if self.request.n_probs:
            choice["logprobs"] = self.logprobs(self.kept_probs(done))
        return self.body(choice, done)

    def _with_echo(self, delta: ReplyDelta) -> ReplyDelta:
        """The first delta of a stream begins with what the prompt holds of the reply, unless the client knows that."""
        echo, self._echo = self._echo, ReplyDelta()
        if not self.prepared.streams_echo or not (echo.reasoning or echo.content):
            return delta
        return ReplyDelta(echo.reasoning + delta.reasoning, echo.content + delta.content, delta.calls)

    def _finish(self, done: Done) -> str:
        return "tool_calls" if self._called and done.stop_type != "limit" else _finish(done)

    def _role(self) -> bytes:
        if self._said_role:
            return b""
        self._said_role = True
        return self._chunk(_ROLE)

    def _deltas(self, delta: ReplyDelta) -> bytes:
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
        probs, self._held_probs = self._held_probs, []
        logprobs = b',"logprobs":' + encode(self.logprobs(probs)) if probs else b""
        return frames + self._chunk(parts[-1], logprobs, self.extras())

    def _chunk(self, delta: bytes, logprobs: bytes = b"", extras: bytes = b"") -> bytes:
        return frame(self._before + delta + logprobs + b"}]" + self._tail + extras + b"}")


class TextReply(_OpenAIReply):
    """A text completion."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def progress_frames(self, progress: Progress) -> bytes:
        return self._chunk("", [], self.extras(progress))

    def piece_frames(self, piece: Piece) -> bytes:
        return self._chunk(piece.text, list(piece.probs), self.extras())

    def ended(self, done: Done) -> bytes:
        choice = {"text": "", "index": self.index, "logprobs": None, "finish_reason": _finish(done)}
        return frame(encode(self.body(choice, done)))

    def whole(self, done: Done) -> dict[str, Any]:
        logprobs = self.logprobs(self.kept_probs(done)) if self.request.n_probs else None
        choice = {"text": self.text(), "index": self.index, "logprobs": logprobs, "finish_reason": _finish(done)}
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

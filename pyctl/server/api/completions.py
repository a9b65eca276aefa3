"""The endpoints that generate: chat completions, text completions, and llama-server's own completion."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from pyctl.engine.request import Request as EngineRequest
from pyctl.prompt import Prompt
from pyctl.server.api.native import NativeReply
from pyctl.server.api.openai import ChatReply, Identity, TextReply
from pyctl.server.body import Fields
from pyctl.server.generate.chat_request import chat_job
from pyctl.server.generate.prepare import Options, engine_request, n_choices, nth_choice
from pyctl.server.generate.prompts import infill_prompt, prompts_of
from pyctl.server.generate.reply import Reply
from pyctl.server.generate.respond import ActiveReply, ReplyResponse
from pyctl.server.service import Service

__all__ = ["chat_completions", "completions", "infill", "native_completion"]


async def chat_completions(service: Service, request: Request) -> ReplyResponse:
    """POST /v1/chat/completions"""
    return _answer(service, await asyncio.to_thread(_chat_replies, service, Fields.parse(await request.body())))


async def completions(service: Service, request: Request) -> ReplyResponse:
    """POST /v1/completions"""
    return _answer(service, await asyncio.to_thread(_text_replies, service, Fields.parse(await request.body())))


async def native_completion(service: Service, request: Request) -> ReplyResponse:
    """POST /completion"""
    return _answer(service, await asyncio.to_thread(_native_replies, service, Fields.parse(await request.body())))


async def infill(service: Service, request: Request) -> ReplyResponse:
    """POST /infill"""
    return _answer(service, await asyncio.to_thread(_infill_replies, service, Fields.parse(await request.body())))


def _chat_replies(service: Service, fields: Fields) -> list[Reply]:
    identity = Identity(service)
    replies: list[Reply] = []
    for number in range(n_choices(fields)):
        job = chat_job(service, fields)
        replies.append(ChatReply(service, replace(job, request=nth_choice(job.request, number)), identity, number))
    return replies


def _text_replies(service: Service, fields: Fields) -> list[Reply]:
    options, identity = Options.of(fields, service.settings.ping_seconds), Identity(service)
    replies: list[Reply] = []
    for engine, text in _requests(service, fields):
        replies.append(TextReply(service, engine, options, identity, len(replies), text))
    return replies


def _native_replies(service: Service, fields: Fields) -> list[Reply]:
    options = Options.of(fields, service.settings.ping_seconds)
    replies: list[Reply] = []
    for engine, text in _requests(service, fields):
        replies.append(NativeReply(service, engine, options, text, len(replies)))
    return replies


def _infill_replies(service: Service, fields: Fields) -> list[Reply]:
    return _native_replies(service, Fields({**fields.as_dict(), "prompt": infill_prompt(service, fields)}))


def _requests(service: Service, fields: Fields) -> Iterator[tuple[EngineRequest, str]]:
    """For each prompt as many requests as it gets replies, with the prompt's text."""
    for prompt, text in _prompts(service, fields):
        request = engine_request(fields, prompt, service)
        for number in range(n_choices(fields)):
            yield nth_choice(request, number), text


def _prompts(service: Service, fields: Fields) -> list[tuple[Prompt, str]]:
    """Each prompt with its text, BOS included."""
    bos = service.info.bos_token if service.tokenizer.add_bos else ""
    return [
        (
            prompt,
            bos + text
            if text is not None
            else service.tokenizer.detokenize(prompt.tokens.tolist(), special=True).decode(errors="replace"),
        )
        for prompt, text in prompts_of(fields.get("prompt"), service.chat, service.info.n_vocab)
    ]


def _answer(service: Service, replies: Sequence[Reply]) -> ReplyResponse:
    runs: list[ActiveReply] = []
    try:
        for reply in replies:
            runs.append(ActiveReply(service.worker.submit(reply.request), reply))
    except Exception:
        for run in runs:
            run.handle.cancel()
        raise
    return ReplyResponse(runs, _combine, service.text_of)


def _combine(bodies: list[dict[str, Any]]) -> Any:
    """One body as it is; several of OpenAI's as one with all choices, and llama-server's own as a list."""
    if len(bodies) == 1:
        return bodies[0]
    if "choices" not in bodies[0]:
        return bodies
    return {**bodies[0], "choices": [choice for body in bodies for choice in body["choices"]]}

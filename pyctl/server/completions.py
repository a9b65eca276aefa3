"""The endpoints that generate: chat completions, text completions, and llama-server's own completion."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from pyctl.chat.format import Continue, ReasoningFormat, Turn
from pyctl.errors import RequestError
from pyctl.prompt import Prompt
from pyctl.server.answer import Answer, Run
from pyctl.server.fields import Fields
from pyctl.server.native import NativeReply
from pyctl.server.openai import ChatReply, Identity, TextReply
from pyctl.server.options import Options, engine_request
from pyctl.server.prompts import prompts_of
from pyctl.server.reply import Reply
from pyctl.server.settings import Service

__all__ = ["chat_completions", "chat_turn", "completions", "native_completion"]


async def chat_completions(service: Service, request: Request) -> Answer:
    """POST /v1/chat/completions"""
    return _answer(service, [await asyncio.to_thread(_chat_reply, service, Fields.parse(await request.body()))])


async def completions(service: Service, request: Request) -> Answer:
    """POST /v1/completions"""
    return _answer(service, await asyncio.to_thread(_text_replies, service, Fields.parse(await request.body())))


async def native_completion(service: Service, request: Request) -> Answer:
    """POST /completion"""
    return _answer(service, await asyncio.to_thread(_native_replies, service, Fields.parse(await request.body())))


def chat_turn(service: Service, fields: Fields) -> Turn:
    """The rendered conversation of a chat request."""
    kwargs = fields.object("chat_template_kwargs").as_dict()
    if isinstance(kwargs.get("enable_thinking"), str):
        raise RequestError("'chat_template_kwargs.enable_thinking' must be true or false, not a string")
    effort = fields.string("reasoning_effort", "")
    if effort == "none":
        kwargs["enable_thinking"] = False
    elif effort:
        kwargs["reasoning_effort"] = effort
    continues = _continues(fields)
    add_header = fields.boolean("add_generation_prompt", continues is None)
    if continues is not None and add_header:
        raise RequestError("'add_generation_prompt' and 'continue_final_message' exclude each other")
    return service.chat.turn(
        fields.get("messages"),
        tools=_tools(fields),
        kwargs=kwargs,
        add_generation_prompt=add_header,
        continues=continues,
    )


def _chat_reply(service: Service, fields: Fields) -> Reply:
    turn = chat_turn(service, fields)
    options = Options.of(fields, service.settings.ping_seconds)
    reasoning = _reasoning_format(fields, service, options)
    engine = engine_request(fields, service.chat.prompt_from_text(turn.text), service, _n_chat_probs(fields))
    opened = turn.opened if reasoning == "none" else ""
    splitter = service.chat.splitter(turn, reasoning)
    return ChatReply(service, engine, options, Identity(service), turn, splitter, opened)


def _text_replies(service: Service, fields: Fields) -> list[Reply]:
    if fields.get("echo"):
        raise RequestError("'echo' is not supported")
    if fields.get("suffix"):
        raise RequestError("'suffix' is not supported")
    if fields.integer("best_of", default=1) != 1:
        raise RequestError("'best_of' is not supported")
    options, identity = Options.of(fields, service.settings.ping_seconds), Identity(service)
    replies: list[Reply] = []
    for index, (prompt, text) in enumerate(_prompts(service, fields)):
        engine = engine_request(fields, prompt, service)
        replies.append(TextReply(service, engine, options, identity, index, text))
    return replies


def _native_replies(service: Service, fields: Fields) -> list[Reply]:
    options = Options.of(fields, service.settings.ping_seconds)
    replies: list[Reply] = []
    for index, (prompt, text) in enumerate(_prompts(service, fields)):
        replies.append(NativeReply(service, engine_request(fields, prompt, service), options, text, index))
    return replies


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


def _answer(service: Service, replies: Sequence[Reply]) -> Answer:
    runs: list[Run] = []
    try:
        for reply in replies:
            runs.append(Run(service.worker.submit(reply.request), reply))
    except Exception:
        for run in runs:
            run.ticket.cancel()
        raise
    return Answer(runs, _combine, service.text_of)


def _combine(bodies: list[dict[str, Any]]) -> Any:
    """One body as it is; several of OpenAI's as one with all choices, and llama-server's own as a list."""
    if len(bodies) == 1:
        return bodies[0]
    if "choices" not in bodies[0]:
        return bodies
    return {**bodies[0], "choices": [choice for body in bodies for choice in body["choices"]]}


def _continues(fields: Fields) -> Continue | None:
    value = fields.get("continue_final_message")
    if value is True:
        return "auto"
    if value == "content":
        return "content"
    return "reasoning_content" if value == "reasoning_content" else None


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    tools = fields.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError("'tools' must be a list of objects")
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise RequestError(f"tools[{index}] must be of type function, with a function that has a name")
    choice = fields.get("tool_choice")
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        raise RequestError("'tool_choice' must be auto, none, required or an object")
    return tools


def _reasoning_format(fields: Fields, service: Service, options: Options) -> ReasoningFormat:
    value = fields.string("reasoning_format", service.settings.reasoning_format)
    if value == "deepseek-legacy":  # a stream leaves the reasoning where it is
        return "none" if options.stream else "deepseek"
    if value == "auto":
        return "auto"
    if value == "deepseek":
        return "deepseek"
    if value != "none":
        raise RequestError(f"'reasoning_format' must be auto, deepseek, deepseek-legacy or none, not {value!r}")
    return "none"


def _n_chat_probs(fields: Fields) -> int:
    """OpenAI's ``logprobs`` and ``top_logprobs``, or llama-server's ``n_probs``."""
    if fields.boolean("logprobs", False):
        return fields.integer("top_logprobs", default=20, low=0)
    if "top_logprobs" in fields:
        raise RequestError("'top_logprobs' needs 'logprobs': true")
    return fields.integer("n_probs", default=0, low=0)

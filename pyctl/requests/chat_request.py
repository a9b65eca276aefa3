"""The conversation of a request, up to its prompt, and the settings that bind the reply to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from pyctl.chat.chat_format import ChatRequest, PreparedChat, ReasoningFormat
from pyctl.chat.rendering import Continue
from pyctl.errors import RequestError
from pyctl.requests.body import ChatBody, ConversationBody, ReasoningOptions
from pyctl.requests.image_sources import load_images
from pyctl.requests.reply_options import ReplyOptions
from pyctl.requests.reply_settings import REASONING_FORMATS, ReplySettings
from pyctl.requests.request_pool import NOTHING, Fetched
from pyctl.requests.service import Service
from pyctl.settings.convert import INT32_MAX

__all__ = ["chat_request", "parallel_calls", "prepare_chat"]


def prepare_chat(
    service: Service,
    body: ConversationBody,
    whole: ChatBody | None = None,
    fetched: Fetched = NOTHING,
) -> PreparedChat:
    """Return the conversation, up to its prompt; with everything that binds the reply if the
    ``whole`` request is given.
    """
    request = chat_request(service, body, fetched)
    if whole is not None:
        request = _with_reply(request, whole, service.settings)
    return service.chat.prepare(request)


def chat_request(service: Service, body: ConversationBody, fetched: Fetched) -> ChatRequest:
    """Return the conversation of ``body`` with the variables of the template.

    Raises RequestError for fields that exclude each other, and for images that cannot be read.
    """
    kwargs = _template_kwargs(body)
    continues = _continues(body.continue_final_message)
    add_header = body.add_generation_prompt
    if add_header is None:
        add_header = continues is None
    if continues is not None and add_header:
        raise RequestError(
            "'add_generation_prompt' and 'continue_final_message' exclude each other"
        )
    return ChatRequest(
        load_images(body.messages, service.image_sources(fetched)),
        tools=body.tools,
        callable_tools=body.callable_tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=parallel_calls(service, body.parallel_tool_calls),
        prefill_assistant=service.settings.prefill_assistant,
        parse_tool_calls=body.parse_tool_calls,
        template_kwargs=kwargs,
        add_generation_prompt=add_header,
        continue_final_message=continues,
        grammar=body.grammar,
    )


def parallel_calls(service: Service, requested: bool | None) -> bool:
    """Return whether a reply may hold several calls: by the request, or else by the template."""
    return service.chat.capabilities.parallel_calls if requested is None else requested


def _template_kwargs(body: ConversationBody) -> dict[str, Any]:
    """Return the variables of the template, with the switches of reasoning among them.

    A switch that turns reasoning off overrides the client's own variable; one that turns it on does
    not.
    """
    kwargs = dict(body.chat_template_kwargs)
    if isinstance(kwargs.get("enable_thinking"), str):
        raise RequestError(
            "'chat_template_kwargs.enable_thinking' must be true or false, not a string"
        )
    if body.enable_thinking:
        kwargs.setdefault("enable_thinking", True)
    if body.reasoning_effort == "none" or body.enable_thinking is False:
        kwargs["enable_thinking"] = False
    elif body.reasoning_effort:
        kwargs["reasoning_effort"] = body.reasoning_effort
    return kwargs


def _continues(value: Any) -> Continue | None:
    """Return the part of the last message that the reply continues; None for a new message."""
    if value is True:
        return "auto"
    return next((part for part in get_args(Continue) if part != "auto" and part == value), None)


def _with_reply(request: ChatRequest, body: ChatBody, settings: ReplySettings) -> ChatRequest:
    """Return ``request`` with the members that bind and read the reply."""
    message = body.reasoning.message
    if message is None:
        message = settings.reasoning_budget_message
    reasoning_format = _reasoning_format(body.options, settings.reasoning_format)
    return replace(
        request,
        reasoning_format=reasoning_format,
        schema=body.structured.schema(),
        reasoning_budget=_reasoning_budget(body.reasoning, body.options, settings),
        reasoning_budget_message=message,
    )


def _reasoning_format(options: ReplyOptions, default: str) -> ReasoningFormat:
    value = default if options.reasoning_format is None else options.reasoning_format
    if value not in REASONING_FORMATS:
        raise RequestError(
            f"'reasoning_format' must be auto, deepseek, deepseek-legacy or none, not {value!r}"
        )
    return REASONING_FORMATS[value]


def _reasoning_budget(
    requested: ReasoningOptions, options: ReplyOptions, settings: ReplySettings
) -> int | None:
    """Return the maximum tokens of reasoning; None for no limit."""
    budget = requested.n_tokens if requested.n_tokens >= 0 else settings.reasoning_budget
    if budget >= 0:
        return budget
    # Only limited reasoning can be ended while it runs.
    return INT32_MAX if options.reasoning_control else None

"""The path of every request to the engine: any typed body becomes its replies."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from pyctl.cache.disk_policy import DiskPolicy
from pyctl.chat.chat_format import PreparedChat
from pyctl.chat.constraint import Constraint
from pyctl.chat.reply import ReasoningSplitter, ReplySplitter
from pyctl.engine.request import Request
from pyctl.engine.sampling import RANDOM_SEED, Sampling
from pyctl.errors import ContextSizeError, RequestError
from pyctl.requests.adapters import check_scales
from pyctl.requests.body import AnyBody, ChatBody, GenerationBody
from pyctl.requests.chat_request import chat_request, prepare_chat
from pyctl.requests.prediction import predicted_tokens
from pyctl.requests.prepared_reply import PreparedReply
from pyctl.requests.prompts import RequestedPrompt, raw_prompts
from pyctl.requests.request_pool import NOTHING, Fetched
from pyctl.requests.sampling_fields import build_sampling
from pyctl.requests.service import Service
from pyctl.requests.text_limit import check_fits

__all__ = ["prepare", "prepare_prewarm"]


log = logging.getLogger(__name__)


def prepare(service: Service, body: AnyBody, fetched: Fetched = NOTHING) -> list[PreparedReply]:
    """Return all replies that ``body`` requests: ``body.n`` to each of its prompts.

    Raises RequestError, FilesMissing for images at addresses that are not ``fetched``, and
    NotSupportedError for features that this model or server lacks.
    """
    check_scales(service.info, body.options.lora)
    sampling = build_sampling(
        body.sampling, service.settings.sampling, service.tokenizer, service.info.n_vocab
    )
    prediction = _prediction(service, body)
    replies: list[PreparedReply] = []
    for requested in _prompts(service, body, fetched):
        chat = requested.chat
        request = _engine_request(service, body, requested, sampling)
        request = replace(request, prediction=prediction)
        for i in range(body.n):
            nth = _for_reply(request, i)
            splitter = _splitter(service, chat, nth, is_alone=body.n == 1)
            replies.append(
                PreparedReply(
                    request=nth,
                    options=body.options,
                    prompt_text=requested.text,
                    splitter=splitter,
                    index=len(replies),
                    chat=chat,
                    has_prediction=body.prediction is not None,
                )
            )
    return replies


def prepare_prewarm(service: Service, body: ChatBody, fetched: Fetched = NOTHING) -> Request:
    """Return a request that evaluates the certain beginning of the prompt of ``body``. Raises
    ContextSizeError.
    """
    check_scales(service.info, body.options.lora)
    prompt = service.chat.beginning(chat_request(service, body.conversation, fetched))
    if len(prompt) >= service.info.n_ctx:
        raise ContextSizeError(len(prompt), service.info.n_ctx)
    policy = _disk_policy(service, body)
    return Request(prompt, max_tokens=0, disk_policy=policy, background=True)


def _prediction(service: Service, body: AnyBody) -> tuple[int, ...]:
    """Return the tokens to draft from, none if the client predicts nothing."""
    if not body.prediction:
        return ()
    return predicted_tokens(body.prediction, service.tokenizer, service.info.n_ctx)


# -- the prompts
# ----------------------------------------------------------------------------------


def _prompts(service: Service, body: AnyBody, fetched: Fetched) -> Iterator[RequestedPrompt]:
    """Yield the prompts of ``body``: one of a chat, each one of a completion."""
    if isinstance(body, ChatBody):
        yield _chat_prompt(service, body, fetched)
    else:
        yield from raw_prompts(service, body, fetched)


def _chat_prompt(service: Service, body: ChatBody, fetched: Fetched) -> RequestedPrompt:
    chat = prepare_chat(service, body.conversation, body, fetched)
    check_fits(chat.text, service.tokenizer, service.info.n_ctx)
    # The grammar of all replies of this server also binds those with calls, unless the request
    # overrides it.
    server_grammar_wins = bool(service.settings.sampling.grammar) and not chat.has_own_grammar
    constraint = None if server_grammar_wins else chat.constraint
    return RequestedPrompt(chat.prompt, chat.text, constraint, chat.reasoning, chat)


# -- the engine's request
# ----------------------------------------------------------------------------------


def _engine_request(
    service: Service, body: GenerationBody, requested: RequestedPrompt, sampling: Sampling
) -> Request:
    """Return the request for a reply to one prompt, with ``sampling`` bound to its constraint.

    A grammar that llama.cpp cannot read is an error of the client, unless it comes from the schemas
    of tools: then calls are not constrained. Raises RequestError.
    """
    settings = service.settings
    stops = body.stops
    request = Request(
        prompt=requested.prompt,
        sampling=_with_constraint(sampling, requested.constraint),
        max_tokens=settings.n_predict if stops.max_tokens is None else stops.max_tokens,
        stop=tuple(word for word in stops.stop if word),
        n_probs=body.n_probs,
        cache_prompt=settings.cache_prompt if body.cache_prompt is None else body.cache_prompt,
        disk_policy=_disk_policy(service, body),
        retention=body.retention,
        # The headers of a stream wait for the first report.
        return_progress=body.options.stream,
        reasoning=requested.reasoning,
        seq=body.seq % service.info.n_seqs if body.seq >= 0 else -1,
        n_indent=stops.n_indent,
        max_ms=max(stops.max_ms, 0),
        control_texts=requested.chat.control_texts if requested.chat is not None else {},
    )
    try:
        service.worker.check(request.sampling)
    except RequestError as error:
        # Only the grammar of tools waits for a trigger; any other one is the client's.
        if not request.sampling.grammar_lazy:
            raise
        log.warning("tool calls are not constrained to their schemas: %s", error)
        return replace(request, sampling=sampling)
    return request


def _with_constraint(sampling: Sampling, constraint: Constraint | None) -> Sampling:
    if constraint is None:
        return sampling
    return replace(
        sampling,
        grammar=constraint.grammar,
        grammar_kind=constraint.kind,
        grammar_lazy=bool(constraint.triggers),
        grammar_triggers=constraint.triggers,
        grammar_hidden=constraint.hidden,
        grammar_prefill=constraint.prefill,
    )


def _disk_policy(service: Service, body: GenerationBody) -> DiskPolicy:
    default = service.disk_policy
    if body.prefix_cache is None:
        return default
    return DiskPolicy.from_request(body.prefix_cache, default)


def _for_reply(request: Request, number: int) -> Request:
    """Return ``request`` for reply ``number`` to its prompt: a given seed counts up, as in
    llama-server, and only the first reply may ask for its sequence.
    """
    if not number:
        return request
    sampling = request.sampling
    if sampling.seed != RANDOM_SEED:
        sampling = replace(sampling, seed=(sampling.seed + number) & RANDOM_SEED)
    return replace(request, sampling=sampling, seq=-1)


# -- the reply's text, and the prompt after it
# ----------------------------------------------------------------------------------


def _splitter(
    service: Service, chat: PreparedChat | None, request: Request, *, is_alone: bool
) -> ReplySplitter:
    """Return the splitter of the reply; after the only reply of a chat, the certain part of the
    next prompt is evaluated.
    """
    if chat is None:
        return ReplySplitter(ReasoningSplitter(None, "content"))
    # A client may forbid the cache, and without a reply there is no next turn.
    leaves_next_turn = request.may_save and not request.is_prefill_only
    prewarms = service.settings.warm_next and is_alone and leaves_next_turn

    def prewarm_next(message: dict[str, Any]) -> None:
        service.post_reply.add(partial(_prewarm, service, chat, request, message))

    return chat.splitter(prewarm_next if prewarms else None)


def _prewarm(
    service: Service, chat: PreparedChat, request: Request, message: dict[str, Any]
) -> None:
    """Evaluate the beginning of the next prompt, with the reply as the template will render it."""
    prompt = chat.next_prompt(message)
    if prompt is None:
        return
    ahead = Request(
        prompt,
        max_tokens=0,
        cache_prompt=request.cache_prompt,
        disk_policy=request.disk_policy,
        seq=request.seq,
        background=True,
        after=request,
    )
    service.worker.prewarm(ahead)

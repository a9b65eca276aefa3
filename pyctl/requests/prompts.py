"""Raw prompts: texts and token ids without a template, as a completion has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pyctl.chat.chat_format import PreparedChat
from pyctl.chat.constraint import Constraint, json_constraint
from pyctl.chat.reasoning import ReasoningLimit
from pyctl.chat.reply import ReasoningTags, reasoning_limit
from pyctl.errors import RequestError
from pyctl.files.image_file import ImageFile
from pyctl.prompt import Prompt
from pyctl.requests.body import (
    MAX_REPLIES,
    CompletionBody,
    InfillBody,
    StructuredOutput,
)
from pyctl.requests.body_reader import at_most, is_token, mixed
from pyctl.requests.image_sources import data_images
from pyctl.requests.infill import InfillModel, infill_prompt, suffix_prompt
from pyctl.requests.request_pool import Fetched
from pyctl.requests.service import Service
from pyctl.requests.text_limit import check_fits

__all__ = ["RequestedPrompt", "raw_prompts"]


class RequestedPrompt(msgspec.Struct, frozen=True):
    """A prompt of a request, with the constraints and limits of the replies to it; ``chat`` is None
    for a raw prompt.
    """

    prompt: Prompt
    text: str
    constraint: Constraint | None = None
    reasoning: ReasoningLimit | None = None
    chat: PreparedChat | None = None


def raw_prompts(
    service: Service, body: CompletionBody, fetched: Fetched
) -> Iterator[RequestedPrompt]:
    """Yield the prompts of a completion.

    Long texts are refused before anything is tokenised. Raises RequestError, ContextSizeError, and
    FilesMissing for images that are not ``fetched``.
    """
    constraint = _raw_constraint(body.structured)
    reasoning = _raw_reasoning(service, body)
    value = _prompt_field(service, body)
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, str):
            check_fits(part, service.tokenizer, service.info.n_ctx)
    bos = service.info.bos_token if service.tokenizer.add_bos else ""
    for prompt, text in _read_prompts(value, service, MAX_REPLIES // body.n, fetched):
        shown = service.readable(prompt.tokens.tolist()) if text is None else bos + text
        yield RequestedPrompt(prompt, shown, constraint, reasoning)


def _prompt_field(service: Service, body: CompletionBody) -> Any:
    """Return the prompt in any of its forms; token ids for one that fills a gap."""
    if not (isinstance(body, InfillBody) or body.suffix):
        return body.prompt
    info = service.info
    model = InfillModel(service.tokenizer, info.n_vocab, info.n_ctx, service.settings)
    if isinstance(body, InfillBody):
        return infill_prompt(model, body)
    return suffix_prompt(model, body)


def _raw_constraint(structured: StructuredOutput) -> Constraint | None:
    schema = structured.schema()
    if structured.grammar:
        return Constraint(structured.grammar)
    if schema is None:
        return None
    try:
        return json_constraint(schema)
    except RequestError as error:
        raise RequestError(
            f"Field 'json_schema': JSON schema conversion failed: {error}"
        ) from error


def _raw_reasoning(service: Service, body: CompletionBody) -> ReasoningLimit | None:
    """Return the limit of reasoning between tags that the request names; None without them."""
    ends = [tag for tag in body.reasoning_ends if tag]
    budget = body.reasoning
    if budget.n_tokens < 0 or not body.reasoning_start or not ends:
        return None
    already_read = body.generation_prompt
    check_fits(already_read, service.tokenizer, service.info.n_ctx)
    return reasoning_limit(
        service.tokenizer,
        ReasoningTags(body.reasoning_start, ends[0], tuple(ends[1:])),
        budget.n_tokens,
        message=budget.message or "",
        read=already_read,
        recurs=True,
    )


def _read_prompts(
    value: Any, service: Service, maximum: int, fetched: Fetched
) -> list[tuple[Prompt, str | None]]:
    """Return one prompt per text or sequence, with the text if it was one; a list that holds a
    token id is one sequence.

    Raises RequestError, also for more than ``maximum``, and FilesMissing.
    """
    if value is None:
        raise RequestError("'prompt' is missing")
    is_sequence = isinstance(value, list) and any(is_token(item) for item in value)
    if not isinstance(value, list) or is_sequence:
        return [_read_prompt(value, service, fetched)]
    at_most(maximum, len(value), "prompt", "prompts with this 'n'")
    if not value:
        raise RequestError("'prompt' is empty")
    return [_read_prompt(item, service, fetched) for item in value]


def _read_prompt(value: Any, service: Service, fetched: Fetched) -> tuple[Prompt, str | None]:
    """Return the prompt of a text, of a mixed list, or of a text with images at its markers."""
    images: list[ImageFile] | None = None
    if isinstance(value, dict):
        data = value.get("multimodal_data")
        if data is not None:
            images = data_images(data, service.image_sources(fetched)) if data else []
        value = value.get("prompt_string")
    if isinstance(value, str):
        return service.chat.prompt_from_text(value, images), value
    if images:
        raise RequestError("'prompt_string' must be a string with 'multimodal_data'")
    return service.chat.prompt_from_mixed(mixed(value, "prompt", service.info.n_vocab)), None

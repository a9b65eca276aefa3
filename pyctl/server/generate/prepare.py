"""From a request body to the engine's request: options, constraint, reasoning budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pyctl.cache.persist import DiskPolicy
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.rendering import RenderedChat
from pyctl.chat.schema import reply_grammar, schema_grammar
from pyctl.engine.request import Request
from pyctl.engine.sampling import RANDOM_SEED
from pyctl.engine.stream import ReasoningLimit
from pyctl.errors import RequestError
from pyctl.prompt import Prompt
from pyctl.server.api.lora import scales_of
from pyctl.server.body import Fields
from pyctl.server.generate.sampling_fields import sampling_of
from pyctl.server.service import Service

__all__ = [
    "MOST_CHOICES",
    "Options",
    "constraint_of",
    "engine_request",
    "n_choices",
    "nth_choice",
    "reasoning_limit",
    "schema_of",
]


def constraint_of(fields: Fields, chat: ChatFormat, turn: RenderedChat | None = None) -> dict[str, Any]:
    """The members of Sampling that bind the reply; none without such a field. Raises RequestError.

    In a chat, a schema binds the content, which may follow a reasoning block; a grammar binds everything.
    """
    grammar = fields.string("grammar", "")
    schema = schema_of(fields)
    if turn is None:
        return {"grammar": grammar or _converted(schema, chat)} if grammar or schema is not None else {}
    if grammar and schema is not None:
        raise RequestError("Cannot use both json_schema and grammar")
    if grammar:
        return {"grammar": grammar}
    if schema is None:
        return {}
    prefill = turn.prefill if turn.reply_part == "content" else ""
    return {"grammar": _converted(schema, chat, turn), "grammar_prefill": prefill}


def schema_of(fields: Fields) -> Any:
    """The JSON schema that the reply has to follow, from ``response_format`` or ``json_schema``; None without one."""
    schema = fields.get("json_schema")
    form = fields.object("response_format")
    kind = form.string("type", "")
    if kind == "json_object" and (schema is None or "schema" in form):
        schema = form.get("schema") or {}
    elif kind == "json_schema":
        schema = form.object("json_schema").get("schema") or {}
    elif kind not in ("", "text", "json_object"):
        raise RequestError(f'response_format type must be one of "text", "json_object" or "json_schema", not: {kind}')
    return {"type": "object"} if schema == {} else schema


def _converted(schema: Any, chat: ChatFormat, turn: RenderedChat | None = None) -> str:
    try:
        return schema_grammar(schema) if turn is None else reply_grammar(schema, chat.tags, chat.begins(turn))
    except RequestError as error:
        raise RequestError(f"Field 'json_schema': JSON schema conversion failed: {error}") from error


def reasoning_limit(fields: Fields, service: Service, turn: RenderedChat | None) -> ReasoningLimit | None:
    """What ``fields``, or else the server's settings, allow; None without a limit. Raises RequestError.

    A chat knows its own tags; any other request has to name them (``reasoning_budget_start_tag`` and ``..._end_tags``).
    """
    n_tokens = fields.integer("reasoning_budget_tokens", "thinking_budget_tokens", default=-1, low=-1)
    message = fields.string("reasoning_budget_message", service.settings.reasoning_budget_message if turn else "")
    if turn is None:
        start, read = fields.string("reasoning_budget_start_tag", ""), fields.string("generation_prompt", "")
        named = "reasoning_budget_end_tags" if "reasoning_budget_end_tags" in fields else "reasoning_budget_end_tag"
        ends = [tag for tag in fields.strings(named) or () if tag]
    else:
        tags = service.chat.tags
        start, ends = tags.open, [tags.close, *tags.interrupts]
        if "<function=" in service.chat.template.source:  # Qwen's newer form, which has the tag on a line of its own
            ends.insert(0, f"\n{tags.close}")
        read = turn.open_reasoning + turn.prefill if turn.reply_part == "reasoning" else ""
        n_tokens = n_tokens if n_tokens >= 0 else service.settings.reasoning_budget
    if n_tokens < 0 or not start or not ends:
        return None

    def ids(text: str) -> tuple[int, ...]:
        return tuple(service.tokenizer.tokenize(text, add_special=False, parse_special=True))

    return ReasoningLimit(
        n_tokens, ids(start), tuple(ids(end) for end in ends), (*ids(message), *ids(ends[0])), ids(read) if read else ()
    )


MOST_CHOICES = 128

"""Replies to one prompt (``n``), as many as OpenAI allows. llama-server needs a slot for each; here they may queue."""


@dataclass(frozen=True)
class Options:
    """How to answer; names and defaults are llama-server's.

    The last row has no meaning here: it is shown back in the settings, as llama-server does.
    """

    stream: bool = False
    include_usage: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    return_tokens: bool = False
    verbose: bool = False
    response_fields: tuple[str, ...] = ()
    ping_seconds: int = 30
    reasoning_format: str = "auto"
    n_keep: int = 0
    n_discard: int = 0
    backend_sampling: bool = False
    lora: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, fields: Fields, ping_seconds: int) -> Options:
        """Read from ``fields``; ``ping_seconds`` is the server's own."""
        fields.integer("n_cache_reuse", default=0, low=0)  # without use here, but refused where llama-server does
        return cls(
            stream=fields.boolean("stream", False),
            include_usage=fields.object("stream_options").boolean("include_usage", False),
            timings_per_token=fields.boolean("timings_per_token", False),
            return_progress=fields.boolean("return_progress", False),
            return_tokens=fields.boolean("return_tokens", False),
            verbose=fields.boolean("verbose", False),
            response_fields=_response_fields(fields),
            ping_seconds=fields.integer("sse_ping_interval", default=ping_seconds, low=-1),
            reasoning_format=fields.string("reasoning_format", "auto"),
            n_keep=fields.integer("n_keep", default=0, low=-1),
            n_discard=fields.integer("n_discard", default=0, low=0),
            backend_sampling=fields.boolean("backend_sampling", False),
            lora=tuple(scales_of(fields.get("lora"))),
        )


def n_choices(fields: Fields) -> int:
    """How many replies each prompt gets."""
    return fields.integer("n_cmpl", "n", default=1, low=1, high=MOST_CHOICES)


def nth_choice(request: Request, number: int) -> Request:
    """``request`` for reply ``number`` to its prompt: a given seed counts up, as in llama-server."""
    seed = request.sampling.seed
    if not number:
        return request
    if seed != RANDOM_SEED:
        request = replace(request, sampling=replace(request.sampling, seed=(seed + number) & RANDOM_SEED))
    return replace(request, seq=-1)


def engine_request(
    fields: Fields, prompt: Prompt, service: Service, n_probs: int | None = None, turn: RenderedChat | None = None
) -> Request:
    """What the engine is to do for ``fields``; ``n_probs`` overrides the field. Raises RequestError.

    ``turn`` is the conversation behind the prompt of a chat.
    """
    settings = service.settings
    scales_of(fields.get("lora"), service.info)
    sampling = sampling_of(fields, settings.sampling, service.tokenizer, service.info.n_vocab)
    constraint = constraint_of(fields, service.chat, turn)
    wanted = fields.integer("id_slot", default=-1)
    return Request(
        prompt=prompt,
        sampling=replace(sampling, **constraint) if constraint else sampling,
        max_tokens=fields.integer(
            "n_predict", "max_completion_tokens", "max_tokens", default=settings.n_predict, low=-1
        ),
        stop=tuple(word for word in fields.strings("stop") or () if word),
        n_probs=_n_probs(fields) if n_probs is None else n_probs,
        cache_prompt=fields.boolean("cache_prompt", settings.cache_prompt),
        disk_policy=DiskPolicy.of_request(fields.get("prefix_cache"), settings.disk_policy),
        return_progress=fields.boolean("stream", False),  # what a stream's headers wait for is the first of these
        reasoning=reasoning_limit(fields, service, turn),
        seq=wanted % service.info.n_seqs if wanted >= 0 else -1,
        n_indent=fields.integer("n_indent", default=0, low=0),
        max_ms=max(fields.integer("t_max_predict_ms", default=-1, low=-1, high=2**63 - 1), 0),
    )


def _n_probs(fields: Fields) -> int:
    value = fields.get("n_probs") if "n_probs" in fields else fields.get("logprobs")
    if isinstance(value, bool):  # OpenAI's chat writes logprobs so
        return int(value)
    return max(fields.integer("n_probs", "logprobs", default=0), 0)


def _response_fields(fields: Fields) -> tuple[str, ...]:
    """Names of members; anything but a list means all of them, as in llama-server."""
    return tuple(fields.strings("response_fields") or ()) if isinstance(fields.get("response_fields"), list) else ()

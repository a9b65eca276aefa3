"""Bodies of requests that generate: what all of them may say, and chats, completions and infills on top of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeAlias

from msgspec import field

from pyctl.engine.sampling import RANDOM_SEED, SAMPLER_LETTERS, Sampling, range_of, sampler_named
from pyctl.errors import RequestError
from pyctl.limit import limit
from pyctl.server.body import (
    Body,
    Flattened,
    Integer,
    Names,
    Nested,
    at_most,
    boolean,
    json_object,
    number,
    out_of_range,
    string,
    strings,
)

__all__ = [
    "MOST_BIASES",
    "MOST_CHOICES",
    "MOST_REPLIES",
    "AnyBody",
    "ChatBody",
    "CompletionBody",
    "ConversationBody",
    "GenerationBody",
    "InfillBody",
    "ReplyOptions",
    "sampling_values",
    "scales_of",
]

MOST_CHOICES = limit(128, "`n`, choices of a request", "400", "request")
"""Replies to one prompt (``n``), as many as OpenAI allows. llama-server needs a slot for each; here they may queue."""

MOST_REPLIES = limit(512, "replies of a request, prompts times `n`", "400", "request")
_MAX_PROBS = limit(100, "`n_probs`, `logprobs` and `top_logprobs`", "400", "request")
"""OpenAI allows 20; users of llama-server ask for 10 to 50."""
_MAX_STOPS = limit(128, "`stop`, stop strings of a request", "400", "request")
_MAX_STOP_LETTERS = limit(4_096, "all stop strings of a request together", "400", "request", "characters")
_MAX_BREAKERS = limit(32, "`dry_sequence_breakers`", "400", "request")
_MAX_BREAKER = limit(256, "one of the `dry_sequence_breakers`", "400", "request", "characters")
_MAX_SAMPLERS = limit(32, "`samplers`", "400", "request")
MOST_BIASES = limit(8_192, "`logit_bias`", "400", "request", "tokens")
_MAX_END_TAGS = limit(16, "`reasoning_budget_end_tags`", "400", "request")
_MAX_BUDGET_MESSAGE = limit(4_096, "`reasoning_budget_message`", "400", "request", "characters")
_MAX_PINS = limit(64, "`kv_pin`, ranges of a request", "400", "request")
_MAX_NAMES = limit(256, "`response_fields`, and adapters in `lora`", "400", "request")


class _Scale(Body, frozen=True):
    id: int = -1
    scale: float = 0.0


def scales_of(value: Any, name: str = "lora") -> tuple[tuple[int, float], ...]:
    """Adapters of a request by number and scale."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"'{name}' must be an array of objects with 'id' and 'scale' fields")
    at_most(_MAX_NAMES, len(value), name)
    return tuple((scale.id, scale.scale) for scale in map(_Scale.of, value))


def _member_names(value: Any, name: str) -> tuple[str, ...]:
    """Anything but a list means all members, as in llama-server."""
    if not isinstance(value, list):
        return ()
    at_most(_MAX_NAMES, len(value), name)
    return strings(value, name)


def _stops(value: Any, name: str) -> tuple[str, ...]:
    words = strings(value, name)
    at_most(_MAX_STOPS, len(words), name)
    at_most(_MAX_STOP_LETTERS, sum(map(len, words)), name, "characters")
    return words


def _end_tags(value: Any, name: str) -> tuple[str, ...]:
    tags = strings(value, name)
    at_most(_MAX_END_TAGS, len(tags), name)
    return tags


def _budget_message(value: Any, name: str) -> str:
    text = string(value, name)
    at_most(_MAX_BUDGET_MESSAGE, len(text), name, "characters")
    return text


def _pins(value: Any, name: str) -> tuple[tuple[int, int], ...]:
    """Ranges of tokens, [[from, to], ...]."""
    if not isinstance(value, list):
        raise RequestError(f"'{name}' must be a list of pairs of token counts, [[from, to], ...]")
    at_most(_MAX_PINS, len(value), name)
    found = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2:
            raise RequestError(f"'{name}' must be a list of pairs of token counts, [[from, to], ...]")
        first, last = (Integer(0)(number, name) for number in pair)
        if first >= last:
            raise RequestError(f"'{name}' has a range from {first} to {last}: there is nothing in it")
        found.append((first, last))
    return tuple(found)


def _probs(value: Any, name: str) -> int:
    """A count, none if it is below 0."""
    n = max(Integer()(value, name), 0)
    if n > _MAX_PROBS:
        raise out_of_range(name, n, 0, _MAX_PROBS)
    return n


class _StreamOptions(Body, frozen=True):
    include_usage: bool = False


class ReplyOptions(Body, frozen=True):
    """How to answer; names and defaults are llama-server's.

    ``ping_seconds`` is the silence after which a stream sends a comment, None for the server's own, as for the
    ``reasoning_format`` and ``verbose``. ``return_cache`` is not llama-server's: ``timings.cache`` says what the prefix
    cache did. The last row has no meaning here: it is shown back in the settings, or refused, as llama-server
    does.
    """

    stream: bool = False
    stream_options: Annotated[_StreamOptions, Nested(_StreamOptions)] = _StreamOptions()
    timings_per_token: bool = False
    return_progress: bool = False
    return_cache: bool = False
    return_tokens: bool = False
    echo: bool = False
    verbose: bool | None = None
    response_fields: Annotated[tuple[str, ...], _member_names] = ()
    ping_seconds: Annotated[int | None, Integer(low=-1), Names("sse_ping_interval")] = None
    reasoning_format: str | None = None
    reasoning_control: bool = False
    lora: Annotated[tuple[tuple[int, float], ...], scales_of] = ()
    n_keep: Annotated[int, Integer(low=-1)] = 0
    n_discard: Annotated[int, Integer(low=0)] = 0
    n_cache_reuse: Annotated[int, Integer(low=0)] = 0
    backend_sampling: bool = False


_RANGES = {item.name: range_of(item) for item in fields(Sampling)}


def sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The members of `Sampling` that a body sets, by the ranges declared there; ``logit_bias`` as it came.

    Raises RequestError.
    """
    found: dict[str, Any] = {}
    for item in fields(Sampling):
        name, value = item.name, values.get(item.name)
        if value is None or name.startswith("grammar"):  # what binds a reply comes by more than one field
            continue
        limits = _RANGES[name]
        if limits is not None:
            whole = isinstance(item.default, int)
            read = number(value, name) if not whole or limits.beyond == "cut" else Integer()(value, name)
            if limits.beyond == "cut":
                read = min(max(read, limits.low), limits.high)
            elif not limits.low <= read <= limits.high:
                if limits.beyond == "ignore":
                    continue
                raise out_of_range(name, value, limits.low, limits.high)
            found[name] = int(read) if whole else float(read)
        elif name == "seed":
            number(value, name)
            found[name] = int(value) & RANDOM_SEED  # -1 is random; wider numbers lose bits
        elif isinstance(item.default, bool):
            found[name] = boolean(value, name)
        elif name == "dry_sequence_breakers":
            if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
                raise RequestError(f"'{name}' must be a list of strings with at least one")
            at_most(_MAX_BREAKERS, len(value), name)
            at_most(_MAX_BREAKER, max(map(len, value)), name, "characters each")
            found[name] = tuple(value)
        elif name == "samplers" and isinstance(value, str | list):
            at_most(_MAX_SAMPLERS, len(value), name)
            found[name] = _samplers(value)
        elif name == "logit_bias":
            if isinstance(value, list | dict):
                at_most(MOST_BIASES, len(value), name)
            found[name] = value
    return found


def _samplers(value: str | list[Any]) -> tuple[str, ...]:
    """Names, in any spelling, or one letter per sampler; what is unknown is left out."""
    if isinstance(value, str):
        return tuple(SAMPLER_LETTERS[letter] for letter in value if letter in SAMPLER_LETTERS)
    if not all(isinstance(item, str) for item in value):
        raise RequestError("'samplers' must be a list of names or a string of letters")
    return tuple(name for name in map(sampler_named, value) if name is not None)


class _ResponseFormat(Body, frozen=True):
    type: str = ""
    schema: Any = None
    json_schema: Any = None


class GenerationBody(Body, frozen=True):
    """What every request that generates may say. ``max_tokens`` None means the server's own, -1 until the context is
    full; ``n`` is replies per prompt; ``sampling`` holds members of `Sampling`.
    """

    options: Annotated[ReplyOptions, Flattened(ReplyOptions.of)] = ReplyOptions()
    sampling: Annotated[dict[str, Any], Flattened(sampling_values)] = field(default_factory=dict)
    n: Annotated[int, Integer(1, MOST_CHOICES), Names("n_cmpl", "n")] = 1
    n_probs: Annotated[int, _probs] = 0
    max_tokens: Annotated[
        int | None, Integer(low=-1, is_limit=True), Names("n_predict", "max_completion_tokens", "max_tokens")
    ] = None
    max_ms: Annotated[int, Integer(-1, 2**63 - 1, is_limit=True), Names("t_max_predict_ms")] = -1
    n_indent: Annotated[int, Integer(low=0)] = 0
    stop: Annotated[tuple[str, ...], _stops] = ()
    seq: Annotated[int, Names("id_slot")] = -1
    cache_prompt: bool | None = None
    prefix_cache: Any = None
    kv_pin: Annotated[tuple[tuple[int, int], ...], _pins] = ()
    grammar: str | None = None
    json_schema: Any = None
    response_format: Annotated[_ResponseFormat, Nested(_ResponseFormat)] = _ResponseFormat()
    reasoning_budget: Annotated[
        int, Integer(low=-1, is_limit=True), Names("reasoning_budget_tokens", "thinking_budget_tokens")
    ] = -1
    reasoning_budget_message: Annotated[str | None, _budget_message] = None

    @property
    def schema(self) -> Any:
        """The JSON schema that the reply has to follow; None without one. Raises RequestError."""
        schema, form = self.json_schema, self.response_format
        if form.type == "json_object" and (schema is None or form.schema is not None):
            schema = form.schema or {}
        elif form.type == "json_schema":
            wrapped = {} if form.json_schema is None else json_object(form.json_schema, "json_schema")
            schema = wrapped.get("schema") or {}
        elif form.type not in ("", "text", "json_object"):
            kinds = '"text", "json_object" or "json_schema"'
            raise RequestError(f"response_format type must be one of {kinds}, not: {form.type}")
        return {"type": "object"} if schema == {} else schema


def _count_or_switch(value: Any, name: str) -> int:
    """OpenAI's chat writes ``logprobs`` as a switch, its completions as a count."""
    return int(value) if isinstance(value, bool) else _probs(value, name)


class CompletionBody(GenerationBody, frozen=True):
    """POST /completion and /v1/completions. A raw prompt has to name the tags of its reasoning itself."""

    prompt: Any = None
    n_probs: Annotated[int, _count_or_switch, Names("n_probs", "logprobs")] = 0
    reasoning_start: Annotated[str, Names("reasoning_budget_start_tag")] = ""
    reasoning_ends: Annotated[
        tuple[str, ...], _end_tags, Names("reasoning_budget_end_tags", "reasoning_budget_end_tag")
    ] = ()
    generation_prompt: str = ""


class InfillBody(CompletionBody, frozen=True):
    """POST /infill"""

    input_prefix: Any = None
    input_suffix: Any = None
    input_extra: Any = None


class ConversationBody(Body, frozen=True):
    """What of a chat request becomes its prompt. ``parallel_tool_calls`` None: as the template can."""

    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    parse_tool_calls: bool = True
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    reasoning_effort: str = ""
    add_generation_prompt: bool | None = None
    continue_final_message: Any = None
    grammar: str | None = None


class _ChatProbs(Body, frozen=True):
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Integer(0, _MAX_PROBS)] = None
    n_probs: Annotated[int, _probs] = 0


def _chat_probs(values: Mapping[str, Any]) -> int:
    """OpenAI's ``logprobs`` and ``top_logprobs``, or llama-server's ``n_probs``."""
    probs = _ChatProbs.of(values)
    if probs.logprobs:
        return 20 if probs.top_logprobs is None else probs.top_logprobs
    if probs.top_logprobs is not None:
        raise RequestError("top_logprobs requires logprobs to be set to true")
    return probs.n_probs


class ChatBody(GenerationBody, frozen=True):
    """POST /v1/chat/completions"""

    conversation: Annotated[ConversationBody, Flattened(ConversationBody.of)] = ConversationBody()
    n_probs: Annotated[int, Flattened(_chat_probs)] = 0


AnyBody: TypeAlias = ChatBody | CompletionBody | InfillBody

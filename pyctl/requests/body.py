"""The bodies of requests that generate, with the names and defaults of llama-server's fields."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, TypeAlias

import msgspec

from pyctl.cache.retention import MAX_SECONDS, NO_RETENTION, Retention
from pyctl.errors import RequestError
from pyctl.requests.body_reader import (
    Body,
    Flattened,
    Integer,
    Names,
    SameAs,
    Unsupported,
    at_most,
    boolean,
    json_object,
    out_of_range,
    string,
    strings,
)
from pyctl.requests.prediction import read_prediction
from pyctl.requests.reply_options import ReplyOptions
from pyctl.requests.sampling_fields import sampling_values
from pyctl.settings.limit import limit

__all__ = [
    "MAX_REPLIES",
    "ONE_REPLY",
    "AnyBody",
    "ChatBody",
    "CompletionBody",
    "ConversationBody",
    "GenerationBody",
    "InfillBody",
    "ReasoningOptions",
    "StopConditions",
    "StructuredOutput",
]

ONE_REPLY = dict.fromkeys(("n", "n_cmpl"), ("this API has one reply to a request", 1))
"""The entries of `Body.unsupported` for an API that has one reply to a request."""

MAX_CHOICES = limit(128, "`n`, choices of a request", "400", "request")
"""Replies to one prompt (``n``), as many as OpenAI allows. llama-server needs a slot for each; here
they may queue.
"""

MAX_REPLIES = limit(512, "replies of a request, prompts times `n`", "400", "request")
_MAX_PROBS = limit(100, "`n_probs`, `logprobs` and `top_logprobs`", "400", "request")
"""OpenAI allows 20; users of llama-server request 10 to 50."""

_MAX_STOPS = limit(128, "`stop`, stop strings of a request", "400", "request")
_MAX_STOP_CHARS = limit(
    4_096, "all stop strings of a request together", "400", "request", "characters"
)
_MAX_END_TAGS = limit(16, "`reasoning_budget_end_tags`", "400", "request")
_MAX_TAG = limit(
    256, "one of the reasoning tags that a raw prompt names", "400", "request", "characters"
)
_MAX_BUDGET_MESSAGE = limit(4_096, "`reasoning_budget_message`", "400", "request", "characters")


def _stops(value: Any, name: str) -> tuple[str, ...]:
    if isinstance(value, list):
        value = [word for word in value if word is not None]
    words = strings(value, name)
    at_most(_MAX_STOPS, len(words), name)
    at_most(_MAX_STOP_CHARS, sum(map(len, words)), name, "characters")
    return words


def _end_tags(value: Any, name: str) -> tuple[str, ...]:
    tags = strings(value, name)
    at_most(_MAX_END_TAGS, len(tags), name)
    at_most(_MAX_TAG, max(map(len, tags), default=0), name, "characters each")
    return tags


def _short(value: Any, name: str, maximum: int) -> str:
    text = string(value, name)
    at_most(maximum, len(text), name, "characters")
    return text


def _alternatives(value: Any, name: str) -> int | None:
    """Return the number of alternatives to each token, OpenAI's field; None for a negative one."""
    n = Integer()(value, name)
    if n > _MAX_PROBS:
        raise out_of_range(name, n, 0, _MAX_PROBS)
    return n if n >= 0 else None


def _probs(value: Any, name: str) -> int | None:
    """Return the number of alternatives, llama-server's field: as `_alternatives`, but None for 0
    as well.
    """
    return _alternatives(value, name) or None


def _seq(value: Any, name: str) -> int:
    """Return a number, or the number in a string, as llama-server accepts it."""
    is_number = isinstance(value, str) and len(value) < 11 and value.removeprefix("-").isdecimal()
    return Integer()(int(value) if is_number else value, name)


_BINDING = "use 'response_format', 'json_schema' or 'grammar'"

_UNSUPPORTED: Unsupported = {
    "audio": ("replies are text",),
    "best_of": ("all replies that are made come back, 'n' of them", 1, SameAs("n")),
    "function_call": ("use 'tool_choice'", "none", "auto"),
    "functions": ("use 'tools'",),
    "guided_choice": (_BINDING,),
    "guided_grammar": (_BINDING,),
    "guided_json": (_BINDING,),
    "guided_regex": (_BINDING,),
    "modalities": ("replies are text", ["text"]),
    "structured_outputs": (_BINDING,),
    "web_search_options": ("add a tool that searches",),
}
"""The fields that OpenAI's APIs, and vLLM's, have beyond these and this server does not support."""


class StopConditions(Body, frozen=True):
    """The fields that end a reply. ``max_tokens`` None means the server's own, -1 until the context
    is full; ``max_ms`` -1 is no limit.
    """

    max_tokens: Annotated[
        int | None,
        Integer(low=-1, is_limit=True),
        Names("n_predict", "max_completion_tokens", "max_tokens"),
    ] = None
    max_ms: Annotated[int, Integer(-1, 2**63 - 1, is_limit=True), Names("t_max_predict_ms")] = -1
    n_indent: Annotated[int, Integer(low=0)] = 0
    stop: Annotated[tuple[str, ...], _stops] = ()


class _ResponseFormat(Body, frozen=True):
    type: str = ""
    schema: Any = None
    json_schema: Any = None


class StructuredOutput(Body, frozen=True):
    """The fields that bind the text of a reply to a grammar or a JSON schema."""

    grammar: str | None = None
    json_schema: Any = None
    response_format: _ResponseFormat = _ResponseFormat()

    def schema(self) -> Any:
        """Return the JSON schema that a reply has to follow; None without one. Raises
        RequestError.
        """
        schema = self._requested_schema()
        return {"type": "object"} if schema == {} else schema

    def _requested_schema(self) -> Any:
        """Return the schema as sent, also an empty one; None without one."""
        form = self.response_format
        if form.type in ("", "text"):
            return self.json_schema
        if form.type == "json_object":
            # As in llama-server, the schema of the format wins over the field of that name.
            if self.json_schema is not None and form.schema is None:
                return self.json_schema
            return form.schema or {}
        if form.type == "json_schema":
            wrapped = {}
            if form.json_schema is not None:
                wrapped = json_object(form.json_schema, "json_schema")
            if "schema" not in wrapped and wrapped.keys() - {"name", "description", "strict"}:
                raise RequestError("'json_schema' must hold the schema as its member 'schema'")
            # The schema next to the type is the form of llama-server's README.
            return wrapped.get("schema") or form.schema or {}
        kinds = '"text", "json_object" or "json_schema"'
        raise RequestError(f"response_format type must be one of {kinds}, not: {form.type}")


class ReasoningOptions(Body, frozen=True):
    """The most tokens of reasoning, -1 for the server's own, and the text that ends it then."""

    n_tokens: Annotated[
        int,
        Integer(low=-1, is_limit=True),
        Names(
            "reasoning_budget_tokens",
            "thinking_budget_tokens",
            "thinking.budget_tokens",
            "reasoning.max_tokens",
        ),
    ] = -1
    message: Annotated[
        str | None,
        partial(_short, maximum=_MAX_BUDGET_MESSAGE),
        Names("reasoning_budget_message"),
    ] = None


class _RetentionBody(Body, frozen=True):
    """The members of the field ``cache_retention``: see `Retention`."""

    prompt_seconds: Annotated[int, Integer(0, MAX_SECONDS)] = 0
    head_seconds: Annotated[int, Integer(0, MAX_SECONDS)] = 0
    evict_on_complete: bool = False


def _retention(value: Any, name: str) -> Retention:
    body = _RetentionBody.from_json(json_object(value, name))
    return Retention(body.prompt_seconds, body.head_seconds, body.evict_on_complete)


class GenerationBody(Body, frozen=True):
    """The fields of every request that generates. ``n`` is replies per prompt; ``n_probs`` None
    means no log-probabilities, 0 no alternatives to the reply's tokens; ``sampling`` holds members
    of `Sampling`. ``prediction`` is the expected reply, None if the client expects none.
    """

    unsupported = _UNSUPPORTED

    options: Annotated[ReplyOptions, Flattened(ReplyOptions.from_json)] = ReplyOptions()
    sampling: Annotated[dict[str, Any], Flattened(sampling_values)] = msgspec.field(
        default_factory=dict
    )
    n: Annotated[int, Integer(1, MAX_CHOICES), Names("n_cmpl", "n")] = 1
    n_probs: Annotated[int | None, _probs] = None
    stops: Annotated[StopConditions, Flattened(StopConditions.from_json)] = StopConditions()
    seq: Annotated[int, _seq, Names("id_slot")] = -1
    cache_prompt: bool | None = None
    prefix_cache: Any = None
    retention: Annotated[Retention, _retention, Names("cache_retention")] = NO_RETENTION
    structured: Annotated[StructuredOutput, Flattened(StructuredOutput.from_json)] = (
        StructuredOutput()
    )
    reasoning: Annotated[ReasoningOptions, Flattened(ReasoningOptions.from_json)] = (
        ReasoningOptions()
    )
    prediction: Annotated[str | None, read_prediction] = None


def _count_or_switch(value: Any, name: str) -> int | None:
    """Return ``logprobs``, a switch in OpenAI's chat and a count in its completions."""
    if name == "n_probs":
        return _probs(value, name)
    if isinstance(value, bool):
        return 1 if value else None
    return _alternatives(value, name)


class CompletionBody(GenerationBody, frozen=True):
    """The body of POST /completion and /v1/completions. A raw prompt has to name the tags of its
    reasoning itself.
    """

    prompt: Any = None
    suffix: str = ""
    n_probs: Annotated[int | None, _count_or_switch, Names("n_probs", "logprobs")] = None
    reasoning_start: Annotated[
        str, partial(_short, maximum=_MAX_TAG), Names("reasoning_budget_start_tag")
    ] = ""
    reasoning_ends: Annotated[
        tuple[str, ...], _end_tags, Names("reasoning_budget_end_tags", "reasoning_budget_end_tag")
    ] = ()
    generation_prompt: str = ""


class InfillBody(CompletionBody, frozen=True):
    """The body of POST /infill."""

    input_prefix: Any = None
    input_suffix: Any = None
    input_extra: Any = None


def _thinking_switch(value: Any, name: str) -> bool | None:
    """Return whether the model may reason; None for an object, whose members are other fields."""
    if isinstance(value, dict):
        return None
    if name == "thinking.type":
        return False if value == "disabled" else None
    return boolean(value, name)


class ConversationBody(Body, frozen=True):
    """The fields of a chat request that become its prompt. ``parallel_tool_calls`` None: as the
    template can.

    ``enable_thinking`` is a switch in the words of several APIs, None if they leave it to
    ``chat_template_kwargs``. ``callable_tools`` are those that the reply may call, None for all
    that the template shows.
    """

    messages: Any = None
    tools: Any = None
    callable_tools: Any = None
    tool_choice: Any = None
    parse_tool_calls: bool = True
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    reasoning_effort: Annotated[str, Names("reasoning_effort", "reasoning.effort")] = ""
    enable_thinking: Annotated[
        bool | None,
        _thinking_switch,
        Names(
            "enable_thinking",
            "think",
            "reasoning.enabled",
            "thinking.type",
            "reasoning",
            "thinking",
        ),
    ] = None
    add_generation_prompt: bool | None = None
    continue_final_message: Any = None
    grammar: str | None = None


class _ChatProbs(Body, frozen=True):
    logprobs: Annotated[int | None, _count_or_switch] = None
    top_logprobs: Annotated[int | None, Integer(0, _MAX_PROBS)] = None
    n_probs: Annotated[int | None, _probs] = None


def _chat_probs(values: Mapping[str, Any]) -> int | None:
    """Return the number of OpenAI's ``logprobs`` and ``top_logprobs``, or llama-server's
    ``n_probs``.
    """
    probs = _ChatProbs.from_json(values)
    if probs.logprobs:
        n = 20 if values["logprobs"] is True else probs.logprobs
        return n if probs.top_logprobs is None else probs.top_logprobs
    if probs.top_logprobs:
        raise RequestError("top_logprobs requires logprobs to be set to true")
    return probs.n_probs


class ChatBody(GenerationBody, frozen=True):
    """The body of POST /v1/chat/completions."""

    conversation: Annotated[ConversationBody, Flattened(ConversationBody.from_json)] = (
        ConversationBody()
    )
    n_probs: Annotated[int | None, Flattened(_chat_probs)] = None


AnyBody: TypeAlias = ChatBody | CompletionBody | InfillBody

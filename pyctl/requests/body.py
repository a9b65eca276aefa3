"""Typed request bodies, read with llama-server's tolerance: null is absent, unknown names are
ignored.

A body declares its fields with their types; further rules (a range, other names) are annotated:

    class Greeting(Body):
        loud: bool = False
        times: Annotated[int, Integer(low=1), Names("times", "n")] = 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from pyctl.engine.sampling import RANDOM_SEED, SAMPLER_LETTERS, Sampling, range_of, sampler_named
from pyctl.errors import NotSupportedError, RequestError
from pyctl.settings.convert import INT32_MAX
from pyctl.settings.limit import limit
from pyctl.text import with_whole_characters

__all__ = [
    "CHARS_PER_TOKEN",
    "MAX_BIASES",
    "MAX_REPLIES",
    "ONE_REPLY",
    "AnyBody",
    "Body",
    "ChatBody",
    "CompletionBody",
    "ConversationBody",
    "Flattened",
    "GenerationBody",
    "InfillBody",
    "Integer",
    "Names",
    "ReplyOptions",
    "at_most",
    "check_chars",
    "decode",
    "items",
    "json_object",
    "number",
    "others",
    "parse_json",
    "parse_object",
    "refuse",
    "scales_of",
]

CHARS_PER_TOKEN = 8
"""Texts of more characters than this times the context hardly ever fit."""

MAX_CHARS = limit(
    2**20,
    "a text to tokenise; or 8 characters for each token of the context",
    "400",
    "request",
    "characters",
)


def check_chars(text: str, n_ctx: int) -> None:
    """Raise RequestError for a text that takes much memory to tokenise, though it cannot get a
    reply.
    """
    maximum = max(MAX_CHARS, CHARS_PER_TOKEN * n_ctx)
    if len(text) > maximum:
        raise RequestError(
            f"a text of {len(text)} characters is too long: at most {maximum} are allowed"
        )


_MAX_SIGNS = {
    (b",",): (limit(1_500_000, "commas in a body (values)", "400", "request"), "commas"),
    (b":",): (limit(150_000, "colons in a body (keys)", "400", "request"), "colons"),
    (b"[", b"{"): (limit(300_000, "opening brackets in a body", "400", "request"), "brackets"),
}
"""A value of two bytes takes a hundred in memory, and nothing else runs while the library reads
them.
"""

Reader: TypeAlias = Callable[[Any, str], Any]
"""Makes a field of a value, which is not null, and of its name for errors. Raises RequestError."""

B = TypeVar("B", bound="Body")
T = TypeVar("T")


class Names(tuple[str, ...]):
    """The names of a field in JSON, if not that in Python; of several, the first that is present
    counts.

    ``outer.inner`` is a member of an object.
    """

    def __new__(cls, *names: str) -> Names:
        return super().__new__(cls, names)


@dataclass(frozen=True)
class Integer:
    """A reader of a number without its fraction; outside of [low, high] it is refused.

    With ``is_limit``, more than ``high`` is taken as that: for "as many as you like", clients write
    what they can.
    """

    low: int | None = None
    high: int = INT32_MAX
    is_limit: bool = False

    def __call__(self, value: Any, name: str) -> int:
        number(value, name)
        if self.is_limit:
            value = min(value, self.high)
        if (self.low is not None and value < self.low) or value > self.high:
            raise out_of_range(name, value, "-inf" if self.low is None else self.low, self.high)
        return int(value)


@dataclass(frozen=True)
class Flattened:
    """A reader that makes a field of the whole object around it."""

    read: Callable[[Mapping[str, Any]], Any]


def out_of_range(name: str, value: object, low: object, high: object) -> RequestError:
    """Return the error for a number outside of its range."""
    return RequestError(f"'{name}' must be in [{low}, {high}], not {value}")


def _typed(kind: type[T], words: str) -> Callable[[Any, str], T]:
    """Return a reader of values of ``kind``."""

    def read(value: Any, name: str) -> T:
        """Return ``value``, which is the field ``name``. Raises RequestError if it has another
        type.
        """
        if not isinstance(value, kind):
            raise RequestError(f"'{name}' must be {words}")
        return value

    return read


boolean = _typed(bool, "true or false")
string = _typed(str, "a string")
json_object: Callable[[Any, str], dict[str, Any]] = _typed(dict, "an object")
items: Callable[[Any, str], list[Any]] = _typed(list, "a list")


def number(value: Any, name: str) -> float:
    """Return a number. Raises RequestError for others."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"'{name}' must be a number")
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"'{name}' is too large a number") from None


def strings(value: Any, name: str) -> tuple[str, ...]:
    """Return a list of strings; a single string is a list of one. Raises RequestError for
    others.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"'{name}' must be a string or a list of strings")
    return tuple(value)


def at_most(maximum: int, n: int, name: str, of: str = "entries") -> None:
    """Raise RequestError if the field has more than ``maximum``."""
    if n > maximum:
        raise RequestError(f"'{name}' must have at most {maximum} {of}, not {n}")


def _as_it_is(value: Any, name: str) -> Any:
    return value


def _nested(value: Any, name: str, body: type[Body]) -> Body:
    """Return an object as a body."""
    return body.of(json_object(value, name))


_READERS: dict[object, Reader] = {
    bool: boolean,
    int: Integer(),
    float: number,
    str: string,
    tuple[str, ...]: strings,
    dict[str, Any]: json_object,
    list[Any]: items,
    Any: _as_it_is,
}


class _Field(NamedTuple):
    names: tuple[str, ...]
    read: Reader | Flattened


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object with known members."""

    @classmethod
    def of(cls: type[B], values: Mapping[str, Any]) -> B:
        """Return the body of ``values``. Raises RequestError."""
        fields: dict[str, Any] = {}
        for field, (names, read) in _fields(cls).items():
            if isinstance(read, Flattened):
                fields[field] = read.read(values)
                continue
            for name in names:
                value = _member(values, name) if "." in name else values.get(name)
                if value is not None:
                    fields[field] = read(value, name)
                    break
        return cls(**fields)

    @classmethod
    def parse(cls: type[B], body: bytes) -> B:
        """Return the body of JSON text. Raises RequestError."""
        return cls.of(parse_object(body))

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return all names in JSON."""
        return frozenset(name for field in _fields(cls).values() for name in field.names)


def _member(values: Mapping[str, Any], path: str) -> Any:
    outer, _, inner = path.partition(".")
    member = values.get(outer)
    return member.get(inner) if isinstance(member, dict) else None


@cache
def _fields(body: type[Body]) -> dict[str, _Field]:
    return {
        name: _field(name, hint) for name, hint in get_type_hints(body, include_extras=True).items()
    }


def _field(name: str, hint: Any) -> _Field:
    """Return the names and the reader of the field ``name``, from its annotation or from its type
    ``hint``.
    """
    names: tuple[str, ...] = (name,)
    read: Reader | Flattened | None = None
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        for extra in extras:
            if isinstance(extra, Names):
                names = extra
            else:
                read = extra
    if read is None:
        kinds = (
            [kind for kind in get_args(hint) if kind is not type(None)]
            if type(None) in get_args(hint)
            else [hint]
        )
        is_body = isinstance(kinds[0], type) and issubclass(kinds[0], Body)
        read = partial(_nested, body=kinds[0]) if is_body else _READERS[kinds[0]]
    return _Field(names, read)


_BOM = b"\xef\xbb\xbf"
"""The byte order mark that .NET and PowerShell write before UTF-8."""


def parse_json(body: bytes) -> Any:
    """Return the value of the JSON text ``body``, with a byte order mark or without. Raises
    RequestError.
    """
    for signs, (maximum, name) in _MAX_SIGNS.items():
        if sum(body.count(sign) for sign in signs) > maximum:
            raise RequestError(f"the body has more than {maximum} {name}")
    if not body:
        raise RequestError("the body is empty, it must be JSON")
    try:
        return decode(body, Any)
    except msgspec.ValidationError as error:  # a number out of range
        raise RequestError(f"the body is not valid JSON: {error}") from error


def decode(body: bytes, kind: type[T]) -> T:
    """Return the JSON text ``body`` as a ``kind`` of msgspec, however many values it has.

    Half a surrogate pair (``\\ud83d``) is read as U+FFFD: RFC 8259 allows it, and JavaScript writes
    it for a text that was cut within an emoji. Raises RequestError for text that is not JSON, and
    msgspec.ValidationError for another ``kind``.
    """
    body = body.removeprefix(_BOM)
    try:
        return _decoded(body, kind)
    except RequestError as error:
        try:
            whole = with_whole_characters(body)
        except ValueError as reason:
            raise RequestError(f"{error}; {reason}") from error
        if whole == body:
            raise
    return _decoded(whole, kind)


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the object of the JSON text ``body``. Raises RequestError."""
    values = parse_json(body)
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object")
    return values


def others(values: Mapping[str, Any], body: type[Body], ignored: frozenset[str]) -> dict[str, Any]:
    """Return the ``values`` that are neither a field of ``body`` nor ``ignored``, for another
    body.
    """
    own = body.names() | ignored
    return {name: value for name, value in values.items() if name not in own}


def refuse(values: Mapping[str, Any], not_done: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise NotSupportedError for a known field that is not supported, if it has an effect.

    ``not_done`` maps the field to a hint and the values without an effect, besides null, false, 0
    and empty ones.
    """
    for name, (hint, *idle) in not_done.items():
        value = values.get(name)
        if value and value not in idle:
            raise NotSupportedError(f"'{name}' is not supported: {hint}")


ONE_REPLY = dict.fromkeys(("n", "n_cmpl"), ("this API has one reply to a request", 1))
"""The entries for `refuse`."""

# -- requests that generate
# ----------------------------------------------------------------------------------

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
_MAX_BREAKERS = limit(32, "`dry_sequence_breakers`", "400", "request")
_MAX_BREAKER = limit(256, "one of the `dry_sequence_breakers`", "400", "request", "characters")
_MAX_SAMPLERS = limit(32, "`samplers`", "400", "request")
MAX_BIASES = limit(8_192, "`logit_bias`", "400", "request", "tokens")
_MAX_END_TAGS = limit(16, "`reasoning_budget_end_tags`", "400", "request")
_MAX_TAG = limit(
    256, "one of the reasoning tags that a raw prompt names", "400", "request", "characters"
)
_MAX_BUDGET_MESSAGE = limit(4_096, "`reasoning_budget_message`", "400", "request", "characters")
_MAX_NAMES = limit(256, "`response_fields`, and adapters in `lora`", "400", "request")


class _Scale(Body, frozen=True):
    id: int = -1
    scale: float = 0.0


def scales_of(value: Any, name: str = "lora") -> tuple[tuple[int, float], ...]:
    """Return the adapters of a request by number and scale. Raises RequestError for other
    values.
    """
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"'{name}' must be an array of objects with 'id' and 'scale' fields")
    at_most(_MAX_NAMES, len(value), name)
    return tuple((scale.id, scale.scale) for scale in map(_Scale.of, value))


def _member_names(value: Any, name: str) -> tuple[str, ...]:
    """Return the names of members. Anything but a list means all members, as in llama-server."""
    if not isinstance(value, list):
        return ()
    at_most(_MAX_NAMES, len(value), name)
    return strings(value, name)


def _stops(value: Any, name: str) -> tuple[str, ...]:
    words = strings(
        [word for word in value if word is not None] if isinstance(value, list) else value, name
    )
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


class _StreamOptions(Body, frozen=True):
    include_usage: bool = False


class ReplyOptions(Body, frozen=True):
    """The form of the answer; names and defaults are llama-server's.

    ``ping_seconds`` is the silence after which a stream sends a comment, None for the server's own,
    as for the ``reasoning_format`` and ``verbose``. ``return_cache`` is not llama-server's:
    ``timings.cache`` reports on the prefix cache. The last row has no meaning here: it is shown
    back in the settings, or refused, as llama-server does.
    """

    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
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


_OTHER_NAMES = {"repeat_penalty": "repetition_penalty"}
"""vLLM's and transformers' name of a sampling parameter, by llama-server's."""


def sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of `Sampling` that a body sets, by the ranges declared there;
    ``logit_bias`` stays as sent.

    Raises RequestError.
    """
    found: dict[str, Any] = {}
    for item in fields(Sampling):
        name = item.name
        value = values.get(name)
        if value is None:
            value = values.get(_OTHER_NAMES.get(name, name))
        if value is None or name.startswith(
            "grammar"
        ):  # what binds a reply comes by more than one field
            continue
        limits = _RANGES[name]
        if limits is not None:
            whole = isinstance(item.default, int)
            read = (
                number(value, name)
                if not whole or limits.beyond == "cut"
                else Integer()(value, name)
            )
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
            if (
                not isinstance(value, list)
                or not value
                or not all(isinstance(text, str) for text in value)
            ):
                raise RequestError(f"'{name}' must be a list of strings with at least one")
            at_most(_MAX_BREAKERS, len(value), name)
            at_most(_MAX_BREAKER, max(map(len, value)), name, "characters each")
            found[name] = tuple(value)
        elif name == "samplers" and isinstance(value, str | list):
            at_most(_MAX_SAMPLERS, len(value), name)
            found[name] = _samplers(value)
        elif name == "logit_bias":
            if isinstance(value, list | dict):
                at_most(MAX_BIASES, len(value), name)
            found[name] = value
    return found


def _samplers(value: str | list[Any]) -> tuple[str, ...]:
    """Return samplers from names, in any spelling, or one letter each; unknown ones are ignored."""
    if isinstance(value, str):
        return tuple(SAMPLER_LETTERS[letter] for letter in value if letter in SAMPLER_LETTERS)
    if not all(isinstance(item, str) for item in value):
        raise RequestError("'samplers' must be a list of names or a string of letters")
    return tuple(name for name in map(sampler_named, value) if name is not None)


class _ResponseFormat(Body, frozen=True):
    type: str = ""
    schema: Any = None
    json_schema: Any = None


_BINDING = "use 'response_format', 'json_schema' or 'grammar'"

_NOT_DONE: dict[str, tuple[Any, ...]] = {
    "audio": ("replies are text",),
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


class GenerationBody(Body, frozen=True):
    """The fields of every request that generates. ``max_tokens`` None means the server's own, -1
    until the context is full; ``n`` is replies per prompt; ``n_probs`` None means no
    log-probabilities, 0 no alternatives to the reply's tokens; ``sampling`` holds members of
    `Sampling`.
    """

    options: Annotated[ReplyOptions, Flattened(ReplyOptions.of)] = ReplyOptions()
    sampling: Annotated[dict[str, Any], Flattened(sampling_values)] = msgspec.field(
        default_factory=dict
    )
    n: Annotated[int, Integer(1, MAX_CHOICES), Names("n_cmpl", "n")] = 1
    n_probs: Annotated[int | None, _probs] = None
    max_tokens: Annotated[
        int | None,
        Integer(low=-1, is_limit=True),
        Names("n_predict", "max_completion_tokens", "max_tokens"),
    ] = None
    max_ms: Annotated[int, Integer(-1, 2**63 - 1, is_limit=True), Names("t_max_predict_ms")] = -1
    n_indent: Annotated[int, Integer(low=0)] = 0
    stop: Annotated[tuple[str, ...], _stops] = ()
    seq: Annotated[int, _seq, Names("id_slot")] = -1
    cache_prompt: bool | None = None
    prefix_cache: Any = None
    grammar: str | None = None
    json_schema: Any = None
    response_format: _ResponseFormat = _ResponseFormat()
    reasoning_budget: Annotated[
        int,
        Integer(low=-1, is_limit=True),
        Names(
            "reasoning_budget_tokens",
            "thinking_budget_tokens",
            "thinking.budget_tokens",
            "reasoning.max_tokens",
        ),
    ] = -1
    reasoning_budget_message: Annotated[
        str | None, partial(_short, maximum=_MAX_BUDGET_MESSAGE)
    ] = None

    @classmethod
    def of(cls: type[B], values: Mapping[str, Any]) -> B:
        refuse(
            values,
            {
                **_NOT_DONE,
                "best_of": ("all replies that are made come back, 'n' of them", 1, values.get("n")),
            },
        )
        return super().of(values)


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


def _reasons(value: Any, name: str) -> bool | None:
    if isinstance(value, dict):
        return None
    if name == "thinking.type":
        return False if value == "disabled" else None
    return boolean(value, name)


class ConversationBody(Body, frozen=True):
    """The fields of a chat request that become its prompt. ``parallel_tool_calls`` None: as the
    template can.

    ``enable_thinking`` is a switch in the words of several APIs, None if they leave it to
    ``chat_template_kwargs``.
    """

    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    parse_tool_calls: bool = True
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    reasoning_effort: Annotated[str, Names("reasoning_effort", "reasoning.effort")] = ""
    enable_thinking: Annotated[
        bool | None,
        _reasons,
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
    probs = _ChatProbs.of(values)
    if probs.logprobs:
        n = 20 if values["logprobs"] is True else probs.logprobs
        return n if probs.top_logprobs is None else probs.top_logprobs
    if probs.top_logprobs:
        raise RequestError("top_logprobs requires logprobs to be set to true")
    return probs.n_probs


class ChatBody(GenerationBody, frozen=True):
    """The body of POST /v1/chat/completions."""

    conversation: Annotated[ConversationBody, Flattened(ConversationBody.of)] = ConversationBody()
    n_probs: Annotated[int | None, Flattened(_chat_probs)] = None


AnyBody: TypeAlias = ChatBody | CompletionBody | InfillBody

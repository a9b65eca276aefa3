"""The path of every request to the engine: any typed body becomes its replies."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, get_args

from pyctl.cache.disk_policy import DiskPolicy
from pyctl.chat.cached_tokenizer import Tokenizer
from pyctl.chat.chat_format import ChatRequest, PreparedChat, ReasoningFormat
from pyctl.chat.constraint import Constraint, json_constraint
from pyctl.chat.reasoning import ReasoningLimit
from pyctl.chat.rendering import Continue
from pyctl.chat.reply import ReasoningSplitter, ReasoningTags, ReplySplitter, reasoning_limit
from pyctl.engine.backend import EngineInfo
from pyctl.engine.request import Request
from pyctl.engine.sampling import RANDOM_SEED, Sampling
from pyctl.errors import ContextSizeError, NotSupportedError, RequestError
from pyctl.files.image_file import ImageFile
from pyctl.prompt import Prompt
from pyctl.requests.body import (
    CHARS_PER_TOKEN,
    MAX_BIASES,
    MAX_REPLIES,
    AnyBody,
    Body,
    ChatBody,
    CompletionBody,
    ConversationBody,
    GenerationBody,
    InfillBody,
    ReplyOptions,
    at_most,
    json_object,
    number,
)
from pyctl.requests.image_sources import ImageSources, data_images, load_images
from pyctl.requests.prepared_reply import PreparedReply
from pyctl.requests.reply_settings import REASONING_FORMATS
from pyctl.requests.request_pool import NOTHING, Fetched
from pyctl.requests.service import Service
from pyctl.settings.convert import INT32_MAX

__all__ = [
    "keep_scales",
    "mixed",
    "parallel_calls",
    "prepare",
    "prepare_chat",
    "prepare_prewarm",
    "sampling_of",
    "schema_of",
]


log = logging.getLogger(__name__)


def prepare(service: Service, body: AnyBody, fetched: Fetched = NOTHING) -> list[PreparedReply]:
    """Return all replies that ``body`` requests: ``body.n`` to each of its prompts.

    Raises RequestError, FilesMissing for images at addresses that are not ``fetched``, and
    NotSupportedError for features that this model or server lacks.
    """
    settings = service.settings
    info = service.info
    keep_scales(info, body.options.lora)
    sampling = sampling_of(body, settings.sampling, service.tokenizer, info.n_vocab)
    replies: list[PreparedReply] = []
    for asked in _prompts(service, body, fetched):
        request = Request(
            prompt=asked.prompt,
            sampling=_bound(sampling, asked.constraint),
            max_tokens=settings.n_predict if body.max_tokens is None else body.max_tokens,
            stop=tuple(word for word in body.stop if word),
            n_probs=body.n_probs,
            cache_prompt=settings.cache_prompt if body.cache_prompt is None else body.cache_prompt,
            disk_policy=_disk_policy(service, body),
            # what a stream's headers wait for is the first of these
            return_progress=body.options.stream,
            reasoning=asked.reasoning,
            seq=body.seq % info.n_seqs if body.seq >= 0 else -1,
            n_indent=body.n_indent,
            max_ms=max(body.max_ms, 0),
            control_texts=asked.chat.control_texts if asked.chat is not None else {},
        )
        try:
            service.worker.check(request.sampling)
        except RequestError as error:
            if not request.sampling.grammar_lazy:
                raise
            log.warning("tool calls are not constrained to their schemas: %s", error)
            request = replace(request, sampling=sampling)
        for i in range(body.n):
            nth = _nth(request, i)
            splitter = _splitter(service, asked.chat, nth, is_alone=body.n == 1)
            replies.append(
                PreparedReply(nth, body.options, asked.text, splitter, len(replies), asked.chat)
            )
    return replies


def prepare_prewarm(service: Service, body: ChatBody, fetched: Fetched = NOTHING) -> Request:
    """Return a request that evaluates the certain beginning of the prompt of ``body``. Raises
    ContextSizeError.
    """
    keep_scales(service.info, body.options.lora)
    prompt = service.chat.beginning(_chat_request(service, body.conversation, fetched))
    if len(prompt) >= service.info.n_ctx:
        raise ContextSizeError(len(prompt), service.info.n_ctx)
    policy = _disk_policy(service, body)
    return Request(prompt, max_tokens=0, disk_policy=policy, background=True)


def _splitter(
    service: Service, chat: PreparedChat | None, request: Request, *, is_alone: bool
) -> ReplySplitter:
    """Return the splitter of the reply; after the only reply of a chat, the certain part of the
    next prompt is evaluated.
    """
    if chat is None:
        return ReplySplitter(ReasoningSplitter(None, "content"))
    if not (
        service.settings.warm_next and is_alone and request.cache_prompt and request.max_tokens != 0
    ):
        return chat.splitter()
    return chat.splitter(
        lambda message: service.post_reply.add(partial(_prewarm, service, chat, request, message))
    )


def _prewarm(
    service: Service, chat: PreparedChat, request: Request, message: dict[str, Any]
) -> None:
    """Evaluate the reply in the form that the next prompt will have: with the text before, after
    and instead of it.
    """
    prompt = chat.next_prompt(message)
    if prompt is not None:
        policy = request.disk_policy
        seq = request.seq
        ahead = Request(
            prompt, max_tokens=0, disk_policy=policy, seq=seq, background=True, after=request
        )
        service.worker.prewarm(ahead)


def prepare_chat(
    service: Service,
    body: ConversationBody,
    asked: ChatBody | None = None,
    fetched: Fetched = NOTHING,
) -> PreparedChat:
    """Return the conversation, up to its prompt; with everything that binds the reply if the whole
    request is ``asked``.
    """
    request = _chat_request(service, body, fetched)
    return service.chat.prepare(
        request if asked is None else replace(request, **_binding(service, asked))
    )


def _chat_request(service: Service, body: ConversationBody, fetched: Fetched) -> ChatRequest:
    """Return the conversation of ``body`` with the variables of the template.

    Raises RequestError for fields that exclude each other, and for images that cannot be read.
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
    continues = _continues(body.continue_final_message)
    add_header = (
        continues is None if body.add_generation_prompt is None else body.add_generation_prompt
    )
    if continues is not None and add_header:
        raise RequestError(
            "'add_generation_prompt' and 'continue_final_message' exclude each other"
        )
    return ChatRequest(
        load_images(body.messages, _image_sources(service, fetched)),
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=parallel_calls(service, body.parallel_tool_calls),
        prefill_assistant=service.settings.prefill_assistant,
        parse_tool_calls=body.parse_tool_calls,
        template_kwargs=kwargs,
        add_generation_prompt=add_header,
        continue_final_message=continues,
        grammar=body.grammar,
    )


def _image_sources(service: Service, fetched: Fetched) -> ImageSources | None:
    """Return the sources of a request's images, None for a model that reads none."""
    reader = service.chat.images
    if reader is None:
        return None
    return ImageSources(
        reader, fetched, n_ctx=service.info.n_ctx, media_path=service.shared.media_path
    )


def parallel_calls(service: Service, asked: bool | None) -> bool:
    """Return whether a reply may hold several calls: by the request, or else by the template."""
    return service.chat.capabilities.parallel_calls if asked is None else asked


def _binding(service: Service, body: ChatBody) -> dict[str, Any]:
    """Return the members of ChatRequest that bind and read the reply."""
    settings = service.settings
    budget = body.reasoning_budget if body.reasoning_budget >= 0 else settings.reasoning_budget
    if budget < 0 and body.options.reasoning_control:
        budget = INT32_MAX  # only limited reasoning can be ended
    message = body.reasoning_budget_message
    return {
        "reasoning_format": _reasoning_format(body.options, settings.reasoning_format),
        "schema": schema_of(body),
        "reasoning_budget": budget if budget >= 0 else None,
        "reasoning_budget_message": settings.reasoning_budget_message
        if message is None
        else message,
    }


@dataclass(frozen=True)
class _PromptSpec:
    """A prompt of a request, with the constraints and limits of the replies to it."""

    prompt: Prompt
    text: str
    constraint: Constraint | None = None
    reasoning: ReasoningLimit | None = None
    chat: PreparedChat | None = None


def _prompts(service: Service, body: AnyBody, fetched: Fetched) -> Iterator[_PromptSpec]:
    """Yield the prompts of ``body`` with their constraints: one of a chat, each one of a
    completion.

    Long texts are refused before anything is tokenised. Raises RequestError and ContextSizeError.
    """
    if isinstance(body, ChatBody):
        chat = prepare_chat(service, body.conversation, body, fetched)
        _refuse_long(service, chat.text)
        # What binds all replies of this server also binds those with calls, unless the request
        # overrides it.
        is_bound = bool(
            service.settings.sampling.grammar and not body.grammar and schema_of(body) is None
        )
        yield _PromptSpec(
            chat.prompt, chat.text, None if is_bound else chat.constraint, chat.reasoning, chat
        )
        return
    constraint = _raw_constraint(body)
    reasoning = _raw_reasoning(service, body)
    bos = service.info.bos_token if service.tokenizer.add_bos else ""
    value = infill_prompt(service, body) if isinstance(body, InfillBody) else body.prompt
    if body.suffix and not isinstance(body, InfillBody):
        value = _with_suffix(service, body)
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, str):
            _refuse_long(service, part)
    for prompt, text in prompts_of(value, service, MAX_REPLIES // body.n, fetched):
        text = bos + text if text is not None else service.text_of(prompt.tokens.tolist())
        yield _PromptSpec(prompt, text, constraint, reasoning)


def _refuse_long(service: Service, text: str) -> None:
    """Raise ContextSizeError if the beginning of ``text`` has more tokens than the context already.

    To tokenise all of some megabytes only to refuse it would take seconds. Where a text is cut, a
    few tokens more may come out than of the whole: hence the margin.
    """
    n_ctx = service.info.n_ctx
    size = CHARS_PER_TOKEN * n_ctx
    if len(text) > size:
        n = len(service.tokenizer.tokenize(text[:size], add_special=False, parse_special=True))
        if n > n_ctx + n_ctx // 8:
            raise ContextSizeError(n, n_ctx)


def _raw_constraint(body: CompletionBody) -> Constraint | None:
    schema = schema_of(body)
    if body.grammar:
        return Constraint(body.grammar)
    if schema is None:
        return None
    try:
        return json_constraint(schema)
    except RequestError as error:
        raise RequestError(
            f"Field 'json_schema': JSON schema conversion failed: {error}"
        ) from error


def _raw_reasoning(service: Service, body: CompletionBody) -> ReasoningLimit | None:
    ends = [tag for tag in body.reasoning_ends if tag]
    if body.reasoning_budget < 0 or not body.reasoning_start or not ends:
        return None
    tags = ReasoningTags(body.reasoning_start, ends[0], tuple(ends[1:]))
    message = body.reasoning_budget_message or ""
    read = body.generation_prompt
    _refuse_long(service, read)
    return reasoning_limit(
        service.tokenizer, tags, body.reasoning_budget, message=message, read=read, recurs=True
    )


def schema_of(body: GenerationBody) -> Any:
    """Return the JSON schema that a reply has to follow; None without one. Raises RequestError."""
    schema = body.json_schema
    form = body.response_format
    if form.type == "json_object" and (schema is None or form.schema is not None):
        schema = form.schema or {}
    elif form.type == "json_schema":
        wrapped = {} if form.json_schema is None else json_object(form.json_schema, "json_schema")
        if "schema" not in wrapped and wrapped.keys() - {"name", "description", "strict"}:
            raise RequestError("'json_schema' must hold the schema as its member 'schema'")
        schema = (
            wrapped.get("schema") or form.schema or {}
        )  # next to the type as in llama-server's README
    elif form.type not in ("", "text", "json_object"):
        kinds = '"text", "json_object" or "json_schema"'
        raise RequestError(f"response_format type must be one of {kinds}, not: {form.type}")
    return {"type": "object"} if schema == {} else schema


def _disk_policy(service: Service, body: GenerationBody) -> DiskPolicy:
    default = service.disk_policy
    return (
        default if body.prefix_cache is None else DiskPolicy.of_request(body.prefix_cache, default)
    )


def _continues(value: Any) -> Continue | None:
    if value is True:
        return "auto"
    return next((part for part in get_args(Continue) if part != "auto" and part == value), None)


def _reasoning_format(options: ReplyOptions, default: str) -> ReasoningFormat:
    value = default if options.reasoning_format is None else options.reasoning_format
    if value not in REASONING_FORMATS:
        raise RequestError(
            f"'reasoning_format' must be auto, deepseek, deepseek-legacy or none, not {value!r}"
        )
    return REASONING_FORMATS[value]


def _nth(request: Request, number: int) -> Request:
    """Return ``request`` for reply ``number`` to its prompt: a given seed counts up, as in
    llama-server.
    """
    seed = request.sampling.seed
    if not number:
        return request
    if seed != RANDOM_SEED:
        request = replace(
            request, sampling=replace(request.sampling, seed=(seed + number) & RANDOM_SEED)
        )
    return replace(request, seq=-1)


def _bound(sampling: Sampling, constraint: Constraint | None) -> Sampling:
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


def sampling_of(
    body: GenerationBody, defaults: Sampling, tokenizer: Tokenizer, n_vocab: int
) -> Sampling:
    """Return ``defaults`` with the changes of ``body``. Raises RequestError."""
    changes = dict(body.sampling)
    if "logit_bias" in changes:
        all_biases = _logit_bias(changes["logit_bias"], tokenizer, n_vocab)
        biases = changes["logit_bias"] = tuple(islice(all_biases, MAX_BIASES + 1))
        at_most(MAX_BIASES, len(biases), "logit_bias", "tokens")
    return replace(defaults, **changes)


def _logit_bias(value: Any, tokenizer: Tokenizer, n_vocab: int) -> Iterable[tuple[int, float]]:
    """Yield the biases of ``[[token or text, bias or false], ...]`` or ``{token or text: bias or
    false}``.

    A text stands for each of its tokens, false for never. Invalid entries are ignored.
    """
    pairs: Sequence[Any] = ()
    if isinstance(value, Mapping):
        pairs = [(_token_or_text(key), bias) for key, bias in value.items()]
    elif isinstance(value, list):
        pairs = [(pair[0], pair[1]) for pair in value if isinstance(pair, list) and len(pair) == 2]
    for token, bias in pairs:
        if bias is False:
            bias = -float("inf")
        elif isinstance(bias, bool) or not isinstance(bias, int | float):
            continue
        bias = number(bias, "logit_bias")
        if isinstance(token, str):
            at_most(CHARS_PER_TOKEN * MAX_BIASES, len(token), "logit_bias", "characters in a text")
            for part in tokenizer.tokenize(token, add_special=False, parse_special=False):
                yield part, bias
        elif isinstance(token, int) and not isinstance(token, bool) and 0 <= token < n_vocab:
            yield token, bias


def _token_or_text(key: str) -> int | str:
    """Return a number, as llama-server reads one: a number of too many digits is no token."""
    text = key.strip()
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not (digits.isascii() and digits.isdecimal()):
        return key
    return int(text) if len(digits) < 19 else -1


def keep_scales(info: EngineInfo, scales: Iterable[tuple[int, float]]) -> None:
    """Raise NotSupportedError if ``scales`` are not the model's. An adapter that they omit gets 0.

    None at all change nothing, as in llama-server.
    """
    asked = dict(scales)
    if asked and any(
        asked.get(number, 0.0) != scale for number, (_, scale) in enumerate(info.lora)
    ):
        scales_text = ", ".join(
            f"{number} has {scale:g}" for number, (_, scale) in enumerate(info.lora)
        )
        raise NotSupportedError(
            f"adapters keep their scales while the server runs ({scales_text}): 'lora' must list "
            "them so"
        )


# -- the prompt field in its many forms, and prompts that fill a gap
# ----------------------------------------------------------------------------------


def prompts_of(
    value: Any, service: Service, maximum: int, fetched: Fetched
) -> list[tuple[Prompt, str | None]]:
    """Return one prompt per text or sequence, with the text if it was one; a list that holds a
    token id is one sequence.

    Raises RequestError, also for more than ``maximum``, and FilesMissing.
    """
    if value is None:
        raise RequestError("'prompt' is missing")
    if isinstance(value, list) and not any(_is_token(item) for item in value):
        at_most(maximum, len(value), "prompt", "prompts with this 'n'")
        prompts = [_prompt(item, service, fetched) for item in value]
    else:
        prompts = [_prompt(value, service, fetched)]
    if not prompts:
        raise RequestError("'prompt' is empty")
    return prompts


def mixed(value: Any, name: str, n_vocab: int) -> list[str | int]:
    """Return a text, or a list of texts and token ids, as such a list. Raises RequestError for
    others.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError(f"'{name}' must be a string or a list of strings and token ids")
    for item in value:
        if not isinstance(item, str) and not (_is_token(item) and 0 <= item < n_vocab):
            raise RequestError(f"'{name}' must hold strings and token ids in [0, {n_vocab}) only")
    return value


def _prompt(value: Any, service: Service, fetched: Fetched) -> tuple[Prompt, str | None]:
    images: list[ImageFile] | None = None
    if isinstance(value, dict):
        if (data := value.get("multimodal_data")) is not None:
            images = data_images(data, _image_sources(service, fetched)) if data else []
        value = value.get("prompt_string")
    if isinstance(value, str):
        return service.chat.prompt_from_text(value, images), value
    if images:
        raise RequestError("'prompt_string' must be a string with 'multimodal_data'")
    return service.chat.prompt_from_mixed(mixed(value, "prompt", service.info.n_vocab)), None


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_NAMES = {"pre": "prefix", "suf": "suffix", "mid": "middle"}

_PROJECT = "myproject\n"
_FILE = "filename\n"

_SNIPPET = "\n\n--- snippet ---\n\n"


def infill_prompt(service: Service, body: InfillBody) -> list[int]:
    """Return the prompt's token ids. Raises NotSupportedError for a model without the tokens,
    RequestError for bad fields.

    Prefix and suffix are cut to the tokens next to the gap that fit into a batch, three parts to
    one; the extra context fills the rest. ``prompt`` is the beginning of the text that fills the
    gap: it comes last, as in llama-server's README.
    """
    special = service.tokenizer.fim_tokens()
    missing = "".join(
        f"{word} token is missing. " for name, word in _NAMES.items() if name not in special
    )
    if missing:
        raise NotSupportedError(f"Infill is not supported by this model: {missing}")
    middle = body.prompt
    if middle is not None and not isinstance(middle, str):
        raise RequestError('"prompt" must be a string')
    prompt = service.tokenizer.tokenize(middle or "", add_special=False, parse_special=True)
    prefix, suffix = (
        _part(service, getattr(body, name), name) for name in ("input_prefix", "input_suffix")
    )
    n_batch = service.settings.n_batch
    settings = service.settings
    prefix = _last(prefix, 3 * (n_batch // 4))
    suffix = suffix[: max(n_batch // 4 - 2 - len(prompt), 0)]
    before = [special["pre"], *prefix]
    after = [special["suf"], *suffix]
    if settings.spm_infill:
        before, after = after, before
    bos = [service.tokenizer.bos] if service.tokenizer.add_bos else []
    room = max(service.info.n_ctx - n_batch - 2 * settings.n_predict, 0)
    return [
        *_last(_extra(service, body.input_extra, special), room),
        *bos,
        *before,
        *after,
        special["mid"],
        *prompt,
    ]


def _with_suffix(service: Service, body: CompletionBody) -> list[int]:
    """Return the prompt of a completion before ``suffix``. Raises as `infill_prompt` does."""
    if not isinstance(body.prompt, str):
        raise RequestError("'prompt' must be one text with 'suffix'")
    if body.options.echo:
        raise NotSupportedError("'echo' is not supported with 'suffix'")
    return infill_prompt(service, InfillBody(input_prefix=body.prompt, input_suffix=body.suffix))


def _part(service: Service, value: Any, name: str) -> list[int]:
    if value is None:
        raise RequestError(f'"{name}" is required')
    tokens: list[int] = []
    for item in mixed(value, name, service.info.n_vocab):
        tokens += _plain(service, item) if isinstance(item, str) else [item]
    return tokens


def _extra(service: Service, value: Any, special: dict[str, int]) -> list[int]:
    """Return the context from other files, ``input_extra``."""
    tokens = [special["rep"], *_plain(service, _PROJECT)] if "rep" in special else []
    for chunk in _chunks(value):
        if "sep" in special:
            tokens += [special["sep"], *_plain(service, chunk.filename + "\n")]
        else:
            tokens += _plain(service, _SNIPPET)
        tokens += _plain(service, chunk.text)
    return [*tokens, special["sep"], *_plain(service, _FILE)] if "sep" in special else tokens


class _Chunk(Body, frozen=True):
    text: str = ""
    filename: str = "tmp"


def _chunks(value: Any) -> list[_Chunk]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(chunk, dict) for chunk in value):
        raise RequestError('"input_extra" must be an array of {"filename": string, "text": string}')
    if not all(isinstance(chunk.get("text"), str) for chunk in value):
        raise RequestError('extra_context chunk must contain a "text" field with a string value')
    return [_Chunk.of(chunk) for chunk in value]


def _plain(service: Service, text: str) -> list[int]:
    return service.tokenizer.tokenize(text, add_special=False, parse_special=False)


def _last(tokens: Sequence[int], n: int) -> list[int]:
    return list(tokens[max(len(tokens) - n, 0) :])

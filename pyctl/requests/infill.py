"""Prompts that fill the gap between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pyctl.chat.tokenizer import Tokenizer
from pyctl.errors import NotSupportedError, RequestError
from pyctl.requests.body import CompletionBody, InfillBody
from pyctl.requests.body_reader import Body, mixed
from pyctl.requests.reply_settings import ReplySettings

__all__ = ["InfillModel", "infill_prompt", "suffix_prompt"]

_TOKEN_NAMES = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
"""The tokens that a model needs, as llama.cpp and its errors name them."""

# The texts around the extra context, as in llama-server's format of it.
_PROJECT = "myproject\n"
_FILE = "filename\n"
_SNIPPET = "\n\n--- snippet ---\n\n"


class InfillModel(NamedTuple):
    """The parts of a service that make the prompt of a gap.

    Attributes:
        tokenizer: The model's tokenizer.
        n_vocab: The tokens of its vocabulary.
        n_ctx: The limit of prompt and reply.
        settings: The sizes of the parts, and their order.
    """

    tokenizer: Tokenizer
    n_vocab: int
    n_ctx: int
    settings: ReplySettings


def infill_prompt(model: InfillModel, body: InfillBody) -> list[int]:
    """Return the prompt's token ids. Raises NotSupportedError for a model without the tokens,
    RequestError for bad fields.

    Prefix and suffix are cut to the tokens next to the gap that fit into a batch, three parts to
    one; the extra context fills the rest. ``prompt`` is the beginning of the text that fills the
    gap: it comes last, as in llama-server's README. The shares are as in
    llama-server's format_prompt_infill.
    """
    settings = model.settings
    tokenizer = model.tokenizer
    special = _fim_tokens(tokenizer)
    middle = body.prompt
    if middle is not None and not isinstance(middle, str):
        raise RequestError('"prompt" must be a string')
    prompt = tokenizer.tokenize(middle or "", add_special=False, parse_special=True)
    prefix = _part(model, body.input_prefix, "input_prefix")
    suffix = _part(model, body.input_suffix, "input_suffix")

    n_batch = settings.n_batch
    prefix = _last(prefix, 3 * (n_batch // 4))
    n_suffix = n_batch // 4 - 2 - len(prompt)
    suffix = suffix[: max(n_suffix, 0)]
    n_extra = max(model.n_ctx - n_batch - 2 * settings.n_predict, 0)
    extra = _last(_extra(tokenizer, body.input_extra, special), n_extra)

    bos = [tokenizer.bos] if tokenizer.add_bos else []
    before = [special["pre"], *prefix]
    after = [special["suf"], *suffix]
    around = after + before if settings.spm_infill else before + after
    return [*extra, *bos, *around, special["mid"], *prompt]


def suffix_prompt(model: InfillModel, body: CompletionBody) -> list[int]:
    """Return the prompt of a completion before ``suffix``.

    Raises RequestError or NotSupportedError, as `infill_prompt` does.
    """
    if not isinstance(body.prompt, str):
        raise RequestError("'prompt' must be one text with 'suffix'")
    if body.options.echo:
        raise NotSupportedError("'echo' is not supported with 'suffix'")
    return infill_prompt(model, InfillBody(input_prefix=body.prompt, input_suffix=body.suffix))


def _fim_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the model's tokens around a gap, by llama.cpp's names. Raises NotSupportedError."""
    special = tokenizer.fim_tokens()
    missing = [word for name, word in _TOKEN_NAMES.items() if name not in special]
    if missing:
        words = "".join(f"{word} token is missing. " for word in missing)
        raise NotSupportedError(f"Infill is not supported by this model: {words}")
    return special


def _part(model: InfillModel, value: Any, name: str) -> list[int]:
    """Return the tokens of the text before or after the gap."""
    if value is None:
        raise RequestError(f'"{name}" is required')
    tokens: list[int] = []
    for item in mixed(value, name, model.n_vocab):
        tokens += _plain(model.tokenizer, item) if isinstance(item, str) else [item]
    return tokens


def _extra(tokenizer: Tokenizer, value: Any, special: dict[str, int]) -> list[int]:
    """Return the context from other files, ``input_extra``.

    A model with a token between files gets their names; another gets snippets without.
    """
    tokens: list[int] = []
    if "rep" in special:
        tokens.append(special["rep"])
        tokens += _plain(tokenizer, _PROJECT)
    separator = special.get("sep")
    for chunk in _chunks(value):
        if separator is not None:
            tokens.append(separator)
            tokens += _plain(tokenizer, chunk.filename + "\n")
        else:
            tokens += _plain(tokenizer, _SNIPPET)
        tokens += _plain(tokenizer, chunk.text)
    if separator is not None:
        tokens.append(separator)
        tokens += _plain(tokenizer, _FILE)
    return tokens


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
    return [_Chunk.from_json(chunk) for chunk in value]


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.tokenize(text, add_special=False, parse_special=False)


def _last(tokens: Sequence[int], n: int) -> list[int]:
    return list(tokens[max(len(tokens) - n, 0) :])

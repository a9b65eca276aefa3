"""POST /infill: the prompt that asks for the text between a prefix and a suffix.

The form is that of code models with repository context (arXiv 2409.12186):
REP project, SEP file and text of each extra chunk, SEP file, PRE prefix SUF suffix MID.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyctl.errors import NotSupportedError, RequestError
from pyctl.server.fields import Fields
from pyctl.server.prompts import mixed
from pyctl.server.settings import Service

__all__ = ["infill_prompt"]

_NAMES = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
_PROJECT, _FILE = "myproject\n", "filename\n"
_SNIPPET = "\n\n--- snippet ---\n\n"


def infill_prompt(service: Service, fields: Fields) -> list[int]:
    """The prompt's token ids. NotSupportedError for a model without the tokens, RequestError for bad fields.

    Of prefix and suffix so much is taken, next to the gap, as fits into a batch, three parts to one; the extra context
    fills the rest.
    """
    special = service.tokenizer.fim_tokens()
    missing = "".join(f"{word} token is missing. " for name, word in _NAMES.items() if name not in special)
    if missing:
        raise NotSupportedError(f"Infill is not supported by this model: {missing}")
    middle = fields.get("prompt")
    if middle is not None and not isinstance(middle, str):
        raise RequestError('"prompt" must be a string')
    prompt = service.tokenizer.tokenize(middle or "", add_special=False, parse_special=True)
    prefix, suffix = (_part(service, fields, name) for name in ("input_prefix", "input_suffix"))
    n_batch, settings = service.settings.n_batch, service.settings
    prefix = _last(prefix, 3 * (n_batch // 4))
    suffix = suffix[: max(n_batch // 4 - 2 - len(prompt), 0)]
    before, after = [special["pre"], *prefix, *prompt], [special["suf"], *suffix]
    if settings.spm_infill:
        before, after = after, before
    bos = [service.tokenizer.bos] if service.tokenizer.add_bos else []
    room = max(service.info.n_ctx - n_batch - 2 * settings.n_predict, 0)
    return [*_last(_extra(service, fields, special), room), *bos, *before, *after, special["mid"]]


def _part(service: Service, fields: Fields, name: str) -> list[int]:
    if name not in fields:
        raise RequestError(f'"{name}" is required')
    tokens: list[int] = []
    for item in mixed(fields.get(name), name, service.info.n_vocab):
        tokens += _plain(service, item) if isinstance(item, str) else [item]
    return tokens


def _extra(service: Service, fields: Fields, special: dict[str, int]) -> list[int]:
    """The context from elsewhere, ``input_extra``."""
    tokens = [special["rep"], *_plain(service, _PROJECT)] if "rep" in special else []
    for chunk in _chunks(fields.get("input_extra")):
        if "sep" in special:
            tokens += [special["sep"], *_plain(service, chunk.string("filename", "tmp") + "\n")]
        else:
            tokens += _plain(service, _SNIPPET)
        tokens += _plain(service, chunk.string("text", ""))
    return [*tokens, special["sep"], *_plain(service, _FILE)] if "sep" in special else tokens


def _chunks(value: Any) -> list[Fields]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(chunk, dict) for chunk in value):
        raise RequestError('"input_extra" must be an array of {"filename": string, "text": string}')
    if not all(isinstance(chunk.get("text"), str) for chunk in value):
        raise RequestError('extra_context chunk must contain a "text" field with a string value')
    return [Fields(chunk) for chunk in value]


def _plain(service: Service, text: str) -> list[int]:
    return service.tokenizer.tokenize(text, add_special=False, parse_special=False)


def _last(tokens: Sequence[int], n: int) -> list[int]:
    return list(tokens[max(len(tokens) - n, 0) :])

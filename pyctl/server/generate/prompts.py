"""The prompt field in its many forms, and prompts that fill a gap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyctl.errors import NotSupportedError, RequestError
from pyctl.image_file import ImageFile
from pyctl.prompt import Prompt
from pyctl.server.body import Body, at_most
from pyctl.server.generate.image_sources import Fetched, data_images
from pyctl.server.generation_body import InfillBody
from pyctl.server.service import Service

__all__ = ["infill_prompt", "mixed", "prompts_of"]


def prompts_of(value: Any, service: Service, most: int, fetched: Fetched) -> list[tuple[Prompt, str | None]]:
    """One prompt per text or sequence, with the text if it was one; a list that holds a token id is one sequence.

    Raises RequestError, also for more than ``most``, and ImagesMissing.
    """
    if value is None:
        raise RequestError("'prompt' is missing")
    if isinstance(value, list) and not any(_is_token(item) for item in value):
        at_most(most, len(value), "prompt", "prompts with this 'n'")
        prompts = [_prompt(item, service, fetched) for item in value]
    else:
        prompts = [_prompt(value, service, fetched)]
    if not prompts:
        raise RequestError("'prompt' is empty")
    return prompts


def mixed(value: Any, name: str, n_vocab: int) -> list[str | int]:
    """A text, or a list of texts and token ids, as such a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError(f"'{name}' must be a string or a list of strings and token ids")
    for item in value:
        if not isinstance(item, str) and not (_is_token(item) and 0 <= item < n_vocab):
            raise RequestError(f"'{name}' must hold strings and token ids in [0, {n_vocab}) only")
    return value


def _prompt(value: Any, service: Service, fetched: Fetched) -> tuple[Prompt, str | None]:
    images: list[ImageFile] = []
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            images = data_images(value["multimodal_data"], service, fetched)
        value = value.get("prompt_string")
    if isinstance(value, str):
        return service.chat.prompt_from_text(value, images), value
    if images:
        raise RequestError("'prompt_string' must be a string beside 'multimodal_data'")
    return service.chat.prompt_from_mixed(mixed(value, "prompt", service.info.n_vocab)), None


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_NAMES = {"pre": "prefix", "suf": "suffix", "mid": "middle"}

_PROJECT, _FILE = "myproject\n", "filename\n"

_SNIPPET = "\n\n--- snippet ---\n\n"


def infill_prompt(service: Service, body: InfillBody) -> list[int]:
    """The prompt's token ids. NotSupportedError for a model without the tokens, RequestError for bad fields.

    Of prefix and suffix so much is taken, next to the gap, as fits into a batch, three parts to one; the extra context
    fills the rest.
    """
    special = service.tokenizer.fim_tokens()
    missing = "".join(f"{word} token is missing. " for name, word in _NAMES.items() if name not in special)
    if missing:
        raise NotSupportedError(f"Infill is not supported by this model: {missing}")
    middle = body.prompt
    if middle is not None and not isinstance(middle, str):
        raise RequestError('"prompt" must be a string')
    prompt = service.tokenizer.tokenize(middle or "", add_special=False, parse_special=True)
    prefix, suffix = (_part(service, getattr(body, name), name) for name in ("input_prefix", "input_suffix"))
    n_batch, settings = service.settings.n_batch, service.settings
    prefix = _last(prefix, 3 * (n_batch // 4))
    suffix = suffix[: max(n_batch // 4 - 2 - len(prompt), 0)]
    before, after = [special["pre"], *prefix, *prompt], [special["suf"], *suffix]
    if settings.spm_infill:
        before, after = after, before
    bos = [service.tokenizer.bos] if service.tokenizer.add_bos else []
    room = max(service.info.n_ctx - n_batch - 2 * settings.n_predict, 0)
    return [*_last(_extra(service, body.input_extra, special), room), *bos, *before, *after, special["mid"]]


def _part(service: Service, value: Any, name: str) -> list[int]:
    if value is None:
        raise RequestError(f'"{name}" is required')
    tokens: list[int] = []
    for item in mixed(value, name, service.info.n_vocab):
        tokens += _plain(service, item) if isinstance(item, str) else [item]
    return tokens


def _extra(service: Service, value: Any, special: dict[str, int]) -> list[int]:
    """The context from elsewhere, ``input_extra``."""
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

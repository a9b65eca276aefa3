"""GGUF files of draft models: their type, and their compatibility with a model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pyctl.errors import ModelError
from pyctl.llama.library import extension
from pyctl.llama.library.bindings import api
from pyctl.llama.library.devices import (
    FileHead,
    check_gguf,
    count_heads,
    file_head,
    model_files,
    tensor_bytes,
)
from pyctl.llama.settings.draft_settings import (
    BLOCK_TYPES,
    FEATURE_TYPES,
    MODEL_TYPES,
    DraftSettings,
)

__all__ = [
    "BlockShape",
    "DraftFile",
    "block_shape",
    "check_draft",
    "vocabulary_difference",
    "with_inferred_type",
]

log = logging.getLogger(__name__)


def model_type(path: Path) -> str:
    """Return the type of the draft model in the file ``path``, by its architecture and tensors.
    Raises ModelError.
    """
    head = file_head(model_files(path)[0])
    if head.arch == "eagle3":
        return "draft-eagle3"
    if head.arch == "dflash":
        return "draft-dspark" if head.has("markov_w1.weight") else "draft-dflash"
    return "draft-mtp" if count_heads(tensor_bytes(path)) > 0 else "draft-simple"


@dataclass(frozen=True)
class BlockShape:
    """The form of the drafts of a DFlash or DSpark file.

    Attributes:
        type: The draft type of the file.
        maximum: The maximum number of tokens that are drafted at once.
        is_anchored: Whether the place of the known token also has a draft.
        top_k: The number of candidates of each place that a draft is chosen from, 0 for all tokens.
        is_causal: Whether a place depends only on earlier places.
        is_sure: Whether the file has the probabilities that it needs, or needs none.
    """

    type: str
    maximum: int
    is_anchored: bool
    top_k: int
    is_causal: bool
    is_sure: bool


def block_shape(path: Path) -> BlockShape:
    """Return the shape of the DFlash or DSpark file ``path``. Raises ModelError."""
    head = file_head(model_files(path)[0])
    type = model_type(path)
    is_spark = type == "draft-dspark"
    if is_spark and "block_size" not in head.numbers:  # llama.cpp would end the process
        raise ModelError(f"{path} does not state the size of its block")

    def number(key: str, default: int) -> int:
        return head.numbers.get(key, (default,))[0]

    is_anchored = is_spark and bool(number("sample_from_anchor", 1))
    maximum = max(number("block_size", 16) - (not is_anchored), 0)
    is_sure = not is_spark or head.has("conf_proj.weight")
    is_causal = bool(number("attention.causal", 0))
    return BlockShape(type, maximum, is_anchored, number("selector_top_k", 0), is_causal, is_sure)


class DraftFile(NamedTuple):
    """The model that drafts: a separate one, or the target itself if that has a head.

    Attributes:
        path: Its file.
        head: The metadata of its first file.
        model: The llama_model, with or without weights.
    """

    path: str
    head: FileHead
    model: Any


def check_draft(drafts: DraftSettings, file: DraftFile, target: Any) -> tuple[int, ...]:
    """Return the layers of the llama_model ``target`` whose inputs ``file`` reads, none if it
    drafts without them.

    Raises ModelError unless it can draft for ``target`` in the way of ``drafts``.
    """
    if drafts.has("draft-mtp"):
        _check_head(file, target)
    return _target_layers(file, target) if drafts.has(*FEATURE_TYPES) else ()


def _check_head(file: DraftFile, target: Any) -> None:
    """Raise ModelError unless ``file`` has a draft head for the llama_model ``target``."""
    if api.llama_model_n_layer_nextn(file.model) != 1:
        raise ModelError(
            f"{file.path} has no head for --spec-type draft-mtp: it needs one nextn block. "
            "Leave the flag out, or use a file with the head: most have MTP in their name or "
            "their repository's"
        )
    own = int(api.llama_model_n_embd(file.model))
    width = int(api.llama_model_n_embd(target))
    if own != width:
        raise ModelError(f"{file.path} has no head for this model: it is {own} wide, not {width}")


def _target_layers(file: DraftFile, target: Any) -> tuple[int, ...]:
    """Return the layers of the llama_model ``target`` whose inputs ``file`` reads; -1: the output
    of the last.

    Raises ModelError if the target has no such layers, or another width or vocabulary.
    """
    head = file.head
    path = file.path
    n_layers = int(api.llama_model_n_layer(target))
    layers = head.numbers.get("target_layers", ())
    width = int(api.llama_model_n_embd(target))
    if not layers or not all(0 <= layer <= n_layers for layer in layers):
        raise ModelError(
            f"{path} reads layers {', '.join(map(str, layers[:9]))}, and this model has {n_layers}"
        )
    own = head.numbers.get("embedding_length", (0,))[0]
    widths = [head.numbers.get("target_hidden_size", (own,))[0]]
    if not (head.has("token_embd.weight") and head.has("output.weight")):  # it takes the target's
        widths.append(own)
    if others := [other_width for other_width in widths if other_width != width]:
        raise ModelError(f"{path} drafts for another model: it is {others[0]} wide, not {width}")
    if head.n_vocab != (
        n_tokens := int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(target)))
    ):
        raise ModelError(
            f"{path} drafts for another model: it has {head.n_vocab} tokens, not {n_tokens}"
        )
    return tuple(layer if layer < n_layers else -1 for layer in layers)


def with_inferred_type(drafts: DraftSettings) -> DraftSettings:
    """Return ``drafts`` with the type of its file if it names none, and at most one draft model
    type, unless automatic.

    As in llama-server, all types but ``draft-mtp`` require a file, and drafts are no longer than a
    file's block. Raises ModelError if the file cannot be read or is of another type.
    """
    types = drafts.ordered_types
    path = drafts.draft_path
    if extension.core is None or (extension.drafts is None and (drafts.reads_rows or not path)):
        return _without_model(drafts)
    if drafts.is_automatic:
        return drafts
    if path:
        check_gguf(Path(path), "draft model")
    draft_type = model_type(Path(path)) if path else "draft-mtp"
    if extension.drafts is None and draft_type != "draft-simple":
        return _without_model(drafts)
    by_model = [name for name in MODEL_TYPES if name in types]
    if path and not by_model and (not types or draft_type in FEATURE_TYPES):
        types = (*types, draft_type)
        by_model = [draft_type]
        log.info("draft model %s: --spec-type %s", path, draft_type)
    elif (
        path
        and by_model
        and draft_type not in by_model
        and {draft_type, *by_model} & {*FEATURE_TYPES}
    ):
        raise ModelError(
            f"{path} is a file for --spec-type {draft_type}, not for {', '.join(by_model)}"
        )
    for name in by_model:
        if not path and name != draft_type:
            log.error("--spec-type %s disabled: it requires --model-draft", name)
        elif len(by_model) > 1 and name != draft_type:
            log.warning("--spec-type %s disabled: only one draft model runs at a time", name)
        else:
            continue
        types = tuple(each for each in types if each != name)
    if (
        draft_type in BLOCK_TYPES
        and draft_type in types
        and drafts.n_draft > (maximum := block_shape(Path(path)).maximum)
    ):
        log.warning(
            "%s drafts at most %d tokens at a time, not %d (--spec-draft-n-max)",
            path,
            maximum,
            drafts.n_draft,
        )
        drafts = replace(drafts, n_draft=maximum, n_draft_min=min(drafts.n_draft_min, maximum))
    return replace(drafts, draft_types=types)


def _without_model(drafts: DraftSettings) -> DraftSettings:
    if drafts.draft_path or drafts.has(*MODEL_TYPES):
        log.error("draft model disabled: it requires the extension")
    types = (
        ()
        if drafts.is_automatic
        else tuple(name for name in drafts.ordered_types if name not in MODEL_TYPES)
    )
    return replace(drafts, draft_types=types, draft_path="")


N_UNCOMPARED = 5
"""First tokens, mostly control tokens, whose texts may differ, as in llama-server."""

MAX_MORE_TOKENS = 128
"""Largest difference of the vocabulary sizes."""


def vocabulary_difference(model: Any, draft: Any) -> str:
    """Return how the vocabulary of the llama_model ``draft`` differs from ``model``'s; empty if it
    does not.
    """
    first = api.llama_model_get_vocab(model)
    second = api.llama_model_get_vocab(draft)
    if api.llama_vocab_type(first) != api.llama_vocab_type(second):
        return "its vocabulary is of another type"
    for name in ("bos", "eos"):
        adds = getattr(api, f"llama_vocab_get_add_{name}")
        token = getattr(api, f"llama_vocab_{name}")
        if adds(first) != adds(second) or (adds(first) and token(first) != token(second)):
            return f"it has another {name.upper()} token"
    sizes = [int(api.llama_vocab_n_tokens(vocab)) for vocab in (first, second)]
    if max(sizes) - min(sizes) > MAX_MORE_TOKENS:
        return f"it has {sizes[1]} tokens, not {sizes[0]}"
    for token in range(N_UNCOMPARED, min(sizes)):
        texts = [api.llama_vocab_get_text(vocab, token) for vocab in (first, second)]
        if texts[0] != texts[1]:
            own, other = (text.decode("utf-8", "replace") for text in texts)
            return f"its token {token} is {other!r}, not {own!r}"
    return ""

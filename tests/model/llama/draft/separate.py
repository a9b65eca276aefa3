"""A separate draft model without its trunk, and a check of its drafts by a backend on its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llama_cpp import llama_cpp as api

from pyctl.cache.snapshot import Block
from pyctl.engine.backend import SequenceTokens
from pyctl.llama.draft.separate_model import SeparateModel
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.params import ModelParams, context_params
from pyctl.llama.settings.resolved import Resolved
from pyctl.prompt import as_tokens

N = 3
"""Tokens of a draft."""

N_VOCAB = 282

SHAPES = ["tiny-draft", "tiny-hybrid-draft"]

TIE = 0.05
"""Logits that are this close may come out in another order by batches of another width."""


def tokens_of(text: str) -> list[int]:
    return [69 + ord(char) - ord("a") if char.isalpha() else 188 for char in text.lower()]


PROMPT = tokens_of("once upon a time there was a sea and on the sea there was a ship") * 3


class PlainModel:
    """The same file on a backend: what it says after any tokens, evaluated from the start."""

    def __init__(self, backend: LlamaBackend) -> None:
        self._backend = backend

    def check(self, tokens: Sequence[int], draft: Sequence[int], n: int = N) -> None:
        """Fail unless ``draft`` is what follows ``tokens``, greedily, except where two tokens are
        equally likely.
        """
        backend = self._backend
        backend.memory.clear(0)
        for first in range(0, len(tokens), 64):
            backend.evaluate(0, as_tokens(tokens[first : first + 64]), first)
        position = len(tokens)
        assert len(draft) == n
        for token in draft:
            logits = backend.logits(0)
            assert logits[token] > logits.max() - TIE
            backend.evaluate(0, as_tokens([token]), position)
            position += 1


def open_draft(
    path: Path, n_seqs: int = 1, n_ctx: int = 1024, n_vocab: int = N_VOCAB, **more: object
) -> SeparateModel:
    """Return the draft model of a file, beside a trunk of ``n_vocab`` tokens."""
    settings = ModelSettings(path=str(path), n_seqs=n_seqs, n_threads=1, n_ubatch=64, n_batch=64)
    params = ModelParams(settings)
    model = api.llama_model_load_from_file(str(path).encode(), params.struct)
    given = context_params(Resolved.from_settings(settings), n_ctx)
    return SeparateModel(model, api.llama_init_from_model(model, given), n_vocab, **more)


def feed(
    model: SeparateModel, tokens: Sequence[int], seq: int = 0, start: int = 0, width: int = 50
) -> None:
    for first in range(start, len(tokens), width):
        model.follow(seq, tokens[first : first + width], first, None)


def guess(model: SeparateModel, tokens: Sequence[int], *sure: int, seq: int = 0) -> tuple[int, ...]:
    """Return the draft behind ``tokens``, which are followed already, and ``sure`` ones."""
    return model.draft([SequenceTokens(seq, sure, len(tokens), len(sure))], N)[0]


def saved(model: SeparateModel, n: int, seq: int = 0, first: int = 0) -> tuple[Block, Block]:
    rows = model.save_rows(seq, first, n)
    state = model.save_state(seq, n)
    model.synchronize()
    assert rows.size == model.rows_size(first, n)
    assert state.size == model.state_size(seq)
    return rows, state

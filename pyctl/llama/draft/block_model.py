"""Drafts from a DFlash or DSpark draft model: a block of tokens in one evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api
from llama_cpp import llama_cpp_ext as ext
from numpy.typing import NDArray

from pyctl.cache import NOTHING, Block
from pyctl.engine.backend import SequenceTokens
from pyctl.errors import ModelError
from pyctl.llama.batch import RowBatch
from pyctl.llama.draft.draft_file import BlockShape
from pyctl.llama.draft.greedy import Greedy
from pyctl.llama.draft.head_rows import HeadRows

__all__ = ["BlockModel"]


class BlockModel(HeadRows):
    """Drafts ``n_max`` tokens at a time on ``ctx`` of a DFlash or DSpark model, from the inputs of ``layers``.

    Row p is computed from the trunk's rows at p alone, so nothing but rows is saved. A draft is one evaluation of the
    last token and of masks after it, whose rows are dropped. It ends before a token below probability ``p_min``.
    Otherwise as `HeadRows`. Raises ModelError for a model that cannot draft.
    """

    def __init__(
        self, ctx: Any, n_max: int, layers: tuple[int, ...], shape: BlockShape, *, p_min: float = 0.0, **options: Any
    ) -> None:
        self.type, self.layers, self._shape, self._p_min = shape.type, layers, shape, p_min
        model = api.llama_get_model(ctx)
        self._n_embd, vocabulary = int(api.llama_model_n_embd(model)), api.llama_model_get_vocab(model)
        super().__init__(ctx, len(layers) * self._n_embd, n_max + 1, **options)
        self._first = 0 if shape.is_anchored else 1  # the first place of the block that drafts
        self._n_block = n_max + self._first
        self._mask = int(api.llama_vocab_mask(vocabulary))
        if p_min > 0 and not shape.is_sure:
            raise ModelError("the draft model does not say how sure it is: it needs --spec-draft-p-min 0")
        if self._mask < 0:
            raise ModelError("the draft model names no mask token")
        if self._n_block > self._n_batch:
            raise ModelError(f"--ubatch-size {self._n_batch} is below a block of drafts, {self._n_block} tokens")
        self._batch = RowBatch(self._n_batch, self._width)
        # DSpark says how sure it is, and DFlash of the second kind gives candidates, in place of hidden rows.
        self._reads_states = shape.top_k > 0 or (self.type == "draft-dspark" and p_min > 0)
        self._greedy = Greedy(ctx, int(api.llama_vocab_n_tokens(vocabulary)), 0.0 if self._reads_states else p_min)
        ext.llama_set_embeddings_nextn(ctx, self._reads_states, False)
        api.llama_set_causal_attn(ctx, shape.is_causal)
        if self._evaluate(0, 0, [0], self._none) != 0:
            raise ModelError("cannot evaluate the draft model")
        self._open_memory()
        if not shape.top_k:
            self._greedy.sample_on_device()

    def _evaluate(self, seq: int, start: int, tokens: Sequence[int], hidden: NDArray[np.float32]) -> int:
        self._batch.fill_text(seq, hidden[1:], start)
        return int(api.llama_decode(self._ctx, self._batch.struct))

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        drafts: list[tuple[int, ...]] = []
        n_together = max(self._n_batch // self._n_block, 1)
        for first in range(0, len(items), n_together):
            drafts += self._draft(items[first : first + n_together])
        return [draft[:n] for draft in drafts]

    def _draft(self, items: Sequence[SequenceTokens]) -> list[tuple[int, ...]]:
        """Return drafts after those of ``items`` that have one token, since rows of the tokens before the last are
        needed."""
        self._settle()
        places: dict[int, int] = {}
        n_tokens = 0
        for item in items:
            at = self._seqs[item.seq]
            if at.end > item.position:
                self.keep(item.seq, item.position)
            elif at.end < item.position:
                self._lose(item.seq, item.position)
            self._pay(item.seq)
            if len(item.tokens) == 1:
                places[item.seq] = n_tokens
                block = [item.tokens[0], *[self._mask] * (self._n_block - 1)]
                n_tokens = self._greedy.put(n_tokens, item.seq, block, item.position, every=not self._shape.top_k)
        code = self._greedy.decode(n_tokens) if n_tokens else 0
        self._note(code)
        states = None
        if self._reads_states and n_tokens and code == 0:
            states = np.ctypeslib.as_array(ext.llama_get_embeddings_nextn(self._ctx), (n_tokens, self._n_embd))
        drafts = []
        for item in items:
            place = places.get(item.seq)
            drafts.append(self._read(place, states) if place is not None and code == 0 else ())
            api.llama_memory_seq_rm(self._cells, item.seq, item.position, -1)
        return drafts

    def _read(self, place: int, states: NDArray[np.float32] | None) -> tuple[int, ...]:
        """Return the draft of the block at ``place`` of the batch; ``states`` are what it gives as hidden rows."""
        draft: list[int] = []
        k, candidate = self._shape.top_k, 0
        for i in range(place + self._first, place + self._n_block):
            if states is None:
                token = self._greedy.choose(i)
            elif not k:
                token = self._greedy.choose(i) if states[i, 0] >= self._p_min else -1
            else:  # k tokens, then by candidate of the place before the scores of these
                scores = states[i, k * (candidate + 1) : k * (candidate + 2)]
                candidate = int(scores.argmax())
                is_likely = not self._p_min or 1 / np.exp(scores - scores[candidate]).sum() >= self._p_min
                token = int(states[i, candidate]) if is_likely else -1
            if token < 0:
                break
            draft.append(token)
        return tuple(draft)

    # -- no state ----------------------------------------------------------------------------------------------------

    def state_size(self, seq: int) -> int:
        return 0

    def save_state(self, seq: int, n: int, out: Block | None = None) -> Block:
        return NOTHING

    def close(self) -> None:
        self._greedy.close()
        super().close()

"""Drafts from a DFlash or DSpark draft model: a block of tokens in one evaluation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.snapshot import NOTHING, Block
from pyctl.engine.backend import SequenceTokens
from pyctl.errors import ModelError
from pyctl.llama.draft.draft_file import BlockShape
from pyctl.llama.draft.draft_model import SIGNATURE_BYTES, BlockSpan
from pyctl.llama.draft.greedy import Greedy
from pyctl.llama.draft.head_rows import HeadRows
from pyctl.llama.library.batch import RowBatch
from pyctl.llama.library.bindings import api, ext
from pyctl.llama.library.pinned_memory import allocate

__all__ = ["BlockModel"]

N_SIZE = 8
"""Bytes of the size after a state, which is shorter at the start of a text."""

log = logging.getLogger(__name__)


class BlockModel(HeadRows):
    """A draft model that drafts ``n_max`` tokens at a time on ``ctx`` of a DFlash or DSpark model,
    from the inputs of ``layers``.

    Row p is computed only from the trunk's rows at p, so only rows are saved; windowed layers' as a
    state. A draft is one evaluation of the last token and of masks after it, whose rows are
    dropped. It ends before a token below probability ``p_min``. Otherwise as `HeadRows`. Raises
    ModelError for a model that cannot draft.
    """

    def __init__(
        self,
        ctx: Any,
        n_max: int,
        layers: tuple[int, ...],
        shape: BlockShape,
        *,
        p_min: float = 0.0,
        **options: Any,
    ) -> None:
        """Evaluate one token to check the model. Raises ModelError if it cannot draft."""
        self.type = shape.type
        self.layers = layers
        self._shape = shape
        self._p_min = p_min
        model = api.llama_get_model(ctx)
        vocabulary = api.llama_model_get_vocab(model)
        self._n_embd = int(api.llama_model_n_embd(model))
        super().__init__(ctx, len(layers) * self._n_embd, n_max + 1, **options)
        self._first = 0 if shape.is_anchored else 1  # the first place of the block that drafts
        self._n_block = n_max + self._first
        self._mask = int(api.llama_vocab_mask(vocabulary))
        if p_min > 0 and not shape.is_sure:
            raise ModelError("the draft model has no probabilities: it needs --spec-draft-p-min 0")
        if self._mask < 0:
            raise ModelError("the draft model names no mask token")
        if self._n_block > self._n_batch:
            raise ModelError(
                f"--ubatch-size {self._n_batch} is below a block of drafts, {self._n_block} tokens"
            )
        self._batch = RowBatch(self._n_batch, self._width)
        # DSpark gives probabilities, and DFlash of the second kind gives candidates, in place of
        # hidden rows.
        self._reads_states = shape.top_k > 0 or (self.type == "draft-dspark" and p_min > 0)
        self.greedy = Greedy(
            ctx, int(api.llama_vocab_n_tokens(vocabulary)), 0.0 if self._reads_states else p_min
        )
        ext.llama_set_embeddings_nextn(ctx, self._reads_states, False)
        api.llama_set_causal_attn(ctx, shape.is_causal)
        self._cuts: dict[int, int] = {}
        self._unread: dict[int, tuple[int, list[BlockSpan]]] = {}
        self._n_state = 0
        if self._evaluate(0, 0, [0], self._none) != 0:
            raise ModelError("cannot evaluate the draft model")
        self._open_memory(defers=True)  # cut rows stay until something else is evaluated
        self._slides = self._memory.kind == "hybrid"
        if self._slides:
            self._n_state = self._state_bytes()
        if not shape.top_k:
            self.greedy.sample_on_device()

    def _state_bytes(self) -> int:
        """Return the bytes of the largest state: rows that layers with windows see, and at the end
        their true size.
        """
        sizes = []
        for n in (1, 2):
            self._evaluate(0, n - 1, [0], self._none)
            sizes.append(int(self._memory.state_size(0)))
        self.clear(0)
        return (
            SIGNATURE_BYTES
            + sizes[0]
            + (sizes[1] - sizes[0]) * int(self._memory.window[0])
            + N_SIZE
        )

    def _evaluate(
        self, seq: int, start: int, tokens: Sequence[int], hidden: NDArray[np.float32]
    ) -> int:
        self._finish_cuts()
        self._batch.fill_text(seq, hidden[1:], start)
        return int(api.llama_decode(self._ctx, self._batch.struct))

    def _draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        """Return drafts after the ``items`` that have one token, since rows of the tokens before
        the last are needed.
        """
        self._finish_copies()
        places: dict[int, int] = {}
        n_tokens = 0
        for item in items:
            self._seek(item.seq, item.position)
            self._evaluate_pending(item.seq)
            if len(item.tokens) == 1:
                places[item.seq] = n_tokens
                block = [item.tokens[0], *[self._mask] * (self._n_block - 1)]
                n_outputs = 1 if self._shape.top_k else len(block)
                n_tokens = self.greedy.put(
                    n_tokens, item.seq, block, item.position, n_outputs=n_outputs
                )
        self._finish_cuts()
        code = self.greedy.decode(n_tokens) if n_tokens else 0
        self._log_failure(code)
        states = None
        if self._reads_states and n_tokens and code == 0:
            states = np.ctypeslib.as_array(
                ext.llama_get_embeddings_nextn(self._ctx), (n_tokens, self._n_embd)
            )
        drafts = []
        for item in items:
            place = places.get(item.seq)
            drafts.append(self._read(place, states)[:n] if place is not None and code == 0 else ())
            api.llama_memory_seq_rm(self._cells, item.seq, item.position, -1)
        return drafts

    def _read(self, place: int, extra: NDArray[np.float32] | None) -> tuple[int, ...]:
        """Return the draft of the block at ``place`` of the batch, up to the first place without a
        token or with an unlikely one.

        ``extra`` has llama.cpp's hidden rows, a row for each token of the batch; None
        for a model that gives logits only.
        """
        places = range(place + self._first, place + self._n_block)
        tokens: Iterable[int]
        if extra is None:  # `Greedy` compares with `p_min` itself
            tokens = map(self.greedy.choose, places)
        elif self._shape.top_k:
            tokens = self._best_candidates(places, extra)
        else:
            tokens = self._probable_tokens(places, extra)
        # All three are lazy: nothing is computed after the end of the draft.
        return tuple(takewhile(_is_token, tokens))

    def _probable_tokens(self, places: range, extra: NDArray[np.float32]) -> Iterator[int]:
        """Yield the likeliest token of each place, -1 below `p_min`. DSpark: the first number of a
        row is the probability.
        """
        for i in places:
            yield self.greedy.choose(i) if extra[i, 0] >= self._p_min else -1

    def _best_candidates(self, places: range, extra: NDArray[np.float32]) -> Iterator[int]:
        """Yield the best candidate of each place, -1 below `p_min`. DFlash of the second kind.

        A row has the k candidates of its place, then k scores for each candidate of the place
        before, since which token is likely depends on the one before it:

            token 0 .. token k-1 | scores after candidate 0 | .. | scores after candidate k-1

        Nothing is chosen before the first place, whose scores are those after candidate 0.
        """
        k = self._shape.top_k
        before = 0
        for i in places:
            candidates = extra[i, :k]
            first_score = k + k * before
            scores = extra[i, first_score : first_score + k]
            best = int(scores.argmax())
            # The probability by a softmax over the candidates; relative to the best score, so that
            # exp cannot overflow.
            is_likely = not self._p_min or 1 / np.exp(scores - scores[best]).sum() >= self._p_min
            yield int(candidates[best]) if is_likely else -1
            before = best

    # -- states of layers with windows
    # ----------------------------------------------------------------------------------

    def _cut(self, seq: int, n: int) -> None:
        if not self._slides or n == 0:
            return super()._cut(seq, n)
        self._finish_copies()
        state = self._seqs[seq]
        try:
            # Rows that left the window are lost unless a state follows, until when they stay.
            self._memory.rewind(seq, n)
        except (ValueError, RuntimeError):
            return self._restart(seq, state.end)
        self._cuts[seq] = n
        state.last = n
        state.first = min(state.first, n)
        return None

    def _finish_cuts(self) -> None:
        """Tell the library of cut or cleared rows."""
        if self._memory is not None:
            self._memory.reserve(0)
        for seq, n in self._cuts.items():
            api.llama_memory_seq_rm(self._cells, seq, n, -1)
        self._cuts.clear()

    def truncate(self, seq: int, n: int) -> None:
        self._unread.pop(seq, None)
        super().truncate(seq, n)

    def clear(self, seq: int) -> None:
        self._cuts.pop(seq, None)
        self._unread.pop(seq, None)
        super().clear(seq)

    def load_rows(self, seq: int, first: int, spans: Sequence[BlockSpan]) -> None:
        if not self._slides or not spans:
            return super().load_rows(seq, first, spans)
        start, unread = self._unread.get(seq, (first, []))
        if not unread or unread[-1][2] != first:
            self.truncate(seq, first)
            self._evaluate_pending(seq)
            start = first
            unread = []
        if self._seqs[seq].end == start and all(self._is_own(block) for block, _, _ in spans):
            # They are loaded with the state, by which the library finds where a sequence ends.
            self._unread[seq] = (start, [*unread, *spans])
        else:
            self._restart(seq, spans[-1][2])
        return None

    def state_size(self, seq: int) -> int:
        return self._n_state

    def save_state(self, seq: int, n: int, out: Block | None = None) -> Block:
        """Save the rows of layers with windows; NOTHING without such layers."""
        if not self._slides or self._seqs[seq].end != n or n == 0:
            return NOTHING
        self._evaluate_pending(seq)
        self._finish_cuts()
        block = allocate(self._n_state) if out is None else out
        size = int(self._memory.state_size(seq))
        if SIGNATURE_BYTES + size + N_SIZE > self._n_state:
            return NOTHING
        block[SIGNATURE_BYTES + size : -N_SIZE] = 0
        block[-N_SIZE:] = np.array([size], np.int64).view(np.uint8)
        try:
            self._memory.save_state(seq, n, block[SIGNATURE_BYTES : SIGNATURE_BYTES + size])
        except (ValueError, RuntimeError) as error:
            log.debug("rows of windows of the draft model were not saved: %s", error)
            return NOTHING
        self._is_saving = True
        return self._signed(block)

    def load_state(self, seq: int, n: int, block: Block) -> None:
        """Load the rows of layers with windows, and with them the rows that wait for these."""
        if not self._slides:
            return super().load_state(seq, n, block)
        first, spans = self._unread.pop(seq, (n, []))
        self.truncate(seq, n)
        if self._seqs[seq].end == n and seq not in self._cuts:
            return None  # nothing was lost
        self._finish_copies()
        try:
            if (
                self._seqs[seq].end != first
                or block.size != self._n_state
                or not self._is_own(block)
            ):
                raise ValueError("another state")
            state = block[
                SIGNATURE_BYTES : SIGNATURE_BYTES + int(block[-N_SIZE:].view(np.int64)[0])
            ]
            parts = [(each[SIGNATURE_BYTES:], p0, p1) for each, p0, p1 in spans]
            self._memory.load(seq, first, parts, state)
        except (ValueError, RuntimeError) as error:
            log.info("draft model: no saved state at token %d, starting empty (%s)", n, error)
            return self._restart(seq, n)
        self._cuts.pop(seq, None)
        at = self._seqs[seq]
        at.end = at.last = n
        at.reset_hidden(self._none[0], is_known=False)
        return None

    def close(self) -> None:
        self.greedy.close()
        super().close()


def _is_token(token: int) -> bool:
    return token >= 0

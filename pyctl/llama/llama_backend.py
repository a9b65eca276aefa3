"""The engine's backend on one llama_context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from pyctl.cache import NOWHERE, Block
from pyctl.engine.backend import BackendFacts, SequenceTokens, TopTokens
from pyctl.engine.openmp import end_threads
from pyctl.engine.pool_settings import PoolPlan
from pyctl.engine.sampling import Sampling
from pyctl.errors import EngineError, ModelError, NotSupportedError
from pyctl.llama.batch import Batch, Embedder, Outputs, RowBatch
from pyctl.llama.context_memory import ContextMemory
from pyctl.llama.draft.draft_mirror import DraftMirror
from pyctl.llama.draft.draft_model import MakeDraftModel
from pyctl.llama.image_encoder import ImageEncoder
from pyctl.llama.library import EvaluationControl, build_version, checked
from pyctl.llama.llama_tokenizer import LlamaTokenizer
from pyctl.llama.memory_check import (
    TRIAL_TOKENS,
    describe,
    is_tested,
    pool_trial,
    restores,
    same_bits,
)
from pyctl.llama.sampler import LlamaSampler, LlamaVocabulary, top_logprobs
from pyctl.prompt import ImageSpan, Tokens, as_tokens

__all__ = ["LlamaBackend"]


class LlamaBackend:
    """The `Backend` on one llama_context; it owns the model and context that ``make`` returns.

    The third that ``make`` returns is a tokenizer that stays usable while the model is unloaded,
    the same each time, or None for one of the model itself. With it, the model needs no texts of
    tokens. ``identify`` returns the fingerprint of saved bytes, by default the memory's layout; it
    must be equal after a reload. ``embedder`` creates the embedder. ``max_tokens`` maps the number
    of cells to the limit of one sequence, by default all; ``n_outputs`` is the room for outputs, by
    default one per sequence. ``make_drafts`` creates the draft model from the model, its context,
    and a function that attaches `Pulse` to another context. ``marks`` lets hybrids roll back long
    drafts, for one more state per sequence. With a ``pool`` the context has cells for one batch of
    one sequence, and the pool holds the rows. ``encoder`` opens and closes with the model.
    """

    def __init__(
        self,
        make: Callable[[], tuple[Any, Any, LlamaTokenizer | None]],
        identify: Callable[[LlamaBackend], str] | None = None,
        embedder: Callable[[Any], Embedder] | None = None,
        max_tokens: Callable[[int], int] = lambda n_cells: n_cells,
        n_outputs: int = 0,
        make_drafts: MakeDraftModel | None = None,
        marks: bool = False,
        pool: PoolPlan | None = None,
        batch_cost: int = 0,
        encoder: ImageEncoder | None = None,
    ) -> None:
        self._make = make
        self._identify = identify
        self._make_embedder = embedder
        self._max_tokens = max_tokens
        self._n_outputs = n_outputs
        self._make_drafts = make_drafts
        self._pool = pool
        self._batch_cost = batch_cost
        self.memory = ContextMemory(pool, marks=marks)
        self.control = EvaluationControl()
        self.embedder: Embedder | None = None
        self.encoder = encoder
        self._kept: LlamaTokenizer | None = None
        self.load()

    @property
    def threads(self) -> tuple[int, int]:
        """Threads of the CPU for prompts, and for single tokens."""
        return int(api.llama_n_threads_batch(self.ctx)), int(api.llama_n_threads(self.ctx))

    def load(self) -> None:
        self.model, self.ctx, kept = self._make()
        try:
            self._attach(kept)
        except BaseException:
            self._free()
            raise
        finally:
            end_threads()

    def _attach(self, kept: LlamaTokenizer | None) -> None:
        ctx = self.ctx
        memory = self.memory
        control = self.control
        address = ctypes.cast(ctx, ctypes.c_void_p).value or 0
        control.pulse.attach(address)
        n_cells = self._pool.n_rows if self._pool is not None else int(api.llama_n_ctx(ctx))
        if kept is None or kept is not self._kept:
            self.tokenizer = kept or LlamaTokenizer(self.model)
            self._kept = kept
            n_window = (
                self._pool.n_rows if self._pool is not None else int(api.llama_n_ctx_seq(ctx))
            )
            self.vocabulary = LlamaVocabulary(self.tokenizer, n_window)
        n_seqs = int(api.llama_n_seq_max(ctx))
        n_ubatch = int(api.llama_n_ubatch(ctx))
        n_outputs = max(self._n_outputs, n_seqs)
        # `_open_memory` fills in the limits that depend on the memory.
        self.facts = BackendFacts(n_cells, n_cells, n_seqs, n_ubatch, n_outputs, self._batch_cost)
        self.batch = Batch(max(n_ubatch, n_seqs))
        self.outputs = Outputs(ctx, self.tokenizer.n_vocab)
        self._image_batch: RowBatch | None = None
        self._open_memory()
        control.pulse.watch(address if self.facts.is_async and self._pool is None else 0)
        identity = self._identify(self) if self._identify is not None else memory.layout
        if memory.identity and identity != memory.identity:
            raise ModelError("the model file has changed since it was loaded")
        memory.identity = identity
        if self._make_drafts is not None:
            memory.drafts = DraftMirror(
                self._make_drafts(self.model, ctx, control.pulse.attach), address
            )
        if (drafts := memory.drafts.model) is not None:
            self.facts = replace(self.facts, draft_type=drafts.type)
        memory.measure()
        self.embedder = self._make_embedder(self.model) if self._make_embedder is not None else None
        if self.embedder is not None:
            self.facts = replace(self.facts, n_embed=self.embedder.n_max)
        if self.encoder is not None:
            if not memory.shape.has_rows or memory.kv.window[0]:
                raise ModelError(
                    "--mmproj: images require movable rows of all layers, which this model does "
                    "not have"
                )
            self.encoder.open(self.model)

    def _open_memory(self) -> None:
        memory = self.memory
        is_first = not self.memory.identity
        n_vocab = self.tokenizer.n_vocab
        on_gpu = self._batch_cost > 0
        expected = (
            pool_trial(self, n_vocab, on_gpu=on_gpu)
            if self._pool is not None and is_first
            else None
        )
        api.llama_memory_clear(api.llama_get_memory(self.ctx), True)
        self.evaluate(0, as_tokens([max(self.tokenizer.bos, 0)]), 0)
        try:
            memory.open(self.ctx, self.facts)
        except (RuntimeError, ValueError) as error:
            raise ModelError(
                str(error) if self._pool is None else f"no --kv-pool here: {error}"
            ) from error
        self._ask_memory()
        if is_first and not is_tested(memory.kv):
            self.check_restoring()
        if expected is not None:
            if not same_bits(expected, pool_trial(self, n_vocab, on_gpu=on_gpu)):
                raise ModelError(
                    f"llama.cpp {build_version()} gives other results with --kv-pool than without"
                )
            memory.clear(0)

    def check_restoring(self, *, in_depth: bool = False) -> None:
        """Save and restore a test text; disable saving if any bit of the outputs after it differs.

        With a class that no test covers, and ``in_depth``, also one longer than a ring;
        ``in_depth`` also held rows.
        """
        kv = self.memory.kv
        shape = self.memory.shape
        n_vocab = self.tokenizer.n_vocab
        if not kv.type:
            return
        lengths = [min(shape.resume_points.window or TRIAL_TOKENS, TRIAL_TOKENS)]
        if (
            (in_depth or not is_tested(kv))
            and kv.window[1] > 0
            and sum(kv.window) < self.facts.n_ctx
        ):
            lengths.append(sum(kv.window))
        holds = (False, True) if in_depth and shape.can_hold else (False,)
        if not all(restores(self, n, n_vocab, hold=hold) for n in lengths for hold in holds):
            self.memory.disable_saving()
            self._ask_memory()
        end_threads()

    def _ask_memory(self) -> None:
        """Update the facts from the memory. Sequences that cannot be saved get equal parts of the
        cells.
        """
        memory = self.memory
        n = self._max_tokens(self.facts.n_cells)
        memory.n_ctx = (
            n
            if memory.shape.resume_points != NOWHERE
            else min(n, self.facts.n_cells // self.facts.n_seqs)
        )
        self.facts = replace(
            self.facts,
            n_ctx=memory.n_ctx,
            is_async=bool(memory.kv.is_async),
            n_rollback=memory.n_rollback,
            has_planes=memory.kind == "hybrid",
            max_drafts=memory.max_drafts,
        )

    @property
    def memory_text(self) -> str:
        """A one-line description of the memory and its resume places."""
        return describe(self.memory.kv, self.memory.shape.resume_points)

    # -- evaluation
    # ----------------------------------------------------------------------------------

    def evaluate(
        self,
        seq: int,
        tokens: Tokens,
        start: int,
        *,
        output: bool = True,
        picture: ImageSpan | None = None,
    ) -> None:
        n = int(tokens.size)
        if picture is not None:
            first = start - picture.start
            rows = self._images().rows_of(picture, first, first + n)
            return self.evaluate_image(
                seq, rows, picture.start, first, picture.columns, output=output
            )
        self._reserve(n)
        self.batch.fill(seq, tokens, self.memory.position(seq, start), last=output)
        self._evaluate(
            [SequenceTokens(seq, tuple(tokens.tolist()), start)] if self.facts.draft_type else [], n
        )
        self.outputs.set((n - 1,) if output else ())
        return None

    def encode(self, picture: ImageSpan) -> bool:
        return self._images().encode(picture)

    @property
    def image_bytes(self) -> int:
        return self.encoder.n_bytes if self.encoder is not None else 0

    def _images(self) -> ImageEncoder:
        if self.encoder is None:
            raise NotSupportedError("the model was loaded without a vision encoder")
        return self.encoder

    def evaluate_image(
        self,
        seq: int,
        rows: NDArray[np.float32],
        start: int,
        first: int,
        columns: int,
        *,
        output: bool = False,
    ) -> None:
        """Evaluate ``rows``, shape (n, n_embd), rows from ``first`` on of an image with
        ``columns``.

        The image starts at token ``start`` of the sequence.
        """
        n, width = rows.shape
        self._reserve(n)
        if self._image_batch is None:
            self._image_batch = RowBatch(self.facts.n_ubatch, width)
        self._image_batch.fill(
            seq, rows, self.memory.position(seq, start), first, columns, last=output
        )
        tokens = (self.tokenizer.image_token,) * n
        items = [SequenceTokens(seq, tokens, start + first)] if self.facts.draft_type else []
        self._evaluate(items, n, self._image_batch.struct)
        checked(self.memory.kv.add_image, seq, columns, n)
        self.outputs.set((n - 1,) if output else ())

    def _reserve(self, n: int) -> None:
        """Reserve cells for a batch of ``n`` tokens."""
        if n > self.facts.n_ubatch:
            raise EngineError(f"a batch of {n} tokens is larger than {self.facts.n_ubatch}")
        self.memory.reserve(n)

    def decode(self, items: Sequence[SequenceTokens]) -> None:
        memory = self.memory
        placed = [
            item._replace(position=memory.position(item.seq, item.position)) for item in items
        ]
        n, outputs = self.batch.fill_all(placed)
        if len(outputs) > self.facts.n_outputs:
            raise EngineError(f"{len(outputs)} outputs are more than {self.facts.n_outputs}")
        memory.reserve(n, in_parts=len(items) > 1)
        marks = memory.mark(items)
        self._evaluate(items, n)
        self.outputs.set(outputs)
        memory.evaluated(items, marks)

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        drafts = self.memory.drafts.settled()
        return drafts.draft(items, n) if drafts is not None else [() for _ in items]

    def _evaluate(self, items: Sequence[SequenceTokens], n: int, batch: Any = None) -> None:
        """Run ``batch``, by default the text batch, with ``n`` tokens of ``items``."""
        memory = self.memory
        struct = batch or self.batch.struct
        memory.drafts.prepare()
        struct.n_tokens = n
        self.outputs.set(())
        self.control.run(lambda: self._decode(struct))
        memory.evaluated()
        memory.drafts.evaluated(items, n)

    def _decode(self, batch: Any) -> int:
        if self.memory.store is None:
            return int(api.llama_decode(self.ctx, batch)) or self.control.pulse.code
        return checked(self.memory.store.decode, ctypes.addressof(batch))

    def logits(self, index: int) -> NDArray[np.float32]:
        """Return a copy of the logits of output ``index``, shape (n_vocab,)."""
        return np.array(self.outputs.row(index))

    def output(self) -> Block:
        return self.logits(0).view(np.uint8)

    def recall(self, output: Block) -> None:
        self.outputs.recall(output.view(np.float32))

    # -- choosing tokens
    # ----------------------------------------------------------------------------------

    def sampler(self, sampling: Sampling, prompt: Tokens) -> LlamaSampler:
        text = prompt[prompt >= 0]  # penalties ignore images
        return LlamaSampler(self.tokenizer.vocab, self.outputs, sampling, text, self.vocabulary)

    def top_tokens(self, index: int, token: int, n: int) -> TopTokens:
        return top_logprobs(self.logits(index), token, n)

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        if self.embedder is None:
            raise NotSupportedError("the model was loaded without embeddings")
        return self.embedder.embed(tokens)

    def unload(self) -> None:
        if self.control.lost:
            self.memory.close(is_lost=True)
        elif self.ctx is not None:
            self.memory.synchronize()
            self._free()

    def _free(self) -> None:
        self.memory.close()  # device memory must be freed before its context
        if self._kept is None:
            self.vocabulary.close()
        if self.embedder is not None:
            self.embedder.close()
        if self.encoder is not None:
            self.encoder.close()
        api.llama_free(self.ctx)
        api.llama_model_free(self.model)
        self.embedder = self.ctx = self.model = None

"""The engine's backend on one llama_context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from pyctl.cache.resume_points import NOWHERE
from pyctl.cache.snapshot import Block
from pyctl.engine.backend import BackendFacts, SequenceTokens, TopTokens
from pyctl.engine.openmp import end_threads
from pyctl.engine.sampling import Sampling
from pyctl.errors import EngineError, ModelError, NotSupportedError
from pyctl.llama.draft.draft_mirror import DraftMirror
from pyctl.llama.draft.draft_model import Attach, DraftModel
from pyctl.llama.embedder import Embedder
from pyctl.llama.images.image_encoder import ImageEncoder
from pyctl.llama.library.batch import Batch, Outputs, RowBatch
from pyctl.llama.library.bindings import api
from pyctl.llama.library.evaluation_control import EvaluationControl
from pyctl.llama.library.extension import build_version
from pyctl.llama.library.llama_tokenizer import LlamaTokenizer
from pyctl.llama.library.native import checked
from pyctl.llama.memory.context_memory import ContextMemory
from pyctl.llama.memory.memory_check import (
    TRIAL_TOKENS,
    describe,
    is_tested,
    pool_trial,
    restores,
    same_bits,
)
from pyctl.llama.sampling.sampler import LlamaSampler, LlamaVocabulary, top_logprobs
from pyctl.prompt import ImageSpan, Tokens, as_tokens

__all__ = ["ContextLimits", "LlamaBackend", "ModelOpener", "OpenModel"]


class OpenModel(NamedTuple):
    """A loaded llama_model and the objects that are open on it, all owned by the receiver.

    Attributes:
        model: The llama_model.
        ctx: The llama_context.
        tokenizer: A tokenizer that stays usable while the model is unloaded, so that the model
            needs no texts of tokens; None for a tokenizer of the model itself.
        embedder: The embedder of the model, None without embeddings.
    """

    model: Any
    ctx: Any
    tokenizer: LlamaTokenizer | None = None
    embedder: Embedder | None = None


class ModelOpener(Protocol):
    """The way to open a model and its parts at each load: the same each time."""

    def open(self) -> OpenModel:
        """Return the model with a context. Raises ModelError if it cannot be loaded."""

    def open_drafts(self, model: Any, ctx: Any, attach: Attach) -> DraftModel | None:
        """Return the draft model for the context ``ctx``; None if there is none, or it cannot draft
        for this model. ``attach`` attaches `Pulse` to the context of the draft model.
        """
        return None

    def identify(self, backend: LlamaBackend) -> str:
        """Return the fingerprint of saved bytes, which is equal after a reload."""
        return backend.memory.layout


def _all_cells(n_cells: int) -> int:
    """Return ``n_cells``: a sequence may fill the context."""
    return n_cells


@dataclass(frozen=True)
class ContextLimits:
    """The limits of a context in addition to llama.cpp's.

    Attributes:
        n_outputs: The maximum number of outputs, at least one per sequence.
        batch_cost: `BackendFacts.batch_cost`; 0 also means that the CPU evaluates.
        max_tokens: The function from the number of cells to the maximum tokens of one sequence.
    """

    n_outputs: int = 0
    batch_cost: int = 0
    max_tokens: Callable[[int], int] = _all_cells


class LlamaBackend:
    """The `Backend` on one llama_context; it owns the model and context that ``opener`` opens.

    ``memory`` is the memory for them, by default one without a pool: with a pool the context has
    cells for one batch of one sequence, and the pool holds the rows. ``encoder`` opens and closes
    with the model.
    """

    def __init__(
        self,
        opener: ModelOpener,
        memory: ContextMemory | None = None,
        limits: ContextLimits = ContextLimits(),
        encoder: ImageEncoder | None = None,
    ) -> None:
        self._opener = opener
        self.memory = memory if memory is not None else ContextMemory(None, marks=False)
        self._limits = limits
        self.encoder = encoder
        self.embedder: Embedder | None = None
        self.control = EvaluationControl()
        self._kept: LlamaTokenizer | None = None
        self.load()

    @property
    def threads(self) -> tuple[int, int]:
        """Threads of the CPU for prompts, and for single tokens."""
        return int(api.llama_n_threads_batch(self.ctx)), int(api.llama_n_threads(self.ctx))

    def load(self) -> None:
        self.model, self.ctx, tokenizer, self.embedder = self._opener.open()
        try:
            self._attach(tokenizer)
        except BaseException:
            self._free()
            raise
        finally:
            end_threads()

    def _attach(self, tokenizer: LlamaTokenizer | None) -> None:
        """Attach everything to the new context, in the only order that works."""
        # The pulse first: from the first evaluation on, another thread may break it off.
        address = ctypes.cast(self.ctx, ctypes.c_void_p).value or 0
        self.control.pulse.attach(address)
        # The memory reads its layout from an evaluated token, which takes a batch and outputs.
        self._attach_vocabulary(tokenizer)
        self._attach_buffers()
        self._open_memory()
        # The open memory shows whether a device evaluates that takes no part in the pulse. Then the
        # pulse needs the evaluation callback of the context, which a pool uses itself.
        is_watched = self.facts.is_async and self.memory.pool is None
        self.control.pulse.watch(address if is_watched else 0)
        # The fingerprint covers the layout. It comes before anything else is opened: after a reload
        # nothing may be restored from other bytes.
        self._check_identity()
        # Draft models attach to a context whose trials are over, and which has no tokens.
        self._attach_drafts(address)
        # Blocks include the parts of the draft model.
        self.memory.measure()
        # Images depend on the shape of the memory.
        self._attach_encoder()

    def _attach_vocabulary(self, tokenizer: LlamaTokenizer | None) -> None:
        """Take the tokenizer with the grammars compiled for it; an earlier load's stay."""
        if tokenizer is not None and tokenizer is self._kept:
            return
        self._kept = tokenizer
        self.tokenizer = tokenizer or LlamaTokenizer(self.model)
        pool = self.memory.pool
        n_window = pool.n_rows if pool is not None else int(api.llama_n_ctx_seq(self.ctx))
        self.vocabulary = LlamaVocabulary(self.tokenizer, n_window)

    def _attach_buffers(self) -> None:
        """Create the batch and the outputs of the context, and the facts that llama.cpp has."""
        pool = self.memory.pool
        n_cells = pool.n_rows if pool is not None else int(api.llama_n_ctx(self.ctx))
        n_seqs = int(api.llama_n_seq_max(self.ctx))
        n_ubatch = int(api.llama_n_ubatch(self.ctx))
        # `_open_memory` fills in the limits that depend on the memory.
        self.facts = BackendFacts(
            n_ctx=n_cells,
            n_cells=n_cells,
            n_seqs=n_seqs,
            n_ubatch=n_ubatch,
            n_outputs=max(self._limits.n_outputs, n_seqs),
            batch_cost=self._limits.batch_cost,
            n_embed=self.embedder.n_max if self.embedder is not None else 0,
        )
        self.batch = Batch(max(n_ubatch, n_seqs))
        self.outputs = Outputs(self.ctx, self.tokenizer.n_vocab)
        self._image_batch: RowBatch | None = None

    def _check_identity(self) -> None:
        memory = self.memory
        identity = self._opener.identify(self)
        if memory.identity and identity != memory.identity:
            raise ModelError("the model file has changed since it was loaded")
        memory.identity = identity

    def _attach_drafts(self, address: int) -> None:
        model = self._opener.open_drafts(self.model, self.ctx, self.control.pulse.attach)
        self.memory.drafts = DraftMirror(model, address)
        if model is not None:
            self.facts = replace(self.facts, draft_type=model.type)

    def _attach_encoder(self) -> None:
        if self.encoder is None:
            return
        if not self.memory.shape.has_rows or self.memory.kv.window[0]:
            raise ModelError(
                "--mmproj: images require movable rows of all layers, which this model does "
                "not have"
            )
        self.encoder.open(self.model)

    def _open_memory(self) -> None:
        """Open the memory on the context, and at the first load try whether it keeps bits."""
        memory = self.memory
        is_first = not memory.identity
        # A pool changes the way in which the context evaluates, so the text comes before it.
        tries_pool = memory.pool is not None and is_first
        expected = self._evaluate_trial() if tries_pool else []
        api.llama_memory_clear(api.llama_get_memory(self.ctx), True)
        self.evaluate(0, as_tokens([max(self.tokenizer.bos, 0)]), 0)
        try:
            memory.open(self.ctx, self.facts)
        except (RuntimeError, ValueError) as error:
            reason = f"no --kv-pool here: {error}" if memory.pool is not None else str(error)
            raise ModelError(reason) from error
        self._update_facts()
        if is_first and not is_tested(memory.kv):
            self.check_restoring()
        if tries_pool:
            if not same_bits(expected, self._evaluate_trial()):
                raise ModelError(
                    f"llama.cpp {build_version()} gives other results with --kv-pool than without"
                )
            memory.clear(0)

    def _evaluate_trial(self) -> list[Block]:
        """Evaluate the text of the trial of a pool, and return its outputs."""
        return pool_trial(self, self.tokenizer.n_vocab, on_gpu=self._limits.batch_cost > 0)

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
            self._update_facts()
        end_threads()

    def _update_facts(self) -> None:
        """Update the facts from the memory. Sequences that cannot be saved get equal parts of the
        cells.
        """
        memory = self.memory
        n_ctx = self._limits.max_tokens(self.facts.n_cells)
        if memory.shape.resume_points == NOWHERE:
            n_ctx = min(n_ctx, self.facts.n_cells // self.facts.n_seqs)
        memory.rollbacks.n_ctx = n_ctx
        self.facts = replace(
            self.facts,
            n_ctx=n_ctx,
            is_async=bool(memory.kv.is_async),
            n_rollback=memory.rollbacks.n_rollback,
            has_state_history=memory.kind == "hybrid" and not memory.rollbacks.can_cut,
            max_drafts=memory.rollbacks.max_drafts,
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
        """Evaluate ``tokens``, shape (n,), at position ``start`` of sequence ``seq``; with
        ``output`` the last token has an output.

        With ``picture`` the tokens stand for a part of an image, and its rows are evaluated
        instead. Outputs belong to the evaluation that started last, so they are set after it.
        """
        n = int(tokens.size)
        if picture is not None:
            first = start - picture.start
            rows = self._images().encoded_rows(picture, first, first + n)
            return self.evaluate_image(
                seq, rows, picture.start, first, picture.columns, output=output
            )
        self._reserve(n)
        self.batch.fill(seq, tokens, self.memory.cells.position(seq, start), last=output)
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
            seq, rows, self.memory.cells.position(seq, start), first, columns, last=output
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
        self.memory.cells.reserve(n)

    def decode(self, items: Sequence[SequenceTokens]) -> None:
        memory = self.memory
        n, outputs = self.batch.fill_all(items, memory.cells.position)
        if len(outputs) > self.facts.n_outputs:
            raise EngineError(f"{len(outputs)} outputs are more than {self.facts.n_outputs}")
        memory.cells.reserve(n, in_parts=len(items) > 1)
        marks = memory.rollbacks.mark(items)
        self._evaluate(items, n)
        memory.rollbacks.record(items, marks)
        self.outputs.set(outputs)

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        drafts = self.memory.drafts.settled()
        return drafts.draft(items, n) if drafts is not None else [() for _ in items]

    def _evaluate(self, items: Sequence[SequenceTokens], n: int, batch: Any = None) -> None:
        """Run ``batch``, by default the text batch, with ``n`` tokens of ``items``."""
        memory = self.memory
        struct = batch or self.batch.struct
        memory.drafts.pass_on_rows()
        struct.n_tokens = n
        self.outputs.set(())
        self.control.run(partial(self._decode, struct))
        memory.rollbacks.record()
        memory.drafts.evaluated(items, n)

    def _decode(self, batch: Any) -> int:
        if self.memory.store is None:
            return int(api.llama_decode(self.ctx, batch)) or self.control.pulse.code
        return checked(self.memory.store.decode, ctypes.addressof(batch))

    def logits(self, index: int) -> NDArray[np.float32]:
        """Return a copy of the logits of output ``index``, shape (n_vocab,)."""
        return np.array(self.outputs.row(index))

    def logits_digest(self, index: int) -> int:
        return crc32(self.outputs.row(index).data)

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

"""The engine's backend on one llama_context."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from pyctl.cache import NOWHERE, Block, ResumePlaces
from pyctl.engine.backend import SequenceTokens, TopTokens
from pyctl.engine.pool.pool_plan import PoolPlan, StreamCounts
from pyctl.engine.pool.selection import Pins
from pyctl.engine.sampling import Sampling
from pyctl.errors import (
    BrokenOffError,
    EngineError,
    ModelError,
    NotSupportedError,
    OutOfCellsError,
    StateError,
    UnavailableError,
)
from pyctl.llama.batch import Batch, Embedder, ImageBatch
from pyctl.llama.context_memory import ContextMemory
from pyctl.llama.draft.draft_model import Follower, MakeDraftModel
from pyctl.llama.grammar import GrammarCompiler
from pyctl.llama.library import KVState, Pulse, build_version, captured_log, checked
from pyctl.llama.llama_tokenizer import LlamaTokenizer
from pyctl.llama.memory_check import TRIAL_TOKENS, describe, is_tested, places_of, restores
from pyctl.llama.pool.row_pool import counts_of, open_pool
from pyctl.llama.pool.trial import same_bits, trial
from pyctl.llama.sampler import DrySamplers, IndexedSampler, LlamaSampler, top_logprobs
from pyctl.llama.vision.image_encoder import ImageEncoder
from pyctl.prompt import Picture, Tokens, as_tokens

__all__ = ["LlamaBackend"]

log = logging.getLogger(__name__)

ABORTED = 2
"""What llama_decode returns when `Pulse` stopped it."""

LEAST_LOOKS = 32
"""Where a GPU does all but a few steps, it would be waited for all the same."""


class LlamaBackend(ContextMemory):
    """Evaluates on the context that ``make`` returns with its model, and moves its rows and states. Owns both.

    The layout of the memory is read from what the library writes, so one token is evaluated and dropped first.
    ``identify`` names what saved bytes mean, by default that layout; it must not change when the model is opened again.
    ``embedder`` makes what embeds texts. ``most_tokens`` says how many of the cells, which all share, one sequence may
    have, by default all; ``n_outputs`` how many outputs there is room for, by default one for each sequence.
    ``make_drafts`` makes what drafts, from the model, its context, and what lets `Pulse` take part in a further one.
    With ``marks`` a hybrid takes back long drafts, too, for a further state of each sequence. With a ``pool`` there are
    cells for a batch only, of one sequence, and rows lie there. ``encoder`` is opened and closed with the model.
    """

    def __init__(
        self,
        make: Callable[[], tuple[Any, Any]],
        identify: Callable[[LlamaBackend], str] | None = None,
        embedder: Callable[[Any], Embedder] | None = None,
        most_tokens: Callable[[int], int] = lambda n_cells: n_cells,
        n_outputs: int = 0,
        make_drafts: MakeDraftModel | None = None,
        marks: bool = False,
        pool: PoolPlan | None = None,
        batch_cost: int = 0,
        encoder: ImageEncoder | None = None,
    ) -> None:
        self._make, self._identify, self._make_embedder = make, identify, embedder
        self._most_tokens, self._n_outputs, self._make_drafts = most_tokens, n_outputs, make_drafts
        self._drafts, self._marks, self._pool = Follower(None, 0), marks, pool
        self.embedder: Embedder | None = None
        self.encoder, self.identity, self.batch_cost = encoder, "", batch_cost
        self._keeps_vocabulary = self._may_break = False
        self._streamed_before, self._pulse = StreamCounts(), Pulse()
        self._places: ResumePlaces | None = None  # known from the first load on
        self._n_looks = 0  # how often the last evaluation could have been ended
        self._recalled: NDArray[np.float32] | None = None
        self.load()

    def load(self) -> None:
        self.model, self._ctx = self._make()
        try:
            self._attach()
        except BaseException:
            self._free()
            raise

    def _attach(self) -> None:
        ctx = self._ctx
        address = ctypes.cast(ctx, ctypes.c_void_p).value or 0
        self._pulse.attach(address)
        self.tokenizer = LlamaTokenizer(self.model)
        if not self._keeps_vocabulary:
            self._grammars, self._dry = GrammarCompiler(self.tokenizer), DrySamplers(self.tokenizer)
        self.n_cells = self._pool.n_rows if self._pool is not None else int(api.llama_n_ctx(ctx))
        self._n_window = self._pool.n_rows if self._pool is not None else int(api.llama_n_ctx_seq(ctx))
        self.n_seqs = int(api.llama_n_seq_max(ctx))
        self.n_ubatch = int(api.llama_n_ubatch(ctx))
        self.n_outputs = max(self._n_outputs, self.n_seqs)
        self._n_planes = int(api.llama_n_rs_seq(ctx))
        # From where on `keep` may take back each sequence, and from where on it may go back to a mark.
        self._least: dict[int, tuple[int, int]] = {}
        self._handles = set()
        self._batch = Batch(max(self.n_ubatch, self.n_seqs))
        self._image_batch: ImageBatch | None = None
        self._end_tokens = self.tokenizer.end_tokens()
        self._open_memory(address)
        self.n_ctx = self._most_context()
        self._pulse.watch(address if self._memory.is_async and self._pool is None else 0)
        if self._memory.is_async:
            self._prepare_device()
        identity = self._identify(self) if self._identify is not None else self.layout
        if self.identity and identity != self.identity:
            raise ModelError("the model is not the one that was loaded before")
        self.identity = identity
        if self._make_drafts is not None:
            self._drafts = Follower(self._make_drafts(self.model, ctx, self._pulse.attach), address)
        self._sizes = self._measured()
        self.embedder = self._make_embedder(self.model) if self._make_embedder is not None else None
        if self.encoder is not None:
            if self.kind == "opaque":
                raise ModelError("--mmproj: images need a model whose rows can be moved, which this one's cannot")
            self.encoder.open(self.model)

    def _open_memory(self, address: int) -> None:
        expected = self._trial() if self._pool is not None and not self.identity else None
        api.llama_memory_clear(api.llama_get_memory(self._ctx), True)
        self.evaluate(0, as_tokens([max(self.tokenizer.bos, 0)]), 0)
        try:
            if self._pool is None:
                self._memory = KVState(address, 0, marks=self._marks, defers=True)
            else:
                self._memory = open_pool(address, self._pool, marks=self._marks)
        except (RuntimeError, ValueError) as error:
            raise ModelError(str(error) if self._pool is None else f"no --kv-pool here: {error}") from error
        self.clear(0)
        self.places = self._places or places_of(self._memory, self.n_cells, on_gpu=self.batch_cost > 0)
        if self._places is None and not is_tested(self._memory):
            self.check_restoring()
        self._places = self.places
        if expected is not None:
            if not same_bits(expected, self._trial()):
                raise ModelError(f"llama.cpp {build_version()} computes something else with --kv-pool than without")
            self.clear(0)

    def check_restoring(self) -> None:
        """Save and restore a made-up text; if a bit of what follows differs, nothing is to be saved any more."""
        if not self._memory.type:
            return
        n = min(self.places.window or TRIAL_TOKENS, TRIAL_TOKENS)
        if not restores(self, n, self.tokenizer.n_vocab):
            self._places = self.places = NOWHERE
            self.n_ctx = self._most_context()

    def _most_context(self) -> int:
        """Tokens that one sequence may have. What cannot be saved has its share: no other may need its cells."""
        n = self._most_tokens(self.n_cells)
        return n if self.places != NOWHERE else min(n, self.n_cells // self.n_seqs)

    @property
    def memory_text(self) -> str:
        """What kind of memory the model has and where it is resumed, for people."""
        return describe(self._memory, self.places)

    def _trial(self) -> list[NDArray[np.float32]]:
        sizes = self.tokenizer.n_vocab, self.n_ubatch, self.n_cells
        return trial(self.evaluate, self.logits, *sizes, on_gpu=self.batch_cost > 0)

    def copy_rate(self) -> float:
        """Bytes a second from RAM into a stage of the pool, measured now; 0 without one."""
        return float(self._memory.copy_rate()) if self._pool is not None else 0.0

    @property
    def streamed(self) -> StreamCounts | None:
        if self._pool is None:
            return None
        return self._streamed_before.plus(counts_of(self._memory) if self._memory is not None else StreamCounts())

    @property
    def draft_type(self) -> str:
        return self._drafts.model.type if self._drafts.model is not None else ""

    @property
    def n_rollback(self) -> int:
        return self.n_ctx if self.kind == "attention" else self._n_planes if self.kind == "hybrid" else 0

    @property
    def has_planes(self) -> bool:
        return self.kind == "hybrid"

    @property
    def most_drafts(self) -> int:
        most = self.n_ubatch - 1 if self._memory.has_marks else self.n_rollback
        return self._pool.most_drafts(most, self._n_planes) if self._pool is not None else most

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, seq: int, tokens: Tokens, start: int, *, output: bool = True) -> None:
        n = int(tokens.size)
        if n > self.n_ubatch:
            raise EngineError(f"a batch of {n} tokens is larger than {self.n_ubatch}")
        self._reserve(n)
        self._batch.fill(seq, tokens, self._position(seq, start), last=output)
        self._evaluate([SequenceTokens(seq, tuple(tokens.tolist()), start)] if self.draft_type else [], n)
        self._outputs = [n - 1] if output else []

    def encode(self, picture: Picture) -> bool:
        return self._images().encode(picture)

    def evaluate_picture(self, seq: int, picture: Picture, first: int, last: int, *, output: bool = False) -> None:
        start = picture.start
        rows = self._images().rows_of(picture, first - start, last - start)
        self.evaluate_image(seq, rows, start, first - start, picture.columns, output=output)

    @property
    def image_bytes(self) -> int:
        return self.encoder.n_bytes if self.encoder is not None else 0

    def _images(self) -> ImageEncoder:
        if self.encoder is None:
            raise NotSupportedError("the model was loaded without a vision encoder")
        return self.encoder

    def evaluate_image(
        self, seq: int, rows: NDArray[np.float32], start: int, first: int, columns: int, *, output: bool = False
    ) -> None:
        """Evaluate ``rows``, shape (n, n_embd), which are those from ``first`` on of an image with so many columns.

        The first of the image is token ``start`` of the sequence.
        """
        n, width = rows.shape
        if n > self.n_ubatch:
            raise EngineError(f"a batch of {n} rows is larger than {self.n_ubatch}")
        self._reserve(n)
        if self._image_batch is None:
            self._image_batch = ImageBatch(self.n_ubatch, width)
        self._image_batch.fill(seq, rows, self._position(seq, start), first, columns, last=output)
        tokens = (self.tokenizer.image_token,) * n if self.draft_type else ()
        items = [SequenceTokens(seq, tokens, start + first)] if self.draft_type else []
        self._evaluate(items, n, self._image_batch.struct)
        checked(self._memory.add_image, seq, columns, n)
        self._outputs = [n - 1] if output else []

    def _position(self, seq: int, n: int) -> int:
        """Where llama.cpp has token ``n`` of ``seq``, or will have the next one."""
        return int(self._memory.position(seq, n)) if self._memory is not None else n

    def decode(self, items: Sequence[SequenceTokens]) -> None:
        placed = [item._replace(position=self._position(item.seq, item.position)) for item in items]
        n, outputs = self._batch.fill_all(placed)
        if len(outputs) > self.n_outputs:
            raise EngineError(f"{len(outputs)} outputs are more than {self.n_outputs}")
        self._reserve(n, in_parts=len(items) > 1)
        marks = {item.seq: -1 for item in items}
        for item in items:
            if self.n_rollback < item.n_drafts <= self.most_drafts:
                checked(self._memory.mark, item.seq, item.position)
                marks[item.seq] = item.position + item.n_sure
        self._evaluate(items, n, selects=self._pool is not None and self._pool.select is not None)
        self._outputs = outputs
        bounds = self._bounds(items)
        self._least = {seq: (bounds.get(seq, -1), marked) for seq, marked in marks.items()}

    def _bounds(self, items: Sequence[SequenceTokens]) -> dict[int, int]:
        """For each sequence of the evaluation that was just made, from where on it can be taken back.

        This is the one place that knows: llama.cpp says that it has gone back even where it cannot. The planes of a
        recurrent cell hold the states after its last tokens, as many as this evaluation had. If one sequence had more
        than another it was several evaluations, of which each may move the cells of others without their planes.
        """
        if self.kind == "attention":
            return {item.seq: item.position + item.n_sure for item in items}
        if self.kind == "opaque" or len({len(item.tokens) for item in items}) > 1:
            return {}
        ends = {item: item.position + len(item.tokens) for item in items}
        return {item.seq: max(item.position + item.n_sure, end - self._n_planes) for item, end in ends.items()}

    def keep(self, seq: int, n: int) -> int:
        end, (least, marked) = self._n_held(seq), self._least.pop(seq, (-1, -1))
        if n == end:
            return n
        held = n
        if not 0 < least <= n < end or not self._memory.cut(seq, n):
            if not 0 < marked <= n < end:
                self.clear(seq)
                raise StateError(f"tokens from {n} on of {end} cannot be taken back")
            held = checked(self._memory.reset, seq)
        if drafts := self._drafts.settled():
            drafts.keep(seq, held)
        return held

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        drafts = self._drafts.settled()
        return drafts.draft(items, n) if drafts is not None else [() for _ in items]

    def _evaluate(self, items: Sequence[SequenceTokens], n: int, batch: Any = None, *, selects: bool = False) -> None:
        """Run ``batch``, ``n`` tokens of ``items``; by default that of text."""
        self._drafts.prepare()
        self._run(n, batch or self._batch.struct, selects)
        self._least, self._recalled = {}, None
        self._drafts.evaluated(items, n)

    def _prepare_device(self) -> None:
        """Let a device load what large batches need now, and not while the first prompt waits."""
        self.evaluate(0, as_tokens([max(self.tokenizer.bos, 0)] * min(self.n_ubatch, self.n_cells)), 0)
        api.llama_synchronize(self._ctx)
        self.clear(0)

    def _decode(self, batch: Any, selects: bool) -> int:
        if self._pool is None or self._memory is None:
            return int(api.llama_decode(self._ctx, batch)) or self._pulse.code
        return int(checked(self._memory.decode, ctypes.addressof(batch), selects))

    def pin(self, seq: int, ranges: Pins) -> None:
        if self._pool is not None and self._pool.select is not None:
            checked(self._memory.pin, ranges)

    def _run(self, n: int, batch: Any, selects: bool) -> None:
        batch.n_tokens, before = n, self._pulse.count
        if not self._may_break:
            code = self._decode(batch, selects)
        else:
            with captured_log() as said:
                code = self._decode(batch, selects)
            for line in said if code != ABORTED else ():  # else it has only failed as it should
                log.log(logging.WARNING if code else logging.DEBUG, "%s", line)
        if code == 0:
            self._n_looks = self._pulse.count - before
        if code == ABORTED:
            stopped, broken = UnavailableError("the evaluation was stopped"), BrokenOffError("it was broken off")
            raise stopped if self._pulse.is_stopped else broken
        if code == 1:
            raise OutOfCellsError
        if code != 0:
            raise EngineError(f"evaluation failed: llama_decode returned {code}")

    def interrupt(self) -> None:
        self._pulse.stop()

    @property
    def can_break(self) -> bool:
        return self._n_looks >= LEAST_LOOKS or self._pulse.is_watching

    def allow_break(self, is_so: bool) -> None:
        self._may_break = is_so
        self._pulse.allow(is_so)

    def break_off(self, is_wanted: bool = True) -> None:
        self._pulse.ask(is_wanted)

    @property
    def n_beats(self) -> int:
        return self._pulse.count

    def logits(self, index: int) -> NDArray[np.float32]:
        """A copy of the logits of output ``index``, shape (n_vocab,)."""
        if self._recalled is not None:
            return np.array(self._recalled)
        pointer = api.llama_get_logits_ith(self._ctx, self._outputs[index])
        return np.array(np.ctypeslib.as_array(pointer, (self.tokenizer.n_vocab,)), np.float32)

    def output(self) -> Block:
        return self.logits(0).view(np.uint8)

    def recall(self, output: Block) -> None:
        self._recalled = output.view(np.float32)

    def use_vocabulary(self, tokenizer: LlamaTokenizer) -> None:
        """Compile grammars with ``tokenizer``, which stays usable while the model is freed."""
        self._grammars, self._dry = GrammarCompiler(tokenizer), DrySamplers(tokenizer)
        self._keeps_vocabulary = True

    # -- choosing tokens ---------------------------------------------------------------------------------------------

    def sampler(self, sampling: Sampling, prompt: Tokens) -> IndexedSampler:
        text = prompt[prompt >= 0]  # images have nothing that could be repeated
        sampler = LlamaSampler(self.model, self._ctx, sampling, text, self._end_tokens, self._grammars, self._dry)
        return IndexedSampler(sampler, lambda index: self._outputs[index], lambda: self._recalled)

    def check(self, sampling: Sampling) -> None:
        if sampling.grammar:
            self._grammars.matcher(sampling.grammar, sampling.grammar_kind)
        self._dry.prepare(sampling, self._n_window)

    def prepare(self) -> None:
        self._grammars.prepare()

    def top_tokens(self, index: int, token: int, n: int) -> TopTokens:
        return top_logprobs(self.logits(index), token, n)

    def is_end(self, token: int) -> bool:
        return token in self._end_tokens

    def piece(self, token: int) -> bytes:
        return self.tokenizer.piece(token, special=False)

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        if self.embedder is None:
            raise NotSupportedError("the model was loaded without embeddings")
        return self.embedder.embed(tokens)

    def unload(self) -> None:
        if self._ctx is not None:
            self.synchronize()
            self._free()

    def _free(self) -> None:
        self._drafts.close()
        self._streamed_before = self.streamed or StreamCounts()
        self._memory = None  # what it holds on the device goes before the context that it belongs to
        if not self._keeps_vocabulary:
            self._grammars.close()
            self._dry.close()
        if self.embedder is not None:
            self.embedder.close()
        if self.encoder is not None:
            self.encoder.close()
        api.llama_free(self._ctx)
        api.llama_model_free(self.model)
        self.embedder = self._ctx = self.model = None

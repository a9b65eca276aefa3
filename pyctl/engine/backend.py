"""The interface between engine and model: constant facts, and small protocols.

Each caller depends on one of them: decoding on `Evaluator`, the cache on `SequenceMemory`, tools on
`Vocabulary`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.ports import SequenceMemory
from pyctl.cache.snapshot import Block
from pyctl.engine.pool_plan import PoolPlan
from pyctl.engine.sampling import Sampling
from pyctl.prompt import ImageSpan, Tokens

__all__ = [
    "Backend",
    "BackendFacts",
    "Control",
    "EngineInfo",
    "Evaluator",
    "ModelTemplates",
    "Placement",
    "Sampler",
    "SequenceTokens",
    "TopTokens",
    "VerifyOutputs",
    "Vocabulary",
]


class ModelTemplates(NamedTuple):
    """The templates of a model's file, empty if it has none: of chats, of those with tools, of a
    reranker's prompt.
    """

    chat: str = ""
    tool_use: str = ""
    rerank: str = ""


@dataclass(frozen=True)
class Placement:
    """Types of K and V as for --cache-type-k, and the devices of layers.

    Of ``n_layers``, the output as one of them, ``n_gpu_layers`` are on GPUs, except for the tensors
    that the ``n_rules`` rules of --override-tensor and --n-cpu-moe put elsewhere. ``resolved`` are
    the flags that can be automatic, each with its value and the reason for it.
    """

    type_k: str = "f16"
    type_v: str = "f16"
    n_layers: int = 0
    n_gpu_layers: int = 0
    n_rules: int = 0
    resolved: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class EngineInfo:
    """Facts about the model and its context. Sizes are tokens; ``model_size`` is bytes,
    ``n_params`` weights.

    ``n_ctx`` is the limit of prompt and reply of one request: all cells if shared, else its equal
    part. Processes with the same ``fingerprint`` may share saved rows and states. ``vocab_type`` is
    llama.cpp's number. ``pooling`` is the pooling of embeddings, empty without embeddings.
    ``draft_types`` are values of --spec-type. ``vision``: prompts may contain images. ``lora`` are
    (path, scale). ``model_alias`` is the name for clients, the first of ``model_aliases`` if any. A
    reranker's prompt is ``templates.rerank``, or if that is empty query and document with
    ``rerank_marks`` before, between and after them. ``pool`` is where rows lie, None if all are on
    the device. ``memory`` describes llama.cpp's kind of memory, and where sequences can resume.
    ``placement`` is how its weights and rows are stored. ``sampling`` are the parameters that the
    file recommends, by the fields of `Sampling`.
    """

    model_path: str
    model_name: str
    model_alias: str
    arch: str
    ftype_name: str
    n_ctx: int
    n_ctx_train: int
    n_seqs: int
    n_vocab: int
    n_embd: int
    n_params: int
    model_size: int
    bos_token: str
    eos_token: str
    build: str
    fingerprint: str
    vocab_type: int = 0
    pooling: str = ""
    model_aliases: tuple[str, ...] = ()
    model_tags: tuple[str, ...] = ()
    rerank_marks: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = ((), (), ())
    lora: tuple[tuple[str, float], ...] = ()
    draft_types: tuple[str, ...] = ()
    vision: bool = False
    pool: PoolPlan | None = None
    memory: str = ""
    placement: Placement = Placement()
    templates: ModelTemplates = field(default_factory=ModelTemplates)
    sampling: Mapping[str, Any] = field(default_factory=dict)


TopTokens = tuple[tuple[int, float], ...]
"""(id, natural log of the probability): the sampled token first, then the most likely ones."""


class Sampler(Protocol):
    """The sampler of one request, with the history for its penalties."""

    @property
    def seed(self) -> int:
        """The seed in use, also if the request left it to chance."""

    @property
    def is_constrained(self) -> bool:
        """True if a grammar restricts the next token; a lazy one does from its trigger on."""

    def sample(self, index: int) -> int:
        """Return a token sampled from output ``index`` of the last evaluation."""

    def force(self, index: int, token: int) -> None:
        """Accept ``token`` at output ``index`` as if no other token were possible."""

    def top_tokens(self, token: int, n: int) -> TopTokens:
        """Return the nonzero probabilities after sampling of the last ``token`` and the ``n`` most
        likely ones.

        Requires a `Sampling` with ``post_sampling_probs``.
        """

    def close(self) -> None:
        """Free the llama.cpp objects. Idempotent."""


class SequenceTokens(NamedTuple):
    """``tokens`` to append to sequence ``seq``, which has ``position`` tokens.

    The first ``n_committed`` >= 1 tokens are final; the others are drafts, which
    `SequenceMemory.rollback` may remove.
    """

    seq: int
    tokens: tuple[int, ...]
    position: int
    n_committed: int = 1

    @property
    def n_drafts(self) -> int:
        """The number of drafts among the tokens."""
        return len(self.tokens) - self.n_committed


class DraftSpan(NamedTuple):
    """The drafts [first, end) of a step."""

    first: int
    end: int

    def n_within(self, n: int) -> int:
        """Return how many of the first ``n`` drafts are in the span."""
        return min(max(n - self.first, 0), self.end - self.first)


NO_SPAN = DraftSpan(0, 0)


class VerifyOutputs(NamedTuple):
    """The result of an evaluation: ``output`` is the index of the last sure token's output, the
    ``drafts``' follow.

    Drafts after the first ``n_drafted`` are padding of the batch. Those in ``predicted`` come from
    the request's prediction.
    """

    output: int
    drafts: tuple[int, ...] = ()
    n_drafted: int = 0
    predicted: DraftSpan = NO_SPAN


@dataclass(frozen=True)
class BackendFacts:
    """Limits of a backend, in tokens.

    One of the ``n_seqs`` sequences holds up to ``n_ctx``, all together ``n_cells``. One evaluation
    takes up to ``n_ubatch``, `Evaluator.embed` up to ``n_embed``, 0 without embeddings; one
    `Evaluator.decode` returns up to ``n_outputs`` >= ``n_seqs`` outputs. Batches of ``batch_cost``
    on average keep the overhead per batch low; see `batch_ends`. With ``is_async``, `decode`
    returns once the device has started.

    `SequenceMemory.rollback` removes up to ``n_rollback`` drafts of a sequence at no cost; with
    ``has_state_history``, only if all items of the `decode` had equally many tokens. With a mark it
    removes up to ``max_drafts``; 0: it cannot. ``draft_type`` is the draft model of
    `Evaluator.draft`: "draft-mtp", "draft-simple", or empty for none.
    """

    n_ctx: int
    n_cells: int
    n_seqs: int
    n_ubatch: int
    n_outputs: int
    batch_cost: int = 0
    is_async: bool = False
    n_rollback: int = 0
    has_state_history: bool = False
    max_drafts: int = 0
    draft_type: str = ""
    n_embed: int = 0


class Vocabulary(Protocol):
    """The vocabulary for text and grammars, also while the model is unloaded. Thread-safe."""

    def is_end(self, token: int) -> bool:
        """Return whether the model ends its reply with ``token``."""

    def piece(self, token: int) -> bytes:
        """Return the bytes of one generated token."""

    def check(self, sampling: Sampling) -> None:
        """Compile the grammar of ``sampling`` and keep it, which may take a second, and another one
        for the first.

        RequestError if it is invalid.
        """


class Control(Protocol):
    """Interrupts evaluations and reports their progress. Thread-safe except `allow_preemption`, for
    the engine's thread.
    """

    def interrupt(self) -> None:
        """Make the running evaluation and all later ones fail soon, if the device supports it."""

    @property
    def can_preempt(self) -> bool:
        """Return whether evaluations check for `preempt` often enough."""

    def allow_preemption(self, is_so: bool) -> None:
        """Set whether evaluations from now on may fail with PreemptedError.

        After it the sequence's contents are undefined, except rows before the start of the
        evaluation.
        """

    def preempt(self, is_wanted: bool = True) -> None:
        """Request that the current or next evaluation ends early, if allowed; False withdraws the
        request.
        """

    @property
    def heartbeat(self) -> int:
        """A counter that grows while an evaluation makes progress, if the device reports it.
        EngineError if a device was lost: calls for it never return.
        """


class Evaluator(Protocol):
    """Evaluates and samples tokens in sequences 0 .. n_seqs - 1.

    An evaluation appends to its sequences and replaces the previous outputs; samplers and
    `top_tokens` refer to outputs by index. Errors: OutOfCellsError leaves the sequences unchanged.
    After EngineError, and UnavailableError (after `Control.interrupt`), the contents of the
    sequences are undefined.
    """

    @property
    def facts(self) -> BackendFacts:
        """The backend's limits, constant while the model is loaded."""

    @property
    def memory(self) -> SequenceMemory:
        """The contents of the sequences."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary."""

    @property
    def control(self) -> Control:
        """Interruption and progress, for other threads."""

    @property
    def image_bytes(self) -> int:
        """Bytes of all encoded images in memory."""

    def evaluate(
        self,
        seq: int,
        tokens: Tokens,
        start: int,
        *,
        output: bool = True,
        picture: ImageSpan | None = None,
    ) -> None:
        """Evaluate ``tokens`` as one batch from position ``start`` on. With ``output``, output 0 is
        the last token's.

        With ``picture`` all tokens are part of it; it is encoded first if necessary.
        """

    def encode(self, picture: ImageSpan) -> bool:
        """Encode ``picture`` for `evaluate`; False if it was encoded before. RequestError for an
        invalid file.
        """

    def decode(self, items: Sequence[SequenceTokens]) -> None:
        """Evaluate one or more tokens for each of several sequences, up to ``n_ubatch`` in total or
        one each.

        Outputs belong to each item's last sure token and its drafts, numbered across items. A
        sequence with more drafts than ``n_rollback`` is marked first, so that `rollback` can return
        to its start.
        """

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        """Return up to ``n`` drafts of the draft model for each item. The items' tokens are not
        evaluated yet.
        """

    def output(self) -> Block:
        """Return a copy of output 0 of the last evaluation, for `recall`."""

    def logits_digest(self, index: int) -> int:
        """Return the CRC-32 of the logits of output ``index``. Waits for the device."""

    def recall(self, output: Block) -> None:
        """Set ``output`` as output 0, the only one, until the next evaluation."""

    def sampler(self, sampling: Sampling, prompt: Tokens) -> Sampler:
        """Return a sampler whose penalties include the end of ``prompt``."""

    def top_tokens(self, index: int, token: int, n: int) -> TopTokens:
        """Return the log-probabilities of ``token`` and of the ``n`` most likely tokens at output
        ``index``.
        """

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        """Return embeddings of ``tokens``, shape (1, width) if the model pools them, else (n,
        width); with pooling "rank", one score per class. RequestError for too many tokens.
        Sequences do not change.
        """


class Backend(Evaluator, Protocol):
    """A model with its sequences, loaded on construction. Once the engine runs, only the engine's
    thread may call it.
    """

    def load(self) -> None:
        """Reload the model after `unload`, with empty sequences. ModelError on failure, or if the
        model changed.
        """

    def unload(self) -> None:
        """Free the context, the model and all device memory. After it only `load`, `unload`, the
        vocabulary, the control and `SequenceMemory.synchronize` are valid. A lost device is not
        asked: held rows are gone.
        """

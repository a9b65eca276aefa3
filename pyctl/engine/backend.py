"""What the engine needs of a model: facts that do not change while the program runs, and small protocols.

Each caller takes only those it needs: decoding an `Evaluator`, the cache a `SequenceMemory`, tools a `Vocabulary`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pyctl.cache import Block, SequenceMemory
from pyctl.engine.pool import PoolPlan, StreamCounts
from pyctl.engine.sampling import Sampling
from pyctl.engine.selection import Pins
from pyctl.prompt import Picture, Tokens

__all__ = [
    "Backend",
    "BackendFacts",
    "Control",
    "EngineInfo",
    "Evaluator",
    "Lifecycle",
    "Sampler",
    "SequenceTokens",
    "TopTokens",
    "Vocabulary",
]


@dataclass(frozen=True)
class EngineInfo:
    """Sizes are tokens unless the name says otherwise; ``model_size`` is bytes, ``n_params`` weights.

    ``n_ctx`` is what one client may send and get: all cells, which it may have to wait for, or its fixed share.

    ``fingerprint`` is equal for two processes exactly when their saved rows and states may be mixed. ``vocab_type`` is
    llama.cpp's number. ``pooling`` says how embeddings are made of a text, empty when there are none.
    ``draft_types`` name what proposes drafts, as --spec-type does. ``vision``: prompts may hold images.
    ``lora`` are adapters, (path, scale). ``model_alias`` is the name for clients, the first of ``model_aliases`` if
    there are any. A reranker is asked with ``rerank_template``, or without one with the tokens of ``rerank_marks``
    before, between and after query and document. ``pool`` is where rows lie that are not all on the device.
    ``memory`` says which kind of memory the model has in llama.cpp, and where a sequence of it can be resumed.
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
    chat_template: str
    bos_token: str
    eos_token: str
    build: str
    fingerprint: str
    vocab_type: int = 0
    pooling: str = ""
    model_aliases: tuple[str, ...] = ()
    model_tags: tuple[str, ...] = ()
    rerank_template: str = ""
    rerank_marks: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = ((), (), ())
    lora: tuple[tuple[str, float], ...] = ()
    draft_types: tuple[str, ...] = ()
    vision: bool = False
    pool: PoolPlan | None = None
    memory: str = ""


TopTokens = tuple[tuple[int, float], ...]
"""(id, natural log of the probability): the sampled token first, then the most likely ones."""


class Sampler(Protocol):
    """Chooses tokens for one request; remembers what its penalties need."""

    def sample(self, index: int) -> int:
        """A token from the logits of output ``index`` of the last evaluation."""

    def force(self, index: int, token: int) -> None:
        """Sample from output ``index`` as if no token but ``token`` were possible."""

    def top_tokens(self, token: int, n: int) -> TopTokens:
        """The probability of the last ``token`` and of the ``n`` most likely ones after sampling, without zeros.

        Only for a `Sampling` with ``post_sampling_probs``."""

    def close(self) -> None:
        """Free what it holds in llama.cpp; calling twice is harmless."""


class SequenceTokens(NamedTuple):
    """``tokens`` to be evaluated in sequence ``seq`` from ``position`` on, where it ends.

    The first ``n_sure`` of them stay, one at least; the others are drafts, which `rollback` may take back.
    """

    seq: int
    tokens: tuple[int, ...]
    position: int
    n_sure: int = 1

    @property
    def n_drafts(self) -> int:
        """How many of the tokens are drafts."""
        return len(self.tokens) - self.n_sure


@dataclass(frozen=True)
class BackendFacts:
    """What a backend can do, in tokens.

    One of its ``n_seqs`` sequences has ``n_ctx`` at most, all together ``n_cells``, one evaluation ``n_ubatch``, and
    one `Evaluator.decode` ``n_outputs`` outputs, which are ``n_seqs`` or more. A batch should have ``batch_cost`` on
    average, so that it costs little beside them; see `batch_ends`. With ``is_async`` a device evaluates on its own:
    `decode` returns when that has begun.

    `SequenceMemory.rollback` takes back ``n_rollback`` drafts of a sequence for nothing; with ``has_planes``, only if
    that had as many tokens as all others in its `decode`. It takes back ``most_drafts`` at all, with a mark; 0 for a
    memory that takes nothing back. ``draft_type`` is what `Evaluator.draft` asks, as in ``--spec-type``: "draft-mtp" or
    "draft-simple"; empty without a draft model.
    """

    n_ctx: int
    n_cells: int
    n_seqs: int
    n_ubatch: int
    n_outputs: int
    batch_cost: int = 0
    is_async: bool = False
    n_rollback: int = 0
    has_planes: bool = False
    most_drafts: int = 0
    draft_type: str = ""


class Vocabulary(Protocol):
    """What text and grammars need of a model, also while that is freed. Any thread may ask."""

    def is_end(self, token: int) -> bool:
        """Whether the model ends its reply with ``token``."""

    def piece(self, token: int) -> bytes:
        """The bytes of one generated token."""

    def check(self, sampling: Sampling) -> None:
        """Raise RequestError if ``sampling`` has a grammar that cannot be compiled; else it is ready from now on.

        It may take a second.
        """

    def prepare(self) -> None:
        """Do at once what the first grammar would have to wait for: a second or two for a large vocabulary."""


class Control(Protocol):
    """Ends evaluations early, and shows that they go on. Any thread may call, but `allow` only the engine's."""

    def interrupt(self) -> None:
        """Let the evaluation that runs now, and all later ones, fail soon, where the device can."""

    @property
    def can_preempt(self) -> bool:
        """Whether an evaluation looks often enough for `preempt` to be of use."""

    def allow(self, is_so: bool) -> None:
        """Whether evaluations from now on may fail with PreemptedError.

        What their sequences hold is undefined then, but rows before where they stood are as they were.
        """

    def preempt(self, is_wanted: bool = True) -> None:
        """End the evaluation that runs, or the next one, early, if it allows that; or do not any more."""

    @property
    def heartbeat(self) -> int:
        """Counts up while an evaluation makes progress, where the device tells."""


class Evaluator(Protocol):
    """Evaluates tokens in sequences 0 .. n_seqs - 1, and chooses the next ones.

    An evaluation appends to its sequences and replaces the outputs of the one before, which samplers and `top_tokens`
    refer to by index. One that fails raises EngineError, or UnavailableError after `Control.interrupt`, and what its
    sequences hold is undefined; but OutOfCellsError when there are not enough cells, and then they hold what they held.
    """

    @property
    def facts(self) -> BackendFacts:
        """The same as long as the model is loaded."""

    @property
    def memory(self) -> SequenceMemory:
        """What the sequences hold."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens."""

    @property
    def control(self) -> Control:
        """For other threads."""

    @property
    def streamed(self) -> StreamCounts | None:
        """What attention has read from RAM, and what it chose, since the start; None without a pool."""

    @property
    def image_bytes(self) -> int:
        """Bytes of what is kept of images, to be evaluated now or again."""

    def evaluate(
        self, seq: int, tokens: Tokens, start: int, *, output: bool = True, picture: Picture | None = None
    ) -> None:
        """Evaluate ``tokens`` as one batch from position ``start`` on; output 0, if wanted, is the last token's.

        All of them may be of a ``picture``, which is encoded if it was not."""

    def encode(self, picture: Picture) -> bool:
        """Make ready what `evaluate` needs of ``picture``; whether that was anything.

        RequestError if its file cannot be decoded.
        """

    def decode(self, items: Sequence[SequenceTokens]) -> None:
        """Evaluate one or more tokens for each of several sequences, ``n_ubatch`` in all or one each.

        There is an output after each token from an item's last sure one on, numbered through all items. An item with
        more drafts than ``n_rollback`` is marked before, so that `rollback` can go back to where it began.
        """

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        """What the draft model expects after the tokens of each item, of which none is evaluated yet: up to ``n``."""

    def output(self) -> Block:
        """A copy of output 0 of the last evaluation, for `recall`."""

    def recall(self, output: Block) -> None:
        """Have ``output`` as output 0, the only one, until the next evaluation."""

    def pin(self, seq: int, ranges: Pins) -> None:
        """From now on these rows of ``seq`` are among those that `decode` selects (`PoolPlan.select`), if it does."""

    def sampler(self, sampling: Sampling, prompt: Tokens) -> Sampler:
        """A sampler whose penalties have seen the end of ``prompt``."""

    def top_tokens(self, index: int, token: int, n: int) -> TopTokens:
        """The log-probability of ``token`` and of the ``n`` most likely tokens at output ``index``."""

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        """The embeddings of ``tokens``, shape (1, width) if the model pools them and (n, width) if not; with pooling
        "rank", a score for each class. RequestError when there are more than it takes. No sequence changes."""


class Lifecycle(Protocol):
    """Frees the model and loads it again. It is loaded when the object is made."""

    def load(self) -> None:
        """Load the model again after `unload`, empty; ModelError when that fails or it is not the same any more."""

    def unload(self) -> None:
        """Free the context and the model, and what the device holds; only `load`, `unload`, the vocabulary, the control
        and `SequenceMemory.synchronize` may be used after it."""


class Backend(Evaluator, Lifecycle, Protocol):
    """One model with its sequences. Only the engine's thread may call it once the engine runs."""

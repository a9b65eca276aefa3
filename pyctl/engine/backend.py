"""What the engine needs of a model: facts that do not change while the program runs, and three small protocols.

Whatever needs only one of them takes only that: decoding an `Evaluator`, the snapshots a `SequenceMemory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pyctl.cache import Block, SequenceMemory
from pyctl.engine.pool.pool_plan import PoolPlan, StreamCounts
from pyctl.engine.pool.selection import Pins
from pyctl.engine.sampling import Sampling
from pyctl.prompt import Picture, Tokens

__all__ = [
    "Backend",
    "EngineInfo",
    "Evaluator",
    "Lifecycle",
    "Sampler",
    "SequenceTokens",
    "TopTokens",
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

    The first ``n_sure`` of them stay, one at least; the others are drafts, which `Evaluator.keep` may take back.
    """

    seq: int
    tokens: tuple[int, ...]
    position: int
    n_sure: int = 1

    @property
    def n_drafts(self) -> int:
        """How many of the tokens are drafts."""
        return len(self.tokens) - self.n_sure


class Evaluator(Protocol):
    """Evaluates tokens in sequences 0 .. n_seqs - 1 of up to ``n_ctx`` tokens, and chooses the next ones.

    An evaluation appends to its sequences and replaces the outputs of the one before, which samplers and `top_tokens`
    refer to by index. One that fails raises EngineError, or UnavailableError after `interrupt`, and then nobody knows
    what its sequences hold; but OutOfCellsError when there are not enough cells, and then they hold what they held.
    """

    @property
    def n_ctx(self) -> int:
        """The most tokens of one sequence."""

    @property
    def n_cells(self) -> int:
        """The most tokens of all sequences together."""

    @property
    def n_seqs(self) -> int:
        """How many sequences there are."""

    @property
    def n_ubatch(self) -> int:
        """The most tokens of one evaluation."""

    @property
    def batch_cost(self) -> int:
        """How many tokens a batch should have on average, so that it costs little beside them; see `batch_ends`."""

    @property
    def is_async(self) -> bool:
        """Whether a device evaluates on its own: `decode` returns when that has begun."""

    @property
    def n_outputs(self) -> int:
        """The most outputs of one `decode`, ``n_seqs`` or more."""

    @property
    def n_rollback(self) -> int:
        """The most drafts of a sequence that `keep` takes back for nothing; see `has_planes`."""

    @property
    def has_planes(self) -> bool:
        """Whether ``n_rollback`` counts only for sequences that had as many tokens as all others of their `decode`."""

    @property
    def most_drafts(self) -> int:
        """The most drafts of a sequence that `keep` can take back at all, with a mark beyond ``n_rollback``; 0 for a
        memory that takes nothing back."""

    @property
    def streamed(self) -> StreamCounts | None:
        """What attention has read from RAM, and what it chose, since the start; None without a pool."""

    @property
    def draft_type(self) -> str:
        """What `draft` asks, as in ``--spec-type``: "draft-mtp" or "draft-simple"; empty without a draft model."""

    def evaluate(self, seq: int, tokens: Tokens, start: int, *, output: bool = True) -> None:
        """Evaluate ``tokens`` as one batch from position ``start`` on; output 0, if wanted, is the last token's."""

    def encode(self, picture: Picture) -> bool:
        """Make ready what `evaluate_picture` needs of ``picture``; whether that was anything.

        RequestError if its file cannot be decoded.
        """

    @property
    def image_bytes(self) -> int:
        """Bytes of what is kept of images, to be evaluated now or again."""

    def evaluate_picture(self, seq: int, picture: Picture, first: int, last: int, *, output: bool = False) -> None:
        """Evaluate tokens [first, last) of a prompt, which are of ``picture``, as one batch at the end of ``seq``."""

    def decode(self, items: Sequence[SequenceTokens]) -> None:
        """Evaluate one or more tokens for each of several sequences, ``n_ubatch`` in all or one each.

        There is an output after each token from an item's last sure one on, numbered through all items. An item with
        more drafts than ``n_rollback`` is marked before, so that `keep` can go back to where it began.
        """

    def output(self) -> Block:
        """A copy of output 0 of the last evaluation, for `recall`."""

    def recall(self, output: Block) -> None:
        """Have ``output`` as output 0, the only one, until the next evaluation."""

    def pin(self, seq: int, ranges: Pins) -> None:
        """From now on these rows of ``seq`` are among those that `decode` selects (`PoolPlan.select`), if it does."""

    def keep(self, seq: int, n: int) -> int:
        """Take back what the last evaluation added to ``seq`` from ``n`` on, drafts only, and once only.

        Returns how many tokens the sequence holds now: ``n``, or fewer when it had to go back to a mark. StateError
        beyond what can be taken back; the sequence is empty then.
        """

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        """What the draft model expects after the tokens of each item, of which none is evaluated yet: up to ``n``."""

    def sampler(self, sampling: Sampling, prompt: Tokens) -> Sampler:
        """A sampler whose penalties have seen the end of ``prompt``."""

    def check(self, sampling: Sampling) -> None:
        """Raise RequestError if ``sampling`` has a grammar that cannot be compiled; else it is ready from now on.

        Any thread may ask, also while the model is freed. It may take a second.
        """

    def interrupt(self) -> None:
        """Let the evaluation that runs now, and all later ones, fail soon, where the device can. Any thread."""

    @property
    def can_break(self) -> bool:
        """Whether an evaluation looks often enough for `break_off` to be of use."""

    def allow_break(self, is_so: bool) -> None:
        """Whether evaluations from now on may fail with BrokenOffError.

        What their sequences hold nobody knows then, but rows before where they stood are as they were.
        """

    def break_off(self, is_wanted: bool = True) -> None:
        """End the evaluation that runs, or the next one, early, if it allows that; or do not any more. Any thread."""

    @property
    def n_beats(self) -> int:
        """Counts up while an evaluation makes progress, where the device tells. Any thread."""

    def prepare(self) -> None:
        """Do at once what the first grammar would have to wait for: a second or two for a large vocabulary."""

    def top_tokens(self, index: int, token: int, n: int) -> TopTokens:
        """The log-probability of ``token`` and of the ``n`` most likely tokens at output ``index``."""

    def is_end(self, token: int) -> bool:
        """Whether the model ends its reply with ``token``."""

    def piece(self, token: int) -> bytes:
        """The bytes of one generated token."""

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        """The embeddings of ``tokens``, shape (1, width) if the model pools them and (n, width) if not; with pooling
        "rank", a score for each class. RequestError when there are more than it takes. No sequence changes."""


class Lifecycle(Protocol):
    """Frees the model and loads it again. It is loaded when the object is made."""

    def load(self) -> None:
        """Load the model again after `unload`, empty; ModelError when that fails or it is not the same any more."""

    def unload(self) -> None:
        """Free the context and the model; only `load`, `unload` and `synchronize` may be called after it.

        Nothing is held any more."""


class Backend(Evaluator, SequenceMemory, Lifecycle, Protocol):
    """One model with its sequences. Only the engine's thread may call it once the engine runs."""

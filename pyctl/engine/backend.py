"""What is loaded: facts about the model and the context that do not change while the program runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.snapshot import Block, Span
from pyctl.engine.sampling import Sampling
from pyctl.prompt import Tokens

__all__ = ["Backend", "EngineInfo", "Sampler", "SavedSequence", "TopTokens"]


@dataclass(frozen=True)
class EngineInfo:
    """Sizes are tokens unless the name says otherwise; ``model_size`` is bytes, ``n_params`` weights.

    ``fingerprint`` is equal for two processes exactly when their saved rows and states may be mixed. ``vocab_type`` is
    llama.cpp's number. ``pooling`` says how embeddings are made of a text, empty when there are none.
    ``lora`` are adapters, (path, scale).
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
    lora: tuple[tuple[str, float], ...] = ()


TopTokens = tuple[tuple[int, float], ...]

"""(id, natural log of the probability): the sampled token first, then the most likely ones."""


@dataclass(frozen=True)
class SavedSequence:
    """What a file held: the tokens of the sequence, its exact batch ends, and how many bytes it has."""

    tokens: Tokens
    ends: tuple[int, ...]
    n_bytes: int


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


class Backend(Protocol):
    """Evaluates tokens and moves rows and state of sequences 0 .. n_seqs - 1.

    Only the thread that made it may call it. Failing evaluation raises EngineError; rows or a state that do not fit
    raise StateError before the sequence is changed.
    """

    @property
    def kind(self) -> Literal["attention", "hybrid", "opaque"]: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def n_seqs(self) -> int: ...
    @property
    def n_ubatch(self) -> int: ...

    def evaluate(self, seq: int, tokens: Tokens, start: int, *, output: bool = True) -> None:
        """Evaluate ``tokens`` as one batch from position ``start`` on; output 0, if wanted, is the last token's."""

    def decode(self, items: Sequence[tuple[int, int, int]]) -> None:
        """Evaluate one token for each (seq, token, position); output i belongs to item i."""

    def sampler(self, sampling: Sampling, prompt: Tokens) -> Sampler:
        """A sampler whose penalties have seen the end of ``prompt``."""

    def check(self, sampling: Sampling) -> None:
        """Raise RequestError if ``sampling`` has a grammar that cannot be compiled; else it is ready from now on.

        Any thread may ask, also while the model is freed. It may take a second.
        """

    def top_tokens(self, index: int, token: int, n: int) -> TopTokens:
        """The log-probability of ``token`` and of the ``n`` most likely tokens at output ``index``."""

    def is_end(self, token: int) -> bool:
        """Whether the model ends its reply with ``token``."""

    def piece(self, token: int) -> bytes:
        """The bytes of one generated token."""

    def rows_size(self, first: int, last: int) -> int:
        """Bytes of the block that holds rows [first, last); 0 if empty or for kind ``opaque``."""

    def state_size(self, seq: int) -> int:
        """Bytes of the state block at the end of ``seq``; 0 for kind ``attention``."""

    def save_rows(self, seq: int, first: int, last: int) -> Block:
        """Rows [first, last) of ``seq``; empty for kind ``opaque``. The bytes are there after `synchronize`."""

    def save_state(self, seq: int, n: int) -> Block:
        """The state of ``seq``, which ends at ``n``; empty for kind ``attention``. There after `synchronize`."""

    def synchronize(self) -> None:
        """Wait until every block that was saved is complete. What loads blocks need not wait."""

    def load_rows(self, seq: int, first: int, spans: Sequence[Span]) -> None:
        """Append rows to ``seq``, which ends at ``first``."""

    def load_state(self, seq: int, n: int, state: Block) -> None:
        """Replace the state of ``seq`` by one saved at ``n``."""

    def rewind(self, seq: int, n: int) -> None:
        """Drop rows from ``n`` on; a hybrid needs its state at ``n`` loaded next."""

    def clear(self, seq: int) -> None:
        """Drop everything ``seq`` holds."""

    def save_file(self, seq: int, path: Path, tokens: Tokens, ends: Sequence[int]) -> int:
        """Write ``seq``, which holds ``tokens``, to ``path``; returns the bytes of the file.

        ``ends`` are the batch ends that a cold run would have, too. Raises StateError.
        """

    def load_file(self, seq: int, path: Path) -> SavedSequence:
        """Fill ``seq``, which is empty, from such a file. Raises StateError, and then nobody knows what it holds."""

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        """The embeddings of ``tokens``, shape (1, width) if the model pools them and (n, width) if not.

        Raises RequestError when there are more tokens than one batch holds. Leaves the sequences as they are.
        """

    def unload(self) -> None:
        """Free the context and the model; nothing but `load` may be called after it."""

    def load(self) -> None:
        """Load the model again after `unload`, empty; ModelError when that fails or it is not the same any more."""

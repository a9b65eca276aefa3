"""What is loaded: facts about the model and the context that do not change while the program runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineInfo"]


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

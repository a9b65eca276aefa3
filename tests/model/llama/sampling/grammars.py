"""The tokens that a grammar allows next: by pyctl's matcher, and by llama.cpp's own sampler."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api

from pyctl.errors import RequestError
from pyctl.llama.loader import Loaded
from pyctl.llama.sampling.grammar import Candidates, GrammarCompiler


def compiler_of(model: Loaded) -> GrammarCompiler:
    return GrammarCompiler(model.tokenizer)


def allowed_by(matcher: Any, model: Loaded) -> Any:
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(mask, count=model.tokenizer.n_vocab, bitorder="little").astype(bool)


class LlamaGrammar:
    """llama.cpp's own sampler for a grammar that cannot hurt it."""

    def __init__(self, model: Loaded, grammar: str) -> None:
        self._vocab = model.tokenizer.vocab
        self._sampler = api.llama_sampler_init_grammar(self._vocab, grammar.encode(), b"root")
        assert self._sampler, grammar
        self._candidates = Candidates(model.tokenizer.n_vocab)
        self._logits = np.zeros(model.tokenizer.n_vocab, np.float32)

    def allowed(self) -> Any:
        self._candidates.fill(self._logits)
        self._candidates.apply(self._sampler)
        return self._candidates.remaining["logit"] == 0.0

    def read(self, token: int) -> None:
        api.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        api.llama_sampler_free(self._sampler)


def comparable(model: Loaded) -> Any:
    """Return tokens of whole characters; how halves of characters match is left to each."""
    tokenizer = model.tokenizer
    controls = tokenizer.control_tokens()
    ends = tokenizer.end_tokens()

    def is_text(token: int, piece: bytes) -> bool:
        try:
            return (
                bool(piece)
                and b"\0" not in piece
                and piece.decode() != ""
                and token not in controls
            )
        except UnicodeDecodeError:
            return False

    return np.array([is_text(t, piece) or t in ends for t, piece in enumerate(tokenizer.pieces())])


def compare(
    model: Loaded, compiler: GrammarCompiler, grammar: str, seed: int, n_steps: int = 12
) -> None:
    """Check that both allow the same tokens on a random walk."""
    tokenizer = model.tokenizer
    ends = tokenizer.end_tokens()
    known = comparable(model)
    try:
        matcher = compiler.matcher(grammar, "gbnf")
    except RequestError:
        reference = LlamaGrammar(model, grammar)
        assert not reference.allowed()[known].any(), grammar
        reference.close()
        return
    reference = LlamaGrammar(model, grammar)
    rng = random.Random(seed)
    try:
        said = b""
        for _ in range(n_steps):
            ours = allowed_by(matcher, model)
            theirs = reference.allowed()
            different = [tokenizer.piece(int(t)) for t in np.flatnonzero((ours != theirs) & known)]
            assert not different, (grammar, said, different[:10], [ours[t] for t in sorted(ends)])
            choices = [int(t) for t in np.flatnonzero(ours & known) if t not in ends]
            if not choices:
                return
            token = rng.choice(choices)
            matcher.consume_token(token)
            reference.read(token)
            said += tokenizer.piece(token)
    finally:
        reference.close()

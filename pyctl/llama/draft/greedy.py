"""Batches of draft models, and the most likely tokens after them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyctl.llama.library.batch import Batch
from pyctl.llama.library.bindings import api

__all__ = ["Greedy"]

N_BEST = 10
"""Most likely tokens over which a draft's probability is normalised, as in llama-server."""


class Greedy:
    """A batch for ``ctx``, and the most likely token at each of its outputs.

    Tokens outside the trunk's ``n_vocab`` count as none, and those below probability ``p_min``
    among the N_BEST most likely.
    """

    def __init__(self, ctx: Any, n_vocab: int, p_min: float = 0.0) -> None:
        self._ctx = ctx
        self._n_vocab = n_vocab
        self._p_min = p_min
        self._n_logits = int(
            api.llama_vocab_n_tokens(api.llama_model_get_vocab(api.llama_get_model(ctx)))
        )
        self._n_seqs = int(api.llama_n_seq_max(ctx))
        batch = self._batch = Batch(max(int(api.llama_n_ubatch(ctx)), self._n_seqs))
        self.put = batch.put
        self._samplers: list[Any] = []

    def sample_on_device(self) -> None:
        """Sample on the device, if it can and no probability is wanted, instead of copying
        logits.
        """
        for seq in range(0 if self._p_min else self._n_seqs):
            sampler = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
            api.llama_sampler_chain_add(sampler, api.llama_sampler_init_greedy())
            self._samplers.append(sampler)
            api.llama_set_sampler(self._ctx, seq, sampler)

    def decode(self, n: int) -> int:
        """Evaluate the first ``n`` tokens of the batch; return llama_decode's result."""
        self._batch.struct.n_tokens = n
        return int(api.llama_decode(self._ctx, self._batch.struct))

    def choose(self, output: int) -> int:
        """Return the most likely token at ``output``, an index of the batch; -1 for none."""
        token = api.LLAMA_TOKEN_NULL
        if self._samplers:
            token = int(api.llama_get_sampled_token_ith(self._ctx, output))
        if token == api.LLAMA_TOKEN_NULL:
            pointer = api.llama_get_logits_ith(self._ctx, output)
            logits = np.ctypeslib.as_array(pointer, (self._n_logits,))
            token = int(logits.argmax())
            if self._p_min:
                best = np.partition(logits, -N_BEST)[-N_BEST:].astype(np.float64)
                if 1 / np.exp(best - logits[token]).sum() < self._p_min:
                    return -1
        return token if token < self._n_vocab else -1

    def close(self) -> None:
        """Free the samplers, before the context is freed."""
        for seq, sampler in enumerate(self._samplers):
            api.llama_set_sampler(self._ctx, seq, None)
            api.llama_sampler_free(sampler)

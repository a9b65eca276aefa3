"""A chain of llama.cpp's samplers for one request, without the links that would change nothing."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable
from typing import Any

from llama_cpp import llama_cpp as api

from pyctl.engine.llama.candidates import Candidates
from pyctl.engine.llama.grammar import LlamaGrammar
from pyctl.engine.sampling import RANDOM_SEED, Sampling
from pyctl.errors import RequestError
from pyctl.prompt import Tokens

__all__ = ["LlamaSampler"]

MIROSTAT_M = 100
"""Tokens that mirostat 1 looks at to estimate the distribution; llama.cpp's own tools use the same."""


class LlamaSampler:
    """Samples from the context's outputs; penalties have seen the end of ``prompt``.

    ``end_tokens`` are forbidden when the request ignores the end of the reply. A grammar that does not parse raises
    RequestError.
    """

    def __init__(self, model: Any, ctx: Any, sampling: Sampling, prompt: Tokens, end_tokens: frozenset[int]) -> None:
        self._ctx = ctx
        self._vocab = api.llama_model_get_vocab(model)
        self._n_vocab = int(api.llama_vocab_n_tokens(self._vocab))
        self._eos = int(api.llama_vocab_eos(self._vocab))
        self._seed = secrets.randbits(32) if sampling.seed == RANDOM_SEED else sampling.seed
        self._chain: Any = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        self._grammar: LlamaGrammar | None = None
        self._candidates: Candidates | None = None
        try:
            if sampling.grammar:
                self._grammar = LlamaGrammar(self._vocab, sampling)
                self._candidates = Candidates(self._n_vocab)
            self._build(sampling, end_tokens)
        except BaseException:
            self.close()
            raise
        window = max(_seen(sampling.repeat_last_n, prompt), _seen(sampling.dry_penalty_last_n, prompt))
        if window and (_penalises(sampling) or sampling.dry_multiplier != 0.0):
            for token in prompt[-window:].tolist():
                api.llama_sampler_accept(self._chain, token)

    def sample(self, index: int) -> int:
        """A token from output ``index`` of the last evaluation; the chain and the grammar remember it.

        A grammar is asked about one token, and about all of them only if it refuses that, since a question about all
        takes longer than everything else here (common/sampling.cpp does the same). If it allows none, the reply ends.
        """
        grammar, candidates = self._grammar, self._candidates
        if grammar is None or candidates is None:
            return int(api.llama_sampler_sample(self._chain, self._ctx, index))
        candidates.fill(api.llama_get_logits_ith(self._ctx, index))
        token = candidates.choose(self._chain)
        if token is None or not grammar.allows(token):
            candidates.fill(api.llama_get_logits_ith(self._ctx, index))
            grammar.restrict(candidates)
            token = candidates.choose(self._chain)
            if token is None:
                return self._eos
        grammar.accept(token)
        api.llama_sampler_accept(self._chain, token)
        return token

    def close(self) -> None:
        """Free the chain and the grammar."""
        if self._grammar is not None:
            self._grammar.close()
        if self._chain is not None:
            api.llama_sampler_free(self._chain)
            self._chain = None

    def _add(self, sampler: Any) -> None:
        api.llama_sampler_chain_add(self._chain, sampler)

    def _build(self, sampling: Sampling, end_tokens: frozenset[int]) -> None:
        bias = dict(sampling.logit_bias)
        if sampling.ignore_eos:
            bias.update(dict.fromkeys(end_tokens, float("-inf")))
        if any(not 0 <= token < self._n_vocab for token in bias):
            raise RequestError(f"logit_bias names a token outside [0, {self._n_vocab})")
        if bias:
            entries = (api.llama_logit_bias * len(bias))(*(api.llama_logit_bias(*item) for item in bias.items()))
            self._add(api.llama_sampler_init_logit_bias(self._n_vocab, len(bias), entries))
        if sampling.mirostat:
            self._add(api.llama_sampler_init_temp(sampling.temperature))
            self._add(self._mirostat(sampling))
            return
        links = self._links(sampling)
        for name in sampling.samplers:
            if name != "temperature" or sampling.temperature > 0.0:
                links[name]()
        if sampling.temperature <= 0.0:
            self._add(api.llama_sampler_init_greedy())
        else:
            self._add(api.llama_sampler_init_dist(self._seed))

    def _mirostat(self, sampling: Sampling) -> Any:
        tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
        if sampling.mirostat == 1:
            return api.llama_sampler_init_mirostat(self._n_vocab, self._seed, tau, eta, MIROSTAT_M)
        return api.llama_sampler_init_mirostat_v2(self._seed, tau, eta)

    def _links(self, s: Sampling) -> dict[str, Callable[[], None]]:
        """For each sampler by name, what adds it to the chain unless its values turn it off."""

        def when(active: bool, make: Callable[[], Any]) -> Callable[[], None]:
            return lambda: self._add(make()) if active else None

        keep = s.min_keep
        return {
            "penalties": when(
                _penalises(s),
                lambda: api.llama_sampler_init_penalties(
                    self._n_vocab, s.repeat_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
                ),
            ),
            "dry": when(s.dry_multiplier != 0.0, lambda: self._dry(s)),
            "top_n_sigma": when(s.top_n_sigma > 0.0, lambda: api.llama_sampler_init_top_n_sigma(s.top_n_sigma)),
            "top_k": when(s.top_k > 0, lambda: api.llama_sampler_init_top_k(s.top_k)),
            "typ_p": when(s.typical_p < 1.0, lambda: api.llama_sampler_init_typical(s.typical_p, keep)),
            "top_p": when(s.top_p < 1.0, lambda: api.llama_sampler_init_top_p(s.top_p, keep)),
            "min_p": when(s.min_p > 0.0, lambda: api.llama_sampler_init_min_p(s.min_p, keep)),
            "xtc": when(
                s.xtc_probability > 0.0,
                lambda: api.llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, keep, self._seed),
            ),
            "temperature": when(
                True, lambda: api.llama_sampler_init_temp_ext(s.temperature, s.dynatemp_range, s.dynatemp_exponent)
            ),
        }

    def _dry(self, s: Sampling) -> Any:
        words = [word.encode() for word in s.dry_sequence_breakers]
        breakers = (ctypes.c_char_p * len(words))(*words)
        return api.llama_sampler_init_dry(
            self._vocab, s.dry_multiplier, s.dry_base, s.dry_allowed_length, s.dry_penalty_last_n, breakers, len(words)
        )


def _penalises(s: Sampling) -> bool:
    return s.repeat_last_n != 0 and (s.repeat_penalty, s.frequency_penalty, s.presence_penalty) != (1.0, 0.0, 0.0)


def _seen(last_n: int, prompt: Tokens) -> int:
    return int(prompt.size) if last_n < 0 else min(last_n, int(prompt.size))

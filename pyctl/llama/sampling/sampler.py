"""Chains of llama.cpp's samplers, without samplers that have no effect."""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyctl.engine.backend import TopTokens
from pyctl.engine.sampling import RANDOM_SEED, Sampling
from pyctl.errors import RequestError
from pyctl.llama.library.batch import Outputs
from pyctl.llama.library.bindings import api
from pyctl.llama.library.llama_tokenizer import LlamaTokenizer
from pyctl.llama.sampling.grammar import Candidates, Grammar, GrammarCompiler
from pyctl.prompt import Tokens, as_tokens

__all__ = ["DrySamplers", "LlamaSampler", "LlamaVocabulary", "top_logprobs"]

MIROSTAT_M = 100
"""Tokens with which mirostat 1 estimates the distribution, as in llama.cpp's tools."""


class DrySamplers:
    """A cache of DRY samplers by parameters. Thread-safe; uses the vocabulary of ``tokenizer``
    until `close`.

    Creating one is slow, since llama.cpp searches the vocabulary for each breaker; copying is fast.
    """

    def __init__(self, tokenizer: LlamaTokenizer) -> None:
        self._vocab: Any = tokenizer.vocab
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def __del__(self) -> None:
        for made in self._known.values():
            api.llama_sampler_free(made)

    def copy(self, s: Sampling, n_last: int) -> Any:
        """Return a sampler for ``s`` over the last ``n_last`` tokens, owned by the caller. None
        after `close`.
        """
        key = (s.dry_multiplier, s.dry_base, s.dry_allowed_length, n_last, s.dry_sequence_breakers)
        with self._lock:
            if key not in self._known:
                if self._vocab is None:
                    return None
                words = [word.encode("utf-8", "replace") for word in s.dry_sequence_breakers]
                breakers = (ctypes.c_char_p * len(words))(*words)
                self._known[key] = api.llama_sampler_init_dry(
                    self._vocab, *key[:4], breakers, len(words)
                )
                while len(self._known) > _MAX_KNOWN:
                    api.llama_sampler_free(self._known.popitem(last=False)[1])
            self._known.move_to_end(key)
            return api.llama_sampler_clone(self._known[key])

    def create(self, s: Sampling, n_ctx: int) -> None:
        """Create the sampler for ``s`` in a context of ``n_ctx`` tokens, if DRY is on."""
        if s.dry_multiplier != 0.0 and (made := self.copy(s, _last(s.dry_penalty_last_n, n_ctx))):
            api.llama_sampler_free(made)

    def close(self) -> None:
        """Release the vocabulary."""
        with self._lock:
            self._vocab = None


class LlamaVocabulary:
    """The `Vocabulary` of ``tokenizer``, used until `close`, for contexts of ``n_ctx`` tokens."""

    def __init__(self, tokenizer: LlamaTokenizer, n_ctx: int) -> None:
        self.grammars = GrammarCompiler(tokenizer)
        self.dry = DrySamplers(tokenizer)
        # No set at the start: to find all takes a call for each of 250,000 tokens.
        self.is_end = cache(tokenizer.is_end)
        self.end_tokens = tokenizer.end_tokens
        self.piece = partial(tokenizer.piece, special=False)
        self._tokenizer = tokenizer
        self._n_ctx = n_ctx

    def check(self, sampling: Sampling) -> None:
        if sampling.grammar:
            self.grammars.matcher(sampling.grammar, sampling.grammar_kind)
        self.dry.create(sampling, self._n_ctx)

    def close(self) -> None:
        """Release the model, before its owner frees it."""
        self.grammars.close()
        self.dry.close()


_MAX_KNOWN = 8


def _last(n: int, n_ctx: int) -> int:
    """Return ``n`` limited to the context, which -1 means; llama.cpp allocates memory for all of
    them.
    """
    return n_ctx if n < 0 else min(n, n_ctx)


class LlamaSampler:
    """The `Sampler` of ``outputs``, tokens of ``vocab``; penalties include the end of ``prompt``.

    ``words`` compiles the grammar; RequestError if it is invalid.
    """

    def __init__(
        self,
        vocab: Any,
        outputs: Outputs,
        sampling: Sampling,
        prompt: Tokens,
        words: LlamaVocabulary,
    ) -> None:
        """Build the chain of samplers, and let it accept the end of ``prompt``. Raises RequestError
        if the grammar or a token of logit_bias is invalid.

        The chain is allocated first, so an error after that frees it. The prompt comes last, when
        the penalties that count its tokens are in the chain.
        """
        self._dry_samplers = words.dry
        self._outputs = outputs
        self._vocab = vocab
        self._n_vocab = int(api.llama_vocab_n_tokens(self._vocab))
        self._eos = int(api.llama_vocab_eos(self._vocab))
        self._seed = secrets.randbits(32) if sampling.seed == RANDOM_SEED else sampling.seed
        self._n_ctx = int(api.llama_n_ctx_seq(outputs.ctx))
        self._chain: Any = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        self._grammar: Grammar | None = None
        self._candidates: Candidates | None = None
        self._asks_probs = sampling.post_sampling_probs
        self._n_best = 0  # the chain depends only on this many most likely tokens; 0: on all
        self._n_groups = 0  # of tokens, in the search for these
        self._biased = as_tokens([])  # and on these, ascending
        self._lowered: frozenset[int] = (
            frozenset()
        )  # with `_n_best` 1: the tokens with a negative bias
        try:
            if sampling.grammar:
                self._grammar = Grammar(self._vocab, sampling, words.grammars)
            self._build(sampling, words)
            if self._grammar is not None or self._asks_probs or self._n_best > 1:
                self._candidates = Candidates(self._n_vocab)
        except BaseException:
            self.close()
            raise
        window = max(
            _last(sampling.repeat_last_n, self._n_ctx),
            _last(sampling.dry_penalty_last_n, self._n_ctx),
        )
        if window and (_penalises(sampling) or sampling.dry_multiplier != 0.0):
            for token in prompt[-window:].tolist():
                api.llama_sampler_accept(self._chain, token)

    @property
    def seed(self) -> int:
        return self._seed

    def sample(self, index: int) -> int:
        """Sample from output ``index``; the chain and the grammar record the token.

        The grammar first checks one sampled token, and restricts all candidates only if it rejects
        that, which is far slower (as common/sampling.cpp). If it allows no token, returns EOS.
        """
        grammar = self._grammar
        outputs = self._outputs
        is_bound = grammar is not None and not grammar.is_asleep
        if not (is_bound or self._asks_probs or self._n_best or outputs.is_recalled):
            sampled = int(
                api.llama_sampler_sample(self._chain, outputs.ctx, outputs.batch_index(index))
            )
            if grammar is not None:
                grammar.accept(sampled)
            return sampled
        token = self._chosen(index)
        if is_bound:
            assert grammar is not None
            if token is None or not grammar.allows(token):
                candidates = self._filled(index)
                grammar.restrict(candidates)
                token = candidates.choose(self._chain)
        if token is None:
            return self._eos
        self._accept(token)
        return token

    def _chosen(self, index: int) -> int | None:
        """Return the token that the chain chooses."""
        if (
            self._n_best == 1
            and (token := int(self._outputs.row(index).argmax())) not in self._lowered
        ):
            return token
        if self._n_best == 1 or not self._n_groups:
            return self._filled(index).choose(self._chain)
        candidates = self._candidates = self._candidates or Candidates(self._n_vocab)
        candidates.fill_best(self._outputs.row(index), self._n_groups, self._n_best, self._biased)
        return candidates.choose(self._chain)

    def _filled(self, index: int) -> Candidates:
        """Return candidates of all tokens."""
        candidates = self._candidates = self._candidates or Candidates(self._n_vocab)
        candidates.fill(self._outputs.row(index))
        return candidates

    @property
    def is_constrained(self) -> bool:
        return self._grammar is not None and not self._grammar.is_asleep

    def force(self, index: int, token: int) -> None:
        """Sample as if only ``token`` were possible, so that the random generator advances as in
        `sample`.
        """
        candidates = self._filled(index)
        candidates.keep_only(token)
        candidates.apply(self._chain)
        self._accept(token)

    def _accept(self, token: int) -> None:
        if self._grammar is not None:
            self._grammar.accept(token)
        if self._n_best != 1:  # else no sampler of the chain depends on earlier tokens
            api.llama_sampler_accept(self._chain, token)

    def top_tokens(self, token: int, n: int) -> TopTokens:
        """Return the probabilities of ``token`` and of the ``n`` most likely tokens after the last
        sampling.
        """
        return self._candidates.top(token, n) if self._candidates is not None else ()

    def close(self) -> None:
        """Free the chain."""
        if self._chain is not None:
            api.llama_sampler_free(self._chain)
            self._chain = None

    def _add(self, sampler: Any) -> None:
        api.llama_sampler_chain_add(self._chain, sampler)

    def _build(self, sampling: Sampling, words: LlamaVocabulary) -> None:
        """Add the samplers of ``sampling`` to the chain. Raises RequestError for a token of
        logit_bias outside the vocabulary.

        The bias is the first sampler, so that all others see the biased logits.
        """
        bias = {**dict(sampling.logit_bias), **dict.fromkeys(self._suppressed(), float("-inf"))}
        if sampling.ignore_eos:
            bias.update(dict.fromkeys(words.end_tokens(), float("-inf")))
        if any(not 0 <= token < self._n_vocab for token in bias):
            raise RequestError(f"logit_bias names a token outside [0, {self._n_vocab})")
        if not (sampling.mirostat or sampling.post_sampling_probs):
            self._n_best = n_best(sampling)
        if self._n_best == 1 and all(value <= 0.0 for value in bias.values()):
            self._lowered = frozenset(bias)
        elif self._n_best and bias:  # biased tokens may displace as many of the most likely
            self._n_best += len(bias)
            self._biased = as_tokens(sorted(bias))
        self._n_groups = _n_groups(self._n_vocab, self._n_best)
        if bias:
            entries = (api.llama_logit_bias * len(bias))(
                *(api.llama_logit_bias(*item) for item in bias.items())
            )
            self._add(api.llama_sampler_init_logit_bias(self._n_vocab, len(bias), entries))
        if sampling.mirostat:
            self._add(api.llama_sampler_init_temp(sampling.temperature))
            self._add(self._mirostat(sampling))
            return
        links = self._sampler_adders(sampling)
        # At temperature 0 a greedy sampler suffices, unless the request requires probabilities.
        greedy = (
            sampling.temperature <= 0.0
            and "temperature" in sampling.samplers
            and not sampling.post_sampling_probs
        )
        for name in sampling.samplers:
            if name not in ("temperature", "adaptive_p") or not greedy:
                links[name]()
        if greedy:
            self._add(api.llama_sampler_init_greedy())
        elif "adaptive_p" in sampling.samplers:
            self._add(
                api.llama_sampler_init_adaptive_p(
                    sampling.adaptive_target, sampling.adaptive_decay, self._seed
                )
            )
        else:
            self._add(api.llama_sampler_init_dist(self._seed))

    def _suppressed(self) -> list[int]:
        """Return the tokens that the model's file forbids."""
        if not hasattr(api, "llama_vocab_get_suppress_tokens"):  # releases before 0.3.35
            return []
        n = ctypes.c_int32()
        tokens = api.llama_vocab_get_suppress_tokens(self._vocab, ctypes.byref(n))
        return [int(token) for token in tokens[: n.value]] if tokens else []

    def _mirostat(self, sampling: Sampling) -> Any:
        tau = sampling.mirostat_tau
        eta = sampling.mirostat_eta
        if sampling.mirostat == 1:
            return api.llama_sampler_init_mirostat(self._n_vocab, self._seed, tau, eta, MIROSTAT_M)
        return api.llama_sampler_init_mirostat_v2(self._seed, tau, eta)

    def _sampler_adders(self, s: Sampling) -> dict[str, Callable[[], None]]:
        """Return by name functions that add a sampler to the chain unless its values disable it."""

        def when(active: bool, make: Callable[[], Any]) -> Callable[[], None]:
            return lambda: self._add(make()) if active else None

        keep = s.min_keep
        n_ctx = self._n_ctx
        return {
            "penalties": when(
                _penalises(s),
                lambda: api.llama_sampler_init_penalties(
                    self._n_vocab,
                    _last(s.repeat_last_n, n_ctx),
                    s.repeat_penalty,
                    s.frequency_penalty,
                    s.presence_penalty,
                ),
            ),
            "dry": when(
                s.dry_multiplier != 0.0,
                lambda: self._dry_samplers.copy(s, _last(s.dry_penalty_last_n, n_ctx)),
            ),
            "top_n_sigma": when(
                s.top_n_sigma > 0.0, lambda: api.llama_sampler_init_top_n_sigma(s.top_n_sigma)
            ),
            "top_k": when(s.top_k > 0, lambda: api.llama_sampler_init_top_k(s.top_k)),
            "typ_p": when(
                s.typical_p < 1.0, lambda: api.llama_sampler_init_typical(s.typical_p, keep)
            ),
            "top_p": when(s.top_p < 1.0, lambda: api.llama_sampler_init_top_p(s.top_p, keep)),
            "min_p": when(s.min_p > 0.0, lambda: api.llama_sampler_init_min_p(s.min_p, keep)),
            "xtc": when(
                s.xtc_probability > 0.0,
                lambda: api.llama_sampler_init_xtc(
                    s.xtc_probability, s.xtc_threshold, keep, self._seed
                ),
            ),
            "infill": when(True, lambda: api.llama_sampler_init_infill(self._vocab)),
            "adaptive_p": when(False, lambda: None),
            "temperature": when(
                True,
                lambda: api.llama_sampler_init_temp_ext(
                    s.temperature, s.dynatemp_range, s.dynatemp_exponent
                ),
            ),
        }


def top_logprobs(logits: NDArray[np.float32], token: int, n: int) -> TopTokens:
    """Return the log-probabilities of ``token`` and the ``n`` most likely tokens; ``logits`` has
    shape (n_vocab,).
    """
    logprobs = logits.astype(np.float64)
    logprobs -= logprobs.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    n = min(n, logprobs.size)
    best = np.argpartition(-logprobs, n - 1)[:n]
    best = best[np.argsort(-logprobs[best], kind="stable")]
    return ((token, float(logprobs[token])), *((int(i), float(logprobs[i])) for i in best))


def n_best(s: Sampling) -> int:
    """Return how many of the most likely tokens determine the choice, 0 for unknown.

    At temperature 0 it is 1, since truncating samplers keep the first. With top-k first in the
    chain it is k, plus the number of tokens that penalties before it may lower.
    """
    penalised = s.repeat_last_n if "penalties" in s.samplers and _penalises(s) else 0
    only_lowers = (
        s.repeat_penalty >= 1.0 and s.frequency_penalty >= 0.0 and s.presence_penalty >= 0.0
    )
    if (
        penalised < 0
        or (penalised and not only_lowers)
        or ("dry" in s.samplers and s.dry_multiplier != 0.0)
    ):
        return 0
    changes = {
        "typ_p": s.typical_p < 1.0,
        "xtc": s.xtc_probability > 0.0,
        "infill": True,
        "top_n_sigma": s.top_n_sigma > 0.0,
        "top_p": s.top_p < 1.0,
        "min_p": s.min_p > 0.0,
        "temperature": True,
        "adaptive_p": True,
    }
    is_greedy = s.temperature <= 0.0 and "temperature" in s.samplers and not penalised
    if is_greedy and not any(
        changes[name] for name in ("typ_p", "xtc", "infill") if name in s.samplers
    ):
        return 1
    for name in s.samplers:
        if name == "top_k" and s.top_k > 0:
            return s.top_k + penalised
        if changes.get(name, False):
            return 0
    return 0


_GROUPS = 512
_SMALLEST_GROUP = 32
"""More groups than there are candidates, of as many tokens as one pass needs to be fast."""


def _n_groups(n_vocab: int, n_best: int) -> int:
    """Return the number of groups in the search for the ``n_best`` most likely tokens; 0: look at
    all tokens.
    """
    n = max(_GROUPS, 4 * n_best) if n_best > 1 else 0
    return n if n and n_vocab // n >= _SMALLEST_GROUP else 0


def _penalises(s: Sampling) -> bool:
    return s.repeat_last_n != 0 and (s.repeat_penalty, s.frequency_penalty, s.presence_penalty) != (
        1.0,
        0.0,
        0.0,
    )

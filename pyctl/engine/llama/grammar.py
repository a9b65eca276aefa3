"""Grammars that bind a reply, of two kinds, and the array of tokens that they and llama.cpp's samplers work on."""

from __future__ import annotations

import ctypes
import itertools
import logging
import re
import threading
from collections import OrderedDict
from copy import copy
from typing import Any, Protocol, TypeVar

import llguidance
import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from pyctl.engine.llama.llama_tokenizer import LlamaTokenizer, read_piece
from pyctl.engine.llama.trigger import TriggerWatch
from pyctl.engine.sampling import Sampling
from pyctl.errors import RequestError, UnavailableError

__all__ = ["Candidates", "Grammar", "GrammarCompiler"]

R = TypeVar("R")

log = logging.getLogger(__name__)

_ENTRY = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Candidates:
    """One entry per token that is left, at first all ``n_vocab``."""

    def __init__(self, n_vocab: int) -> None:
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._entries = np.zeros(n_vocab, _ENTRY)
        self._data: Any = ctypes.cast(self._entries.ctypes.data, api.llama_token_data_p)
        self.array = api.llama_token_data_array(self._data, n_vocab, -1, False)

    @property
    def left(self) -> NDArray[Any]:
        """The entries that are left, as (id, logit, p)."""
        return self._entries[: self.array.size]

    def fill(self, logits: Any) -> None:
        """Begin with all tokens; ``logits`` is a pointer to one float per token."""
        self._entries["id"] = self._ids
        self._entries["logit"] = np.ctypeslib.as_array(logits, self._ids.shape)
        self._entries["p"] = 0.0
        self.array.data, self.array.size, self.array.selected, self.array.sorted = self._data, self._ids.size, -1, False

    def keep_only(self, token: int) -> None:
        """Make every token but ``token`` impossible."""
        self.left["logit"][self.left["id"] != token] = -np.inf

    def fill_one(self, token: int) -> None:
        """Begin with ``token`` alone."""
        self._entries[0] = (token, 1.0, 0.0)
        self.array.data, self.array.size, self.array.selected, self.array.sorted = self._data, 1, -1, False

    def forbid(self, forbidden: NDArray[np.bool_]) -> None:
        """Make every token impossible whose entry in ``forbidden``, shape (n_vocab,), is true."""
        self.left["logit"][forbidden[self.left["id"]]] = -np.inf

    def apply(self, sampler: Any) -> None:
        """Let ``sampler`` change, sort or shorten the array, or select an entry."""
        api.llama_sampler_apply(sampler, ctypes.byref(self.array))

    def choose(self, chain: Any) -> int | None:
        """The token that ``chain`` selects; None if all that were left are impossible."""
        self.apply(chain)
        chosen = self._entries[self.array.selected]
        return int(chosen["id"]) if self.array.selected >= 0 and chosen["logit"] > -np.inf else None

    def top(self, token: int, n: int) -> tuple[tuple[int, float], ...]:
        """(id, probability) of ``token``, then of the ``n`` most likely ones that are left, without zeros."""
        left = self.left
        order = np.argsort(-left["p"], kind="stable")[:n]
        own = left["p"][left["id"] == token]
        best = [(int(left["id"][i]), float(left["p"][i])) for i in order if left["p"][i] > 0.0]
        return ((token, float(own[0]) if own.size else 1.0), *best)


class GrammarCompiler:
    """Makes the matchers of grammars for llguidance, on the vocabulary of ``tokenizer``, which is read until `close`.

    The vocabulary is prepared for it when the first one is asked for, which takes about two seconds for one of 250,000
    tokens, and a grammar may take one: ask on a thread that has the time, and the engine's finds it ready. Thread-safe.
    """

    def __init__(self, tokenizer: LlamaTokenizer) -> None:
        self._tokenizer: LlamaTokenizer | None = tokenizer
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._preparing, self._remembering = threading.Lock(), threading.Lock()
        self._known: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """One that has read nothing yet; RequestError if it cannot be made, or if it allows no reply."""
        with self._remembering:
            if found := self._known.get(grammar):
                self._known.move_to_end(grammar)
                return found.deep_copy()
        made = self._compile(grammar)
        with self._remembering:
            self._known[grammar] = made
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return made.deep_copy()

    def close(self) -> None:
        """Let go of the tokenizer, once nobody reads it any more."""
        with self._preparing:
            self._tokenizer = None

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        with self._preparing:
            if self._vocabulary is None:
                if self._tokenizer is None:
                    raise UnavailableError("the model is not loaded")
                self._vocabulary = _vocabulary_of(self._tokenizer)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            trial = matcher.deep_copy()
            trial.compute_bitmask()
            if not trial.is_error():
                return matcher
            matcher = trial
        error = _first_line(matcher.get_error())
        if error.startswith("NoExtension"):
            raise RequestError("the grammar allows no reply")
        raise RequestError(f"failed to parse grammar: {error}")


_MOST_KNOWN = 16

_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=10_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=1_000_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""So that no grammar takes much more than a second, nor a token more than a fraction of one."""


_SLICE = r'[^"\\\x00-\x1F\x7F]{1,30}'
"""Tokens whose text is so are allowed or not all at once, within strings. Each further such set makes preparing slower,
and this one makes masks as fast as the library's four."""


class _Pieces:
    """A vocabulary as llguidance wants it. It is never asked for the tokens of a text: no grammar here forces any."""

    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokens: list[bytes], end: int) -> None:
        self.tokens, self.eos_token_id = tokens, end

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError


def _vocabulary_of(tokenizer: LlamaTokenizer) -> llguidance.LLTokenizer:
    ends = sorted(tokenizer.end_tokens())
    if not ends:
        raise RequestError("the model has no token that ends a reply, so that no schema can bind one")
    # What begins with this byte is no text: a control token comes only where the grammar names it.
    marked = tokenizer.control_tokens() | set(ends)
    pieces = tokenizer.all_pieces()
    tokens = [b"\xff" + piece if token in marked else piece for token, piece in enumerate(pieces)]
    wrapper = llguidance.TokenizerWrapper(_Pieces(tokens, ends[0]))
    return llguidance.LLTokenizer(wrapper, eos_token=ends, slices=[_SLICE])


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0][:300]


class _Matcher(Protocol):
    """What one kind of grammar knows how to do. It is never told to read a token that it does not allow."""

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""

    def restrict(self, candidates: Candidates) -> None:
        """Set the logits of all tokens that may not come next to minus infinity."""

    def read(self, token: int) -> None:
        """``token`` comes next."""

    def copy(self) -> _Matcher:
        """Another one that has read the same."""

    def close(self) -> None:
        """Free what llama.cpp holds of it."""


class Grammar:
    """What binds one reply, at once or from a trigger on.

    A lazy one that refuses what a trigger found sleeps on, and one that becomes too complex binds no longer: a reply
    does not fail because of calls that nobody asked for. Triggers are looked for here, since llama.cpp's sampler would
    end the process at a token that it does not allow. RequestError if the grammar does not parse.
    """

    def __init__(self, vocab: Any, sampling: Sampling, compiler: GrammarCompiler) -> None:
        self._vocab = vocab
        self._watch: TriggerWatch | None = None
        if sampling.grammar_lazy:
            self._watch = TriggerWatch(sampling.grammar_triggers, sampling.grammar_hidden)
        self.is_asleep = sampling.grammar_lazy
        self._matcher: _Matcher = (
            _LibraryMatcher(compiler.matcher(sampling.grammar), vocab)
            if sampling.grammar_kind == "llguidance"
            else _GbnfMatcher(vocab, sampling.grammar)
        )
        if sampling.grammar_prefill and not self.is_asleep and not self._read(sampling.grammar_prefill.encode()):
            self.close()
            raise RequestError("the grammar does not allow what the prompt holds of the reply")

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        if self.is_asleep:
            return True
        try:
            return self._matcher.allows(token)
        except RequestError as error:
            self._give_up(error)
            return True

    def restrict(self, candidates: Candidates) -> None:
        """Set the logits of all tokens that may not come next to minus infinity."""
        if self.is_asleep:
            return
        try:
            self._matcher.restrict(candidates)
        except RequestError as error:
            self._give_up(error)

    def accept(self, token: int) -> None:
        """``token`` comes next; one that is not allowed, since it was forced, is passed over."""
        if not self.is_asleep:
            if self.allows(token) and not self.is_asleep:
                self._matcher.read(token)
        elif self._watch is not None and (text := self._watch.feed(read_piece(self._vocab, token))) is not None:
            self._wake(text)

    def close(self) -> None:
        """Free what it holds; calling twice is harmless."""
        self._matcher.close()

    def _wake(self, text: bytes) -> None:
        """Bind from here on, unless the grammar does not allow ``text``, with which it has to begin."""
        trial = self._matcher.copy()
        try:
            self.is_asleep = not self._read(text)
        except RequestError as error:
            self._give_up(error)
        if self.is_asleep:
            self._matcher.close()
            self._matcher = trial
        else:
            trial.close()

    def _give_up(self, error: RequestError) -> None:
        if self._watch is None:
            raise error
        log.warning("the calls of a reply are bound no longer: %s", error)
        self._watch, self.is_asleep = None, True

    def _read(self, text: bytes) -> bool:
        tokens = (api.llama_token * (len(text) + 1))()
        n = api.llama_tokenize(self._vocab, text, len(text), tokens, len(tokens), False, True)
        for token in tokens[: max(n, 0)]:
            if not self._matcher.allows(token):
                return False
            self._matcher.read(token)
        return True


class _LibraryMatcher:
    """A matcher of llguidance."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: Any) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._n_vocab = int(api.llama_vocab_n_tokens(vocab))

    def allows(self, token: int) -> bool:
        if api.llama_vocab_is_eog(self._vocab, token):
            return self._checked(self._matcher.is_accepting())
        return self._checked(self._matcher.validate_tokens([token]) == 1)

    def restrict(self, candidates: Candidates) -> None:
        mask = np.frombuffer(self._checked(self._matcher.compute_bitmask()), np.uint8)
        candidates.forbid(np.unpackbits(mask, count=self._n_vocab, bitorder="little") == 0)

    def read(self, token: int) -> None:
        if not api.llama_vocab_is_eog(self._vocab, token):
            self._checked(self._matcher.consume_token(token))

    def copy(self) -> _LibraryMatcher:
        return _LibraryMatcher(self._matcher.deep_copy(), self._vocab)

    def close(self) -> None:
        pass

    def _checked(self, result: R) -> R:
        if self._matcher.is_error():
            raise RequestError(f"the grammar is too complex: {_first_line(self._matcher.get_error())}")
        return result


_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', re.DOTALL)

_MOST_GROUPS, _MOST_RULES = 2000, 20000
"""llama.cpp reads a group within a group, and follows a rule to another, by a call of its own: ten times as many
overflow the stack of a thread."""


class _GbnfMatcher:
    """llama.cpp's grammar sampler."""

    def __init__(self, vocab: Any, grammar: str) -> None:
        if _too_deep(grammar):
            raise RequestError("failed to parse grammar: it is nested too deeply")
        text = grammar.encode("utf-8", "replace")
        self._one = Candidates(1)
        self._sampler = api.llama_sampler_init_grammar(vocab, text, b"root") if b"\0" not in text else None
        if not self._sampler:
            raise RequestError("failed to parse grammar")

    def allows(self, token: int) -> bool:
        self._one.fill_one(token)
        self._one.apply(self._sampler)
        return bool(self._one.left["logit"][0] != -float("inf"))

    def restrict(self, candidates: Candidates) -> None:
        candidates.apply(self._sampler)

    def read(self, token: int) -> None:
        api.llama_sampler_accept(self._sampler, token)

    def copy(self) -> _GbnfMatcher:
        other = copy(self)
        other._one, other._sampler = Candidates(1), api.llama_sampler_clone(self._sampler)
        return other

    def close(self) -> None:
        if self._sampler:
            api.llama_sampler_free(self._sampler)
            self._sampler = None


def _too_deep(grammar: str) -> bool:
    steps = (1 if sign == "(" else -1 for sign in _QUOTED.sub("", grammar) if sign in "()")
    return grammar.count("::=") > _MOST_RULES or max(itertools.accumulate(steps), default=0) > _MOST_GROUPS

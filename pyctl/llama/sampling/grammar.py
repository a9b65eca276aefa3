"""Grammars of replies, and the candidate array that grammars and llama.cpp's samplers modify."""

from __future__ import annotations

import ctypes
import logging
import math
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pyctl.engine.sampling import GrammarKind, Sampling
from pyctl.errors import RequestError, UnavailableError
from pyctl.llama.library.bindings import api
from pyctl.llama.library.llama_tokenizer import LlamaTokenizer, read_piece
from pyctl.llama.sampling.gbnf import Markers, read_gbnf
from pyctl.llama.sampling.gbnf_translator import translated
from pyctl.llama.sampling.trigger import TriggerWatch
from pyctl.prompt import Tokens
from pyctl.settings.limit import limit

if TYPE_CHECKING:
    import llguidance

__all__ = ["Candidates", "Grammar", "GrammarCompiler"]

R = TypeVar("R")

log = logging.getLogger(__name__)

_ENTRY = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Candidates:
    """The array of candidate tokens, initially all ``n_vocab``."""

    def __init__(self, n_vocab: int) -> None:
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._entries = np.zeros(n_vocab, _ENTRY)
        self._data: Any = ctypes.cast(self._entries.ctypes.data, api.llama_token_data_p)
        self.array = api.llama_token_data_array(self._data, n_vocab, -1, False)

    @property
    def remaining(self) -> NDArray[Any]:
        """The remaining entries (id, logit, p). XTC drops the first ones by moving the pointer."""
        address = ctypes.cast(self.array.data, ctypes.c_void_p).value or 0
        first = (address - self._entries.ctypes.data) // _ENTRY.itemsize
        return self._entries[first : first + self.array.size]

    def fill(self, logits: NDArray[np.float32]) -> None:
        """Reset to all tokens with their ``logits``, shape (n_vocab,)."""
        self._entries["id"] = self._ids
        self._entries["logit"] = logits
        self._entries["p"] = 0.0
        self.array.data = self._data
        self.array.size = self._ids.size
        self.array.selected = -1
        self.array.sorted = False

    def fill_best(self, logits: NDArray[np.float32], n_groups: int, n: int, also: Tokens) -> None:
        """Reset to the ``n`` likeliest tokens of ``logits``, shape (n_vocab,), and perhaps more,
        and to ``also``, all in order of their ids; see `fill`.

        Resets to all tokens if a NaN among ``logits`` keeps the search from finding ``n``.
        """
        ids = _find_likeliest(logits, n_groups, n)
        if ids.size < n:
            return self.fill(logits)
        if also.size:
            ids = np.union1d(ids, also)
        entries = self._entries[: ids.size]
        entries["id"] = ids
        entries["logit"] = logits[ids]
        entries["p"] = 0.0
        self.array.data = self._data
        self.array.size = ids.size
        self.array.selected = -1
        self.array.sorted = False

    def keep_only(self, token: int) -> None:
        """Set the logits of all tokens except ``token`` to minus infinity."""
        self.remaining["logit"][self.remaining["id"] != token] = -np.inf

    def forbid(self, forbidden: NDArray[np.bool_]) -> None:
        """Set the logits of tokens to minus infinity where ``forbidden``, shape (n_vocab,), is
        true.
        """
        self.remaining["logit"][forbidden[self.remaining["id"]]] = -np.inf

    def apply(self, sampler: Any) -> None:
        """Apply ``sampler``, which may change, sort or shorten the array, or select an entry."""
        api.llama_sampler_apply(sampler, ctypes.byref(self.array))

    def choose(self, chain: Any) -> int | None:
        """Return the token that ``chain`` selects; None if all remaining tokens are impossible."""
        self.apply(chain)
        if self.array.selected < 0:
            return None
        chosen = self.array.data[self.array.selected]
        return int(chosen.id) if chosen.logit > -math.inf else None

    def top(self, token: int, n: int) -> tuple[tuple[int, float], ...]:
        """Return (id, probability) of ``token``, then of the ``n`` most likely remaining tokens,
        without zeros.
        """
        left = self.remaining
        order = np.argsort(-left["p"], kind="stable")[:n]
        own = left["p"][left["id"] == token]
        best = [(int(left["id"][i]), float(left["p"][i])) for i in order if left["p"][i] > 0.0]
        return ((token, float(own[0]) if own.size else 1.0), *best)


def _find_likeliest(logits: NDArray[np.float32], n_groups: int, n: int) -> NDArray[Any]:
    """Return the ids, ascending, of all tokens whose logit reaches ``bound``: the ``n`` likeliest
    and some more. Fewer than ``n`` are found only if a logit is NaN.

    To order all logits for each token of a reply is slow. Instead they are cut into ``n_groups`` >
    ``n`` groups of equal size, and only the maxima of groups are ordered. ``bound`` is the n-th
    largest of these: n groups have a token that reaches it, so the n likeliest tokens all do.
    """
    group_size = logits.size // n_groups
    n_grouped = n_groups * group_size
    grouped = logits[:n_grouped]
    rest = logits[n_grouped:]  # too few for another group
    maxima = np.maximum.reduceat(grouped, np.arange(0, n_grouped, group_size))
    index = n_groups - n  # of the n-th largest in ascending order
    bound = np.partition(maxima, index)[index]
    # Not `maxima >= bound`: the maximum of a group with a NaN is NaN, and is never >= anything,
    # while other tokens of the group may reach the bound.
    groups = np.flatnonzero(~(maxima < bound))
    searched = grouped.reshape(n_groups, group_size).take(groups, axis=0)
    places = np.flatnonzero(searched >= bound)
    ids = groups[places // group_size] * group_size + places % group_size
    if rest.size:
        ids = np.concatenate((ids, n_grouped + np.flatnonzero(rest >= bound)))
    return ids


class GrammarCompiler:
    """A compiler of grammars to llguidance matchers for the vocabulary of ``tokenizer``, used until
    `close`. Thread-safe.

    The first call prepares the vocabulary (about 2 s for 250,000 tokens), and a grammar may take 1
    s. Compile on another thread first; the engine's thread then finds the grammar in the cache.
    """

    def __init__(self, tokenizer: LlamaTokenizer) -> None:
        self._tokenizer: LlamaTokenizer | None = tokenizer
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._preparing = threading.Lock()
        self._remembering = threading.Lock()
        self._markers: Markers | None = None
        self._end_tokens: frozenset[int] = frozenset()
        self._known: OrderedDict[tuple[str, GrammarKind], llguidance.LLMatcher | RequestError] = (
            OrderedDict()
        )

    def matcher(self, grammar: str, kind: GrammarKind = "llguidance") -> llguidance.LLMatcher:
        """Return a new matcher. RequestError if the grammar is invalid or allows no reply."""
        with self._remembering:
            compiled = self._known.get((grammar, kind))
            if compiled is not None:
                self._known.move_to_end((grammar, kind))
        if compiled is None:
            try:
                compiled = self._compile(grammar, kind)
            except RequestError as error:
                compiled = error
            with self._remembering:
                self._known[grammar, kind] = compiled
                while len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        if isinstance(compiled, RequestError):
            raise RequestError(str(compiled))
        return compiled.deep_copy()

    def close(self) -> None:
        """Release the tokenizer after current uses end."""
        with self._preparing:
            self._tokenizer = None

    def _prepared(self) -> llguidance.LLTokenizer:
        with self._preparing:
            if self._vocabulary is None:
                if self._tokenizer is None:
                    raise UnavailableError("the model is not loaded")
                self._markers = _find_markers(self._tokenizer)
                self._end_tokens = self._tokenizer.end_tokens()
                self._vocabulary = _build_vocabulary(self._tokenizer)
            return self._vocabulary

    def _compile(self, grammar: str, kind: GrammarKind) -> llguidance.LLMatcher:
        import llguidance  # with the first grammar: most servers compile none

        vocabulary = self._prepared()
        text = grammar
        if kind == "gbnf":
            assert self._markers is not None
            text = _HEADER + translated(*read_gbnf(grammar, self._markers), self._end_tokens)
        limits = _LIMITS[kind].for_parser()
        return _try_matcher(llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits))


_MAX_KNOWN = 16

_HEADER = '%llguidance {"no_forcing": true}\n'


class _GrammarLimits(NamedTuple):
    """Limits of a grammar.

    Attributes:
        n_items: The maximum number of states at one place.
        n_step_items: The maximum number of states that are tried for one token.
    """

    n_items: int
    n_step_items: int

    def for_parser(self) -> llguidance.LLParserLimits:
        """Return the limits with those that are the same for all grammars."""
        import llguidance

        return llguidance.LLParserLimits(
            max_items_in_row=self.n_items,
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=100_000,
            step_max_items=self.n_step_items,
            max_lexer_states=50_000,
            max_grammar_size=200_000,
            precompute_large_lexemes=False,
            verbose_errors=False,
        )


_LIMITS: dict[GrammarKind, _GrammarLimits] = {
    "gbnf": _GrammarLimits(
        limit(2_000, "states of a client's grammar at one place", "400", "reply"),
        limit(300_000, "states of a client's grammar tried for one token", "400", "reply"),
    ),
    "llguidance": _GrammarLimits(10_000, 1_000_000),
}
"""Limits that keep compilation to about a second, and each token to a fraction of one."""

_TRIAL_MASKS = 12
_TRIAL_SECONDS = 0.3
_SLOW_SECONDS = 0.15


def _try_matcher(matcher: llguidance.LLMatcher) -> llguidance.LLMatcher:
    """Return ``matcher`` after a trial of some tokens. RequestError if it is invalid or too
    slow.
    """
    trial = matcher.deep_copy() if not matcher.is_error() else matcher
    rng = random.Random(0)
    spent = 0.0
    n_read = 0
    while n_read < _TRIAL_MASKS:
        if trial.is_error() or trial.is_stopped() or spent > _TRIAL_SECONDS:
            break
        began = time.thread_time()
        mask = trial.compute_bitmask()
        seconds = time.thread_time() - began
        if seconds > _SLOW_SECONDS:
            raise RequestError("the grammar is too slow: finding the next tokens takes too long")
        spent += seconds
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        if not allowed.size:
            break
        trial.consume_token(int(allowed[rng.randrange(allowed.size)]))
        n_read += 1
    error = _first_line(trial.get_error()) if trial.is_error() else ""
    if not error or (
        n_read and error.startswith("NoExtension")
    ):  # one way of several may be a dead end
        return matcher
    if error.startswith("NoExtension"):
        raise RequestError("the grammar allows no reply")
    raise RequestError(f"failed to parse grammar: {error}")


_SLICE = r'[^"\\\x00-\x1F\x7F]{1,30}'
"""llguidance precomputes masks for tokens that match this slice. More slices slow preparation; this
one makes masks as fast as the library's default four.
"""


class _Texts:
    """The bytes of each token of ``tokenizer``, for one iteration. A list of them would be 250,000
    objects, which leave holes in Python's memory.

    Those of ``marked`` tokens have the prefix 0xFF: they match only where the grammar names them.
    """

    def __init__(self, tokenizer: LlamaTokenizer, marked: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._marked = marked

    def __len__(self) -> int:
        return self._tokenizer.n_vocab

    def __iter__(self) -> Iterator[bytes]:
        for token, piece in enumerate(self._tokenizer.pieces()):
            yield b"\xff" + piece if token in self._marked else piece

    def __getitem__(self, token: int) -> bytes:
        """Return the bytes of one token: llguidance takes sequences alone."""
        return next(islice(self, token, None))


class _Pieces:
    """A vocabulary for llguidance. It never tokenizes text, since no grammar here forces tokens."""

    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokens: _Texts, end: int) -> None:
        self.tokens: _Texts | tuple[()] = tokens
        self.eos_token_id = end

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError


def _build_vocabulary(tokenizer: LlamaTokenizer) -> llguidance.LLTokenizer:
    import llguidance

    ends = sorted(tokenizer.end_tokens())
    if not ends:
        raise RequestError("the model has no end-of-text token, which schemas require")
    pieces = _Pieces(_Texts(tokenizer, tokenizer.control_tokens() | set(ends)), ends[0])
    wrapper = llguidance.TokenizerWrapper(pieces)
    vocabulary = llguidance.LLTokenizer(wrapper, eos_token=ends, slices=[_SLICE])
    # It has copied the texts and keeps the wrapper, which need not keep the tokenizer.
    pieces.tokens = wrapper.tokens = ()
    return vocabulary


def _find_markers(tokenizer: LlamaTokenizer) -> Markers:
    def token_of(text: str) -> int | None:
        tokens = tokenizer.tokenize(text)
        return tokens[0] if len(tokens) == 1 else None

    controls = tokenizer.control_tokens() - tokenizer.end_tokens()
    names = {tokenizer.piece(token).decode("utf-8", "replace"): token for token in controls}
    return Markers(names, tokenizer.n_vocab, token_of)


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0][:300]


class Grammar:
    """The grammar of one reply, active at once or from a trigger on. RequestError if it is invalid.

    A lazy grammar stays inactive if it rejects the text of a trigger, and is disabled if it becomes
    too complex: a reply never fails because of optional tool calls.
    """

    def __init__(self, vocab: Any, sampling: Sampling, compiler: GrammarCompiler) -> None:
        self._vocab = vocab
        self._watch: TriggerWatch | None = None
        if sampling.grammar_lazy:
            self._watch = TriggerWatch(sampling.grammar_triggers, sampling.grammar_hidden)
        self.is_asleep = sampling.grammar_lazy
        self._matcher = compiler.matcher(sampling.grammar, sampling.grammar_kind)
        if (
            sampling.grammar_prefill
            and not self.is_asleep
            and not self._read(sampling.grammar_prefill.encode())
        ):
            raise RequestError(
                "the grammar does not allow the beginning of the reply in the prompt"
            )

    def allows(self, token: int) -> bool:
        """Return whether the grammar allows ``token`` next."""
        try:
            return self.is_asleep or self._allows(token)
        except RequestError as error:
            self._give_up(error)
            return True

    def restrict(self, candidates: Candidates) -> None:
        """Set the logits of all disallowed tokens to minus infinity."""
        if self.is_asleep:
            return
        try:
            mask = np.frombuffer(self._checked(self._matcher.compute_bitmask()), np.uint8)
        except RequestError as error:
            return self._give_up(error)
        n_vocab = int(api.llama_vocab_n_tokens(self._vocab))
        candidates.forbid(np.unpackbits(mask, count=n_vocab, bitorder="little") == 0)

    def accept(self, token: int) -> None:
        """Record the next ``token``. Ignores a disallowed one, which was forced."""
        if not self.is_asleep:
            if self.allows(token) and not self.is_asleep:
                self._consume(token)
        elif (
            self._watch is not None
            and (text := self._watch.feed(read_piece(self._vocab, token))) is not None
        ):
            self._wake(text)

    def _wake(self, text: bytes) -> None:
        """Activate the grammar if it accepts ``text`` as its beginning."""
        before = self._matcher.deep_copy()
        try:
            self.is_asleep = not self._read(text)
        except RequestError as error:
            self._give_up(error)
        if self.is_asleep:
            self._matcher = before

    def _give_up(self, error: RequestError) -> None:
        if self._watch is None:
            raise error
        log.warning("tool calls of this reply are no longer constrained: %s", error)
        self._watch = None
        self.is_asleep = True

    def _read(self, text: bytes) -> bool:
        tokens = (api.llama_token * (len(text) + 1))()
        n = api.llama_tokenize(self._vocab, text, len(text), tokens, len(tokens), False, True)
        for token in tokens[: max(n, 0)]:
            if not self._allows(token):
                return False
            self._consume(token)
        return True

    def _allows(self, token: int) -> bool:
        if api.llama_vocab_is_eog(self._vocab, token):
            return self._checked(self._matcher.is_accepting())
        return self._checked(self._matcher.validate_tokens([token]) == 1)

    def _consume(self, token: int) -> None:
        """Take ``token``, which is allowed."""
        if not api.llama_vocab_is_eog(self._vocab, token):
            self._checked(self._matcher.consume_token(token))

    def _checked(self, result: R) -> R:
        if self._matcher.is_error():
            raise RequestError(
                f"the grammar is too complex: {_first_line(self._matcher.get_error())}"
            )
        return result

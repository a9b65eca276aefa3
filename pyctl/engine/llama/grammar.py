"""The array of tokens that llama.cpp's samplers work on, owned here: it can be looked at between two samplers."""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from pyctl.engine.llama.llama_tokenizer import read_piece
from pyctl.engine.sampling import Sampling
from pyctl.errors import RequestError

__all__ = ["Candidates", "LlamaGrammar"]

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


_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', re.DOTALL)

_MOST_GROUPS, _MOST_RULES = 2000, 20000

"""llama.cpp reads a group within a group, and follows a rule to another, by a call of its own: ten times as many
overflow the stack of a thread."""


class LlamaGrammar:
    """llama.cpp's grammar sampler; it is never given a token that it would refuse, since that would end the process.

    For the same reason triggers are looked for here, not by llama.cpp. What it refuses to begin with ends its binding.
    RequestError if it does not parse.
    """

    def __init__(self, vocab: Any, sampling: Sampling) -> None:
        self._vocab = vocab
        self._one = Candidates(1)
        self._waiting = sampling.grammar_lazy
        self._seen = bytearray()
        try:
            self._triggers = [re.compile(pattern.encode()) for pattern in sampling.grammar_triggers]
        except re.error as error:
            raise RequestError(f"failed to parse grammar trigger: {error}") from error
        if _too_deep(sampling.grammar):
            raise RequestError("failed to parse grammar: it is nested too deeply")
        text = sampling.grammar.encode("utf-8", "replace")
        self._sampler = api.llama_sampler_init_grammar(vocab, text, b"root") if b"\0" not in text else None
        if not self._sampler:
            raise RequestError("failed to parse grammar")
        if sampling.grammar_prefill and not self._waiting and not self._read(sampling.grammar_prefill.encode()):
            self.close()
            raise RequestError("the grammar does not allow what the prompt holds of the reply")

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        if self._waiting:
            return True
        self._one.fill_one(token)
        self._one.apply(self._sampler)
        return bool(self._one.left["logit"][0] != -float("inf"))

    def restrict(self, candidates: Candidates) -> None:
        """Set the logits of all tokens that may not come next to minus infinity."""
        if not self._waiting:
            candidates.apply(self._sampler)

    def accept(self, token: int) -> None:
        """``token`` comes next; one that is not allowed, since it was forced, is passed over."""
        if not self._waiting and not self.allows(token):
            return
        if not self._waiting:
            api.llama_sampler_accept(self._sampler, token)
            return
        self._seen += read_piece(self._vocab, token)
        for trigger in self._triggers:
            if found := trigger.search(self._seen):
                groups = range(1, trigger.groups + 1)
                self._begin(bytes(self._seen[found.start(next((g for g in groups if found.group(g)), 0)) :]))
                return

    def close(self) -> None:
        """Free the sampler."""
        if self._sampler:
            api.llama_sampler_free(self._sampler)
            self._sampler = None

    def _begin(self, text: bytes) -> None:
        """Bind from here on; ``text`` is what the grammar has to have read by now."""
        self._waiting = False
        self._seen.clear()
        if not self._read(text):
            self._waiting, self._triggers = True, []

    def _read(self, text: bytes) -> bool:
        tokens = (api.llama_token * (len(text) + 1))()
        n = api.llama_tokenize(self._vocab, text, len(text), tokens, len(tokens), False, True)
        for token in tokens[: max(n, 0)]:
            if not self.allows(token):
                return False
            api.llama_sampler_accept(self._sampler, token)
        return True


def _too_deep(grammar: str) -> bool:
    steps = (1 if sign == "(" else -1 for sign in _QUOTED.sub("", grammar) if sign in "()")
    return grammar.count("::=") > _MOST_RULES or max(itertools.accumulate(steps), default=0) > _MOST_GROUPS

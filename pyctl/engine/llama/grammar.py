"""A grammar that binds the reply, from its start or from where a trigger shows up."""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any

from llama_cpp import llama_cpp as api

from pyctl.engine.llama.candidates import Candidates
from pyctl.engine.sampling import Sampling
from pyctl.errors import RequestError

__all__ = ["LlamaGrammar"]

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
        self._seen += self._piece(token)
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

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        n = api.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = api.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[:n]


def _too_deep(grammar: str) -> bool:
    steps = (1 if sign == "(" else -1 for sign in _QUOTED.sub("", grammar) if sign in "()")
    return grammar.count("::=") > _MOST_RULES or max(itertools.accumulate(steps), default=0) > _MOST_GROUPS

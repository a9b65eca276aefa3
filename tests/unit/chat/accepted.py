"""A check that a constraint accepts a text, by the grammar engine on the real vocabulary of the
Qwen3.5 family.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pyctl.chat.constraint import Constraint
from tests.unit.chat.conftest import tokenizer_of, vocabulary_of


@cache
def engine_parts() -> tuple[Any, Any, Any]:
    """Return the vocabulary as llama.cpp has it, its tokenizer, and the compiler of grammars."""
    model = vocabulary_of("qwen35")
    tokenizer = tokenizer_of("qwen35")
    from llama_cpp import llama_cpp as api

    from pyctl.llama.sampling.grammar import GrammarCompiler

    return api.llama_model_get_vocab(model), tokenizer, GrammarCompiler(tokenizer)


def accepts(constraint: Constraint, text: str) -> bool:
    """Return whether a reply may be ``text`` and end there; special tokens in it are tokens."""
    vocab, tokenizer, compiler = engine_parts()
    from pyctl.engine.sampling import Sampling
    from pyctl.llama.sampling.grammar import Grammar

    bound = Grammar(
        vocab, Sampling(grammar=constraint.grammar, grammar_kind=constraint.kind), compiler
    )
    for token in [*tokenizer.tokenize(text), tokenizer.eos]:
        if not bound.allows(token):
            return False
        bound.accept(token)
    return True

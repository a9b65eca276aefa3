"""Random texts as grammars: each is refused or constrains a reply, within a time limit, as in
llama.cpp.
"""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pyctl.errors import RequestError
from pyctl.llama.loader import Loaded
from pyctl.llama.sampling.grammar import GrammarCompiler
from tests.model.fuzz.cases import fuzzed
from tests.model.fuzz.grammars import any_grammars, safe_grammars
from tests.model.llama.sampling.grammars import allowed_by, compare

_COMPILERS: dict[int, GrammarCompiler] = {}


def compiler_of(model: Loaded) -> GrammarCompiler:
    return _COMPILERS.setdefault(id(model), GrammarCompiler(model.tokenizer))


@fuzzed
@given(any_grammars(), st.integers(0, 1 << 30))
def test_any_text_is_refused_or_binds(model: Loaded, grammar: str, seed: int) -> None:
    rng = random.Random(seed)
    try:
        matcher = compiler_of(model).matcher(grammar, "gbnf")
        for _ in range(8):
            if matcher.is_stopped():
                break
            allowed = np.flatnonzero(allowed_by(matcher, model))
            if not allowed.size:
                break
            token = int(rng.choice(allowed))
            assert matcher.validate_tokens([token]) == 1 or token in model.tokenizer.end_tokens()
            matcher.consume_token(token)
    except RequestError as error:
        assert str(error)  # noqa: PT017


@fuzzed
@given(safe_grammars(), st.integers(0, 1 << 30))
def test_what_llama_cpp_takes_means_the_same(model: Loaded, grammar: str, seed: int) -> None:
    compare(model, compiler_of(model), grammar, seed)

"""Grammars of clients: pyctl accepts those that llama.cpp accepts, and bounds those that harm
llama.cpp.
"""

from __future__ import annotations

import numpy as np
import pytest

from pyctl.engine.sampling import Sampling
from pyctl.errors import RequestError
from pyctl.llama.loader import Loaded
from tests.model.llama.sampling.grammars import allowed_by, compiler_of


def nested_rules(n: int, depth: int) -> str:
    rules = "".join(f"r{i} ::= {'(' * depth}r{i + 1}{')' * depth}\n" for i in range(n))
    return f'root ::= r0\n{rules}r{n} ::= "a"\n'


HARMFUL = {
    "a token after a character": "root ::= . !<[0]>",
    "a token after a class": "root ::= [a-z ] <[300]>",
    "bounds the wrong way round": 'root ::= "a"{5,2}',
    "left recursion behind what may be empty": (
        'root ::= b root "x" | "y"\nb ::= a\na ::= "" | "z"\n'
    ),
    "two ways to each of 45 rules": "root ::= a1 | a1\n"
    + "".join(f"a{i} ::= a{i + 1} | a{i + 1}\n" for i in range(1, 45))
    + 'a45 ::= "x"\n',
    "parentheses between quotes in comments": (
        f'root ::= # "\n{"(" * 100_000}"a"{")" * 100_000} # "\n'
    ),
    "groups within 300 rules": nested_rules(300, 150),
    "groups within groups": nested_rules(1, 60_000),
    "9,000 rules in a chain": nested_rules(9_000, 0),
    "stars on stars": 'root ::= "a"' + "*" * 20_000,
    "repetitions of repetitions": 'root ::= "a"' + "{1,50}" * 20,
    "repetitions of groups": "root ::= " + "(" * 20 + '"a" root?' + "){0,1000}" * 20,
    "doubling": "root ::= a0\n"
    + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(60))
    + 'a60 ::= "x" | root\n',
    "brackets": "[" * 200_000,
    "quotes": 'root ::= "' + '\\"' * 100_000,
    "only blanks": " \t" * 130_000,
    "only comments": "#\n" * 130_000,
    "ambiguity": 'root ::= root root root | root root | "a" | ""',
    "many ways to go on": "root ::= "
    + " | ".join(f'[a-z]{{0,50}} "{i}" root?' for i in range(400)),
    "many things left out": "root ::= " + " ".join('([a-z] root)? "b"?' for _ in range(2_000)),
    "no end": "root ::= root",
    "a circle": "root ::= a\na ::= b\nb ::= a\n",
    "big numbers": 'root ::= "a"{' + "9" * 100_000 + "}",
    "bigger numbers": 'root ::= "a"{0,' + "9" * 100_000 + "}",
    "surrogates": 'root ::= "\ud800" | [\udc00-\udfff]',
    "nul": 'root ::= "\0"',
    "50,000 classes": "root ::= " + "[a-z]" * 50_001,
    "a mebibyte": f'root ::= "{"a" * (1 << 20)}"',
}


@pytest.mark.timeout(120)  # the worst takes a second
@pytest.mark.parametrize("grammar", HARMFUL.values(), ids=HARMFUL)
def test_no_grammar_of_a_client_takes_long_or_ends_the_process(model: Loaded, grammar: str) -> None:
    sampling = Sampling(grammar=grammar)
    try:
        model.backend.vocabulary.check(sampling)
    except RequestError:
        return
    # It is taken, so replies can be bound by it.
    matcher = compiler_of(model).matcher(grammar, "gbnf")
    rng = np.random.default_rng(0)
    for _ in range(20):
        if matcher.is_stopped() or not (allowed := allowed_by(matcher, model)).any():
            break
        matcher.consume_token(int(rng.choice(np.flatnonzero(allowed))))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('root ::= "a"\n\nb ::= (', "line 3: a parenthesis is never closed"),
        ('root ::= "a', "line 1: a string is never closed"),
        ("root ::= [a", "line 1: a class is never closed"),
        ('root ::= "a" b', "the rule 'b' is not defined"),
        ('a ::= "a"', "no rule named root"),
        ("root ::= *", "line 1: there is nothing to repeat"),
        ('root ::= "a"{3,1}', "line 1: a repetition from 3 to 1 times"),
        ('root ::= "a"{9999}', "more than 2000 repetitions"),
        ('root ::= "\\q"', "this escape is not known"),
        ('root ::= "\\u12"', "4 hexadecimal digits are expected"),
        ("root ::= <[99999999]>", "the vocabulary has"),
        ("root ::= <nothing>", "this is not one token"),
        ('root ::= "a")', "a new line or the end is expected"),
        ('root = "a"', "'::=' is expected"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_said(model: Loaded, grammar: str, said: str) -> None:
    with pytest.raises(RequestError, match="failed to parse grammar") as caught:
        model.backend.vocabulary.check(Sampling(grammar=grammar))
    assert said in str(caught.value)

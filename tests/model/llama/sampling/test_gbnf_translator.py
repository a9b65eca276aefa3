"""Translated grammars allow what llama.cpp allows, at a constant cost for each token."""

from __future__ import annotations

import numpy as np
import pytest

from pyctl.llama.loader import Loaded
from tests.model.llama.sampling.grammars import allowed_by, compare, compiler_of

KNOWN = {
    "JSON": r"""
root ::= value
value ::= "{" ws ( pair ("," ws pair)* )? "}" ws |
  "[" ws (value ("," ws value)*)? "]" ws | text | number | word ws
pair ::= text ":" ws value
word ::= "true" | "false" | "null"
text ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws # no leading zeros
ws ::= [ \t\n]{0,4}
""",
    "a list": 'root ::= ("- " [^\\r\\n]+ "\\n")+',
    "moves": (
        'root ::= ([1-9] [0-9]? ". " move " " move "\\n")+\nmove ::= [NBKQR]? [a-h]? "x"? '
        "[a-h] [1-8] [+#]?"
    ),
    "sums": 'root ::= sum\nsum ::= part ([-+] part)*\npart ::= [0-9]+ | "(" sum ")"',
    "a right recursion": 'root ::= item "," root | item\nitem ::= "a" | "(" root ")"',
    "two right recursions": 'root ::= "a" b | "x"\nb ::= "b" root | ""',
    "a longest match would be wrong": 'root ::= ("ab" | "a" "b" "c" | "abcd" | [a-c] [b-d]) root?',
    "what follows begins alike": 'root ::= [a-z]* "abc" | "(" root ")" [a-z]* "xyz"',
    "any text": "root ::= .*",
    "all but": 'root ::= [^a-zA-Z"]* "." [^\\n]?',
    "counted": 'root ::= ([a-c]{2} | "d"{0,2} "e"{1,}){1,3} "f"{0}',
    "nested groups": 'root ::= (("a" | ("b" "c"?)) (" " (root))?)?',
    "the last of two rules": 'root ::= "a"\nroot ::= "b" x\nx ::= "c"',
    "ends that lead back": 'root ::= [a-c] ("," root?)? | "d" more\nmore ::= "e" root | "f"',
    "empty": 'root ::= "" | "a"',
    "letters of others": 'root ::= [ぁ-ゟ]+ | [äöü€] | "日本"+',
    "escapes": r'root ::= "\x41\u0042\U00000043\t\n\r\\\"\[\]\-" | [\x41-\x43\]\[\-\\]',
    "dead ends": (
        'root ::= "a" | "b" ([z-a] | "c")? | "d" [z-a]* ([z-a] "e")? | [^\\x01-\\U0010FFFF]'
    ),
    "no end": 'root ::= "a" root | "b" x\nx ::= "c" x',
    "odd classes": "root ::= [a-] | [-a] [^-] | [z-a] | [a\\-z]",
}


@pytest.mark.parametrize("grammar", KNOWN.values(), ids=KNOWN)
def test_a_grammar_allows_what_llama_cpp_allows(model: Loaded, grammar: str) -> None:
    compiler = compiler_of(model)
    for seed in range(8):
        compare(model, compiler, grammar, seed, 30)


def test_left_recursion_works(model: Loaded) -> None:
    matcher = compiler_of(model).matcher('root ::= root "+" [0-9] | [0-9] | "(" root ")"', "gbnf")
    for letter in "1+2+(":
        assert matcher.consume_token(model.tokenizer.tokenize(letter)[0]) == (letter != "("), letter


def test_tokens_are_tokens(model: Loaded) -> None:
    tokenizer = model.tokenizer
    (close,) = tokenizer.tokenize("</think>")
    letter = tokenizer.tokenize("a")[0]
    compiler = compiler_of(model)
    for grammar in (f"root ::= <[{letter}]> </think>", f"root ::= <[{letter}]> <[{close}]>"):
        matcher = compiler.matcher(grammar, "gbnf")
        assert np.flatnonzero(allowed_by(matcher, model)).tolist() == [letter]
        matcher.consume_token(letter)
        assert np.flatnonzero(allowed_by(matcher, model)).tolist() == [close]
    ends = tokenizer.end_tokens()
    allowed = allowed_by(compiler.matcher(f"root ::= !<[{letter}]>", "gbnf"), model)
    assert not allowed[[letter, *ends]].any()
    assert allowed.sum() == tokenizer.n_vocab - len(ends | {letter})


def test_a_string_that_names_a_control_token_may_be_it(model: Loaded) -> None:
    controls = sorted(model.tokenizer.control_tokens() - model.tokenizer.end_tokens())
    name = model.tokenizer.piece(controls[0]).decode()
    matcher = compiler_of(model).matcher(f'root ::= "a{name}b"', "gbnf")
    matcher.consume_token(model.tokenizer.tokenize("a")[0])
    allowed = allowed_by(matcher, model)
    assert allowed[controls[0]]
    assert allowed[model.tokenizer.tokenize(name[0])[0]]
    matcher.consume_token(controls[0])
    assert model.tokenizer.piece(int(np.flatnonzero(allowed_by(matcher, model))[0])) == b"b"


def test_long_replies_stay_bound_at_the_same_cost(model: Loaded) -> None:
    """A loop, however it is written, keeps no state of what it has read."""
    for grammar in (
        r'root ::= ([ab]+ "\n"?)*',
        r'root ::= [ab] root | "\n" root | ""',
        r'root ::= "" | root [ab\n]',
        r"root ::= [ab\n] root?",
        r'root ::= "ab" ("\n" root?)?',
        'root ::= "a" more | ""\nmore ::= "b" "\\n" root | "c"',
    ):
        matcher = compiler_of(model).matcher(grammar, "gbnf")
        tokens = [model.tokenizer.tokenize(letter)[0] for letter in "ab\n"]
        assert matcher.validate_tokens(tokens * 3_000) == 9_000, grammar

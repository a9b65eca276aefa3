"""Grammars of clients: pyctl accepts those that llama.cpp accepts, and bounds those that harm
llama.cpp.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as api

from pyctl.engine.sampling import Sampling
from pyctl.errors import RequestError
from pyctl.llama.loader import Loaded
from pyctl.llama.sampling.grammar import Candidates, GrammarCompiler


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


def compiler_of(model: Loaded) -> GrammarCompiler:
    return GrammarCompiler(model.tokenizer)


def allowed_by(matcher: Any, model: Loaded) -> Any:
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(mask, count=model.tokenizer.n_vocab, bitorder="little").astype(bool)


class LlamaGrammar:
    """llama.cpp's own sampler for a grammar that cannot hurt it."""

    def __init__(self, model: Loaded, grammar: str) -> None:
        self._vocab = model.tokenizer.vocab
        self._sampler = api.llama_sampler_init_grammar(self._vocab, grammar.encode(), b"root")
        assert self._sampler, grammar
        self._candidates = Candidates(model.tokenizer.n_vocab)
        self._logits = np.zeros(model.tokenizer.n_vocab, np.float32)

    def allowed(self) -> Any:
        self._candidates.fill(self._logits)
        self._candidates.apply(self._sampler)
        return self._candidates.remaining["logit"] == 0.0

    def read(self, token: int) -> None:
        api.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        api.llama_sampler_free(self._sampler)


def comparable(model: Loaded) -> Any:
    """Return tokens of whole characters; how halves of characters match is left to each."""
    tokenizer = model.tokenizer
    controls = tokenizer.control_tokens()
    ends = tokenizer.end_tokens()

    def is_text(token: int, piece: bytes) -> bool:
        try:
            return (
                bool(piece)
                and b"\0" not in piece
                and piece.decode() != ""
                and token not in controls
            )
        except UnicodeDecodeError:
            return False

    return np.array(
        [is_text(t, piece) or t in ends for t, piece in enumerate(tokenizer.all_pieces())]
    )


def compare(
    model: Loaded, compiler: GrammarCompiler, grammar: str, seed: int, n_steps: int = 12
) -> None:
    """Check that both allow the same tokens on a random walk."""
    tokenizer = model.tokenizer
    ends = tokenizer.end_tokens()
    known = comparable(model)
    try:
        matcher = compiler.matcher(grammar, "gbnf")
    except RequestError:
        reference = LlamaGrammar(model, grammar)
        assert not reference.allowed()[known].any(), grammar
        reference.close()
        return
    reference = LlamaGrammar(model, grammar)
    rng = random.Random(seed)
    try:
        said = b""
        for _ in range(n_steps):
            ours = allowed_by(matcher, model)
            theirs = reference.allowed()
            different = [tokenizer.piece(int(t)) for t in np.flatnonzero((ours != theirs) & known)]
            assert not different, (grammar, said, different[:10], [ours[t] for t in sorted(ends)])
            choices = [int(t) for t in np.flatnonzero(ours & known) if t not in ends]
            if not choices:
                return
            token = rng.choice(choices)
            matcher.consume_token(token)
            reference.read(token)
            said += tokenizer.piece(token)
    finally:
        reference.close()


KNOWN = {
    "JSON": r"""
root ::= value
value ::= "{" ws ( pair ("," ws pair)* )? "}" ws | "[" ws (value ("," ws value)*)? "]" ws | text | number | word ws
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

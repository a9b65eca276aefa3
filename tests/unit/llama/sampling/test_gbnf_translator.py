"""Translation of GBNF: llguidance accepts the same texts by the written grammar as the rules."""

from __future__ import annotations

from itertools import product

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.errors import RequestError
from pyctl.llama.sampling.gbnf_rules import (
    ANY,
    MAX_CODE_POINT,
    Alternative,
    Characters,
    Item,
    Reference,
    Repeat,
    Rules,
    Token,
    letter,
)
from pyctl.llama.sampling.gbnf_translator import translated
from tests.effort import examples

END = 256
"""The token after the bytes, which ends a reply."""

A = letter("a")
B = letter("b")
LONGEST = 4
"""Letters of the texts that are compared."""

TEXTS = ["".join(text) for n in range(LONGEST + 1) for text in product("ab", repeat=n)]


class Bytes:
    """A vocabulary of the bytes and `END`, as llguidance reads one."""

    bos_token_id = None
    eos_token_id = END
    special_token_ids = ()
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>")

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("no grammar here forces tokens")


VOCABULARY = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), eos_token=[END])


def matcher_of(rules: Rules) -> llguidance.LLMatcher:
    """Return the matcher of the translated rules; the first one is the start."""
    grammar = '%llguidance {"no_forcing": true}\n' + translated(rules, 0, frozenset({END}))
    return llguidance.LLMatcher(VOCABULARY, grammar, log_level=0)


def accepts(matcher: llguidance.LLMatcher, tokens: list[int]) -> bool:
    """Return whether a reply may be these tokens and end there."""
    return bool(matcher.validate_tokens([*tokens, END]) == len(tokens) + 1)


def rests(rules: Rules, items: Alternative, texts: set[str]) -> set[str]:
    """Return the rests of ``texts`` after each match of ``items``, by the definition of GBNF."""
    for item in items:
        texts = rests_of_item(rules, item, texts)
    return texts


def rests_of_item(rules: Rules, item: Item, texts: set[str]) -> set[str]:
    """Return the rests of ``texts`` after each match of one item; tokens have no text."""
    if isinstance(item, Characters):
        return {text[1:] for text in texts if text and is_in(item, text[0])}
    if isinstance(item, Reference):
        alternatives = rules[item.rule]
        return {rest for items in alternatives for rest in rests(rules, items, texts)}
    assert isinstance(item, Repeat)
    texts = rests(rules, [item.item] * item.low, texts)
    found = set(texts)
    n_more = LONGEST if item.high is None else item.high - item.low
    for _ in range(n_more):
        texts = rests(rules, [item.item], texts)
        found |= texts
    return found


def is_in(characters: Characters, letter: str) -> bool:
    is_inside = any(low <= ord(letter) <= high for low, high in characters.ranges)
    return is_inside != characters.other


CHARACTERS = st.sampled_from([A, B, ANY, Characters(A.ranges, other=True), Characters(())])


@st.composite
def rule_sets(draw: st.DrawFn) -> Rules:
    """Return rules whose references lead to later rules, so that the definition above ends."""
    n_rules = draw(st.integers(1, 4))
    rules: Rules = []
    for number in range(n_rules):
        singles: st.SearchStrategy[Characters | Reference] = CHARACTERS
        if number + 1 < n_rules:
            singles |= st.integers(number + 1, n_rules - 1).map(Reference)
        bounds = st.sampled_from([(0, 1), (0, None), (1, None), (2, 2), (0, 2)])
        repeats = st.tuples(singles, bounds).map(lambda pair: Repeat(pair[0], *pair[1]))
        alternatives = st.lists(st.lists(singles | repeats, max_size=3), min_size=1, max_size=3)
        rules.append(draw(alternatives))
    return rules


@settings(max_examples=examples(150), deadline=None)
@given(rules=rule_sets())
def test_texts_are_accepted_by_the_definition_of_the_rules(rules: Rules) -> None:
    """The written grammar accepts a text of a and b if and only if the rules match all of it."""
    matcher = matcher_of(rules)
    expected = [text for text in TEXTS if "" in rests(rules, [Reference(0)], {text})]
    accepted = [] if matcher.is_error() else [text for text in TEXTS if is_text(matcher, text)]
    assert accepted == expected


def is_text(matcher: llguidance.LLMatcher, text: str) -> bool:
    return accepts(matcher, [*text.encode()])


TAIL_RECURSIONS: dict[str, Rules] = {
    "itself": [[[A, Reference(0)], [B]]],
    "itself, perhaps": [[[A, Repeat(Reference(0), 0, 1)], [B]]],
    "through another rule": [[[A, Reference(1)], [B]], [[Reference(0)], []]],
    "nothing before it": [[[Reference(0)], [A, Reference(0)], [B]]],
}


@pytest.mark.parametrize("rules", TAIL_RECURSIONS.values(), ids=TAIL_RECURSIONS)
def test_a_rule_that_ends_in_itself_becomes_a_loop(rules: Rules) -> None:
    """A loop reads 10,000 characters, where recursion would keep an item open for each of them."""
    start = translated(rules, 0, frozenset({END})).splitlines()[2]
    assert ")*" in start
    assert "r0" not in start.removeprefix("r0:")
    text = "a" * 10_000
    matcher = matcher_of(rules)
    assert matcher.validate_tokens([*text.encode()]) == len(text)
    assert is_text(matcher, text + "b")
    assert not is_text(matcher, text + "ba")


def test_characters_are_single_however_they_are_written() -> None:
    """Each code point is a terminal of its own: a longer terminal would take letters that the rest
    of the rule needs.
    """
    kana = Characters(((0x3041, 0x309F),))
    brackets = Characters(tuple((ord(sign), ord(sign)) for sign in "-[\\]^"))
    matcher = matcher_of([[[Repeat(kana, 0, None), letter("ん"), brackets]]])
    assert is_text(matcher, "かんん]")
    assert is_text(matcher, "ん^")
    assert not is_text(matcher, "か]")
    assert not is_text(matcher, "んa")


def test_a_token_that_ends_a_reply_is_never_part_of_it() -> None:
    """A rule may name a token, but not the one that ends the reply: that one would never end it."""
    text = translated([[[Token(65, False), Token(66, True)]]], 0, frozenset({END}))
    assert "<[65]>" in text
    assert f"<[^66,{END}]>" in text
    assert "r0: never" in translated([[[Token(END, False)]]], 0, frozenset({END}))


@pytest.mark.parametrize("rules", [[[]], [[[Characters(((0, MAX_CODE_POINT),), other=True)]]]])
def test_rules_that_match_no_text_are_still_a_grammar(rules: Rules) -> None:
    """llguidance has no rule without an alternative, and a class of no characters is its error."""
    matcher = matcher_of(rules)
    assert not any(is_text(matcher, text) for text in TEXTS)


def chain(n: int) -> Rules:
    """Return ``n`` rules, each of which is the next one in parentheses; the last is a letter."""
    return [*([[A, Reference(rule + 1), B]] for rule in range(n - 1)), [[A]]]


def test_nested_rules_are_bounded() -> None:
    """llguidance recurses per level, so that a deeper grammar would end the process. Rules beside
    each other are no levels.
    """
    assert translated(chain(1_000), 0, frozenset())
    with pytest.raises(RequestError, match="nested too deeply"):
        translated(chain(1_001), 0, frozenset())
    circle: Rules = [[[Reference((rule + 1) % 1_001), A]] for rule in range(1_001)]
    with pytest.raises(RequestError, match="nested too deeply"):
        translated(circle, 0, frozenset())
    wide: Rules = [[[Reference(rule) for rule in range(1, 5_000)]], *([[A]] for _ in range(4_999))]
    assert translated(wide, 0, frozenset())

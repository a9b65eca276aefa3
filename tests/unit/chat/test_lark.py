from __future__ import annotations

import json
import re

import llguidance
import pytest

from pyctl.chat.call_formats.families import HERMES, QWEN
from pyctl.chat.constraint import json_constraint
from pyctl.chat.lark import pattern_of
from pyctl.chat.reply import THINK
from pyctl.chat.tools import Tools
from pyctl.errors import RequestError

BYTES = llguidance.LLTokenizer("byte")


def bound(grammar: str, text: str) -> bool:
    """Whether a reply of a model whose tokens are bytes may be ``text``."""
    matcher, tokens = llguidance.LLMatcher(BYTES, grammar), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


EDIT = """
// a list of edits
start: head edit+ tail?
head: "*** Edit" LF
edit: put | drop
put.2: "put " name LF line+   // with its lines
line: ("+" | "-" | " ") /(.*)/ LF -> one
drop: "drop " name LF
name: NAME ["/" NAME]
NAME: /[a-z]+[.]\\/?(py|c)/i
tail: "*** End"

%import common.LF
"""


@pytest.mark.parametrize(
    ("definition", "good", "bad"),
    [
        (
            EDIT,
            [
                "*** Edit\nput a.PY\n+x = 'ä'\n \n*** End",
                "*** Edit\ndrop a.c/b.py\n",
                "*** Edit\nput a./c\n-\ndrop b.c\n",
            ],
            ["", "*** Edit\n", "*** Edit\nput a.py\n*** End", "*** Edit\ndrop a.py/b.c/c.c\n", "*** Edit\ndrop a.rs\n"],
        ),
        ('start: A | B\nA: "a.b"i\nB: /\\d+/ WS\n%import common (WS, INT)', ["a.B", "12 "], ["axb", "12"]),
        ("start: /a.c/ /d.f/s", ["abcd\nf"], ["a\ncdef"]),
        ('start: ("\\n" | "\\"")*', ["\n", '"\n'], ["n"]),
    ],
)
def test_a_grammar_without_recursion_is_a_pattern(definition: str, good: list[str], bad: list[str]) -> None:
    pattern = pattern_of("lark", definition, "format")
    constraint = json_constraint({"type": "object", "properties": {"input": {"type": "string", "pattern": pattern}}})
    for text in (*good, *bad):
        assert (re.match(pattern + r"\Z", text) is not None) == (text in good)
        assert bound(constraint.grammar, json.dumps({"input": text}, ensure_ascii=False)) == (text in good)


@pytest.mark.parametrize(
    ("input_text", "fits"), [("put a/b", True), ("put a\nb", True), ("put", False), ("</x>", False)]
)
def test_a_pattern_binds_between_tags_and_as_json(input_text: str, fits: bool) -> None:
    pattern = pattern_of("lark", 'start: "put" /[ ]/ /[a-z\\/\\n<>]*/', "format")
    schema = {"type": "object", "properties": {"input": {"type": "string", "pattern": pattern}}, "required": ["input"]}
    function = {"name": "f", "parameters": schema, "strict": True}
    tools = Tools.of([{"type": "function", "function": function}], forced=True)
    xml = f"<tool_call>\n<function=f>\n<parameter=input>\n{input_text}\n</parameter>\n</function>\n</tool_call>"
    json_call = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps({"input": input_text})}}}\n</tool_call>'
    for form, text in ((QWEN, xml), (HERMES, json_call)):
        assert bound(form.constraint(tools, THINK, "content").grammar, text) == fits


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ('start: "(" start? ")"', "refers to itself"),
        ("start: a\na: b\nb: a", "refers to itself"),
        ("start: x", "'x' is not defined"),
        ("", "'start' is not defined"),
        ("start: WS\n%import common.ELSE", "%import of common . ELSE"),
        ('start: "a"\n%ignore " "', "%ignore is not supported"),
        ('start: "a"~3', "'~' in 'start'"),
        ('start: ("a"', r"\( is not closed"),
        ('start: "a" @', "cannot read '@'"),
        ('start: "\\q"', "cannot read"),
        ("start: /a/x", "flags"),
        ("start: /(?=a)/", "look-around"),
        ("start: " + "(" * 100 + '"a"' + ")" * 100, "nested too deeply"),
        ("start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "a"', "has more than"),
        ("start: " + "|".join(["a"] * 7000) + f"\na: /{'b' * 2000}/", "has more than"),
        ('start: "a"' + " " * 20_000, "has more than"),
    ],
)
def test_what_is_no_pattern_is_refused(definition: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        pattern_of("lark", definition, "tools[0].format")
    assert str(caught.value).startswith("tools[0].format.definition")


def test_a_regular_expression_is_its_own_pattern() -> None:
    assert pattern_of("regex", "a|b", "format") == "^(?:a|b)$"
    for syntax, definition in (("regex", "(?!a)"), ("regex", "a" * 5000), ("gbnf", "a"), ("regex", None)):
        with pytest.raises(RequestError, match="format"):
            pattern_of(syntax, definition, "format")

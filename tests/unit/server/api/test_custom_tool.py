from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.chat.call_formats.families import HERMES, QWEN
from pyctl.chat.reply import THINK
from pyctl.chat.tool_definitions import Tools
from pyctl.errors import RequestError
from pyctl.server.api.custom_tool import to_function, unwrap_input, wrap_input

BYTES = llguidance.LLTokenizer("byte")

EDIT = r"""
// a list of edits
start: head edit+ tail?
head: "*** Edit" LF
edit: put | drop
put.2: "put " name LF line+   // with its lines
line: ("+" | "-" | " ") /(.*)/ LF -> one
drop: "drop " name LF
name: NAME ["/" NAME]
NAME: /[a-z]+[.]\/?(py|c)/i
?tail: "*** End"

%import common.LF
"""


@given(st.text(), st.booleans())
def test_the_input_comes_back(text: str, is_ascii: bool) -> None:
    assert (
        unwrap_input(json.dumps({"input": text}, ensure_ascii=is_ascii))
        == unwrap_input(wrap_input(text))
        == text
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a\\ud83dx\\ude00"}', "a\ufffdx\ufffd"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"x": 1, "input": "a"}', "a"),
        *(
            (text, text)
            for text in ('{"patch": "a"}', '{"input": 7}', '{"input": "ab\\u00', "[" * 5000, "")
        ),
    ],
)
def test_arguments_that_no_grammar_bound_lose_nothing(arguments: str, expected: str) -> None:
    assert unwrap_input(arguments) == expected


def test_a_custom_tool_is_a_function_with_one_string() -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    for given_form in (None, {"type": "text"}, form):
        function = to_function("n", {"description": "Counts.", "format": given_form}, "tools[0]")[
            "function"
        ]
        assert function["parameters"]["properties"] == {"input": {"type": "string"}}
        assert function["strict"] == (given_form is form)
        assert ("[0-9]+" in function["description"]) == (given_form is form)
        assert function["description"].startswith("Counts.")


@pytest.mark.parametrize(
    "form",
    [
        7,
        {"type": "gbnf"},
        {"type": "grammar"},
        {"type": "grammar", "syntax": "gbnf", "definition": "x"},
    ],
)
def test_a_format_of_another_kind_is_refused(form: Any) -> None:
    with pytest.raises(RequestError, match=r"tools\[0\].format"):
        to_function("n", {"format": form}, "tools[0]")


def tools_of(definition: str, syntax: str = "lark") -> Tools:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return Tools.from_request([to_function("f", {"format": form}, "tools[0]")], forced=True)


def may_be(tools: Tools, text: str) -> bool:
    """Return whether a model whose tokens are bytes may call the tool with the input ``text``,
    between tags.
    """
    matcher = llguidance.LLMatcher(BYTES, QWEN.constraint(tools, THINK, "content").grammar)
    call = (
        f"<tool_call>\n<function=f>\n<parameter=input>\n{text}\n"
        "</parameter>\n</function>\n</tool_call>"
    ).encode()
    return matcher.try_consume_tokens(list(call)) == len(call) and matcher.is_accepting()


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
            [
                "",
                "*** Edit\n",
                "*** Edit\nput a.py\n*** End",
                "*** Edit\ndrop a.py/b.c/c.c\n",
                "*** Edit\ndrop a.rs\n",
            ],
        ),
        ('start: A | B\nA: "a.b"i\nB: /\\d+/ WS\n%import common.WS', ["a.B", "12 "], ["axb", "12"]),
        ("start: /a.c/ /d.f/s", ["abcd\nf"], ["a\ncdef"]),
        ('start: ("\\n" | "\\"")*', ["\n", '"\n'], ["n"]),
        (
            "start: head? SOURCE\nhead: /\\/\\/ x/ LF\nSOURCE: /[\\s\\S]+/\n%import common.LF",
            ["a\n</b>"],
            [""],
        ),
    ],
)
def test_a_grammar_without_recursion_binds_between_tags(
    definition: str, good: list[str], bad: list[str]
) -> None:
    tools = tools_of(definition)
    assert [may_be(tools, text) for text in (*good, *bad)] == [True] * len(good) + [False] * len(
        bad
    )


def test_a_regular_expression_binds_between_tags() -> None:
    tools = tools_of(r"a/[b\n]|c", "regex")
    assert [may_be(tools, text) for text in ("a/b", "a/\n", "c", "a", "d")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_elsewhere_the_model_is_told() -> None:
    grammar = HERMES.constraint(tools_of(EDIT), THINK, "content").grammar
    call = (
        f'<tool_call>\n{{"name": "f", "arguments": '
        f"{json.dumps({'input': 'anything'})}}}\n</tool_call>"
    ).encode()
    assert llguidance.LLMatcher(BYTES, grammar).try_consume_tokens(list(call)) == len(call)


@pytest.mark.parametrize(
    "definition",
    [
        'start: "(" start? ")"',
        "start: a\na: b\nb: a",
        "start: x",
        "start: WS\n%import common.ELSE",
        'start: ("a"',
        'start: "a" @',
        "start: /(?=a)/",
        'start: "a"\n}\nx: %json {}',
        'start: "a"' + " " * 5000,
        "start: " + "(" * 2000 + '"a"' + ")" * 2000,
        "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(150)) + 'a150: "a"',
    ],
)
def test_a_grammar_of_another_kind_is_refused_at_once(definition: str) -> None:
    with pytest.raises(RequestError):
        QWEN.constraint(tools_of(definition), THINK, "content")

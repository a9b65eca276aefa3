"""Grammars that make a reply a call of one of the tools, in the form that the template writes.

Values between tags are text up to the end tag where the schema allows a string, one of its words where it lists them,
and JSON by their schema elsewhere; the required ones may come in any order. A call written as JSON has arguments by the
schema as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from pyctl.chat.grammar import Grammar, literal
from pyctl.chat.schema import SchemaRules
from pyctl.chat.tools import CallForm, Tool, Tools

__all__ = ["CALL_TRIGGER", "call_grammar"]

CALL_TRIGGER = "(<tool_call>)"
"""From here on a grammar without ``thinking`` binds a reply that need not call anything."""

_MAX_ANY_ORDER = 5
"""So many required arguments take 32 rules; more of them come in the order of the schema."""

_LINES = r'"\n"{0,2}'


def call_grammar(tools: Tools, form: CallForm, *, think_open: str = "", think_close: str = "") -> str:
    """The grammar of one call of ``tools``, or several where these allow it; JSON for an unknown form.

    With ``think_close``, reasoning that ends so comes first; with ``think_open``, only if the reply begins so.
    RequestError for a schema that cannot be converted.
    """
    grammar = Grammar()
    write = _xml if form == "xml" else _json
    call = grammar.add("call", " | ".join(write(grammar, tool, f"tool-{i}") for i, tool in enumerate(tools.tools)))
    body = f"{_LINES} {call} ({_LINES} {call})*" if tools.parallel else f"{_LINES} {call}"
    if think_close:
        thought = f"{grammar.until('thought', think_close)} {literal(think_close)}"
        body = f"({literal(think_open)} {thought})? {body}" if think_open else f"{thought} {body}"
    grammar.add("root", body)
    return grammar.text()


def _json(grammar: Grammar, tool: Tool, name: str) -> str:
    arguments = SchemaRules(grammar, {"type": "object", **tool.parameters}).rule(f"{name}-arguments")
    head = literal(f'<tool_call>\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
    end = literal("}\n</tool_call>")
    return grammar.add(name, f"{head} {arguments} {end}")


def _xml(grammar: Grammar, tool: Tool, name: str) -> str:
    rules = SchemaRules(grammar, tool.parameters)
    arguments: dict[str, str] = {}
    for number, (key, schema) in enumerate(tool.properties.items()):
        if words := _words(schema):
            inner = f"({' | '.join(map(literal, words))})"
        elif "string" in tool.types(key):
            inner = _text(grammar)
        else:
            inner = rules.rule(f"{name}-value-{number}", schema)
        arguments[key] = _argument(grammar, f"{name}-argument-{number}", literal(key), inner)
    required = [arguments[key] for key in dict.fromkeys(tool.required)]
    others = [rule for key, rule in arguments.items() if key not in tool.required]
    if not arguments and tool.parameters.get("additionalProperties") not in (None, False):
        others = [_argument(grammar, "any-argument", r"[^<>\n]{1,100}", _text(grammar))]
    any_other = f"({' | '.join(others)})*" if others else ""
    if len(required) > _MAX_ANY_ORDER:
        body = f"{' '.join(required)} {any_other}"
    else:
        body = _any_order(grammar, f"{name}-arguments", required, any_other)
    head, end = literal(f"<tool_call>\n<function={tool.name}>\n"), literal("</function>\n</tool_call>")
    return grammar.add(name, f"{head} {body} {end}")


def _words(schema: object) -> list[str]:
    """The values of an enumeration of strings."""
    values = schema.get("enum") if isinstance(schema, dict) else None
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []


def _argument(grammar: Grammar, name: str, key: str, value: str) -> str:
    return grammar.add(name, rf'"<parameter=" {key} ">\n" {value} "\n</parameter>\n"')


def _text(grammar: Grammar) -> str:
    """The rule for text up to an end tag."""
    return "text" if "text" in grammar else grammar.until("text", "\n</parameter>")


def _any_order(grammar: Grammar, name: str, required: Sequence[str], between: str) -> str:
    """Each of ``required`` once, in any order, and ``between`` around them: one rule per set of those that are left."""
    if not required:
        return between
    rules: dict[frozenset[int], str] = {frozenset(): between}
    add = partial(grammar.add, name)
    by_size = sorted((frozenset(_members(mask)) for mask in range(1, 2 ** len(required))), key=len)
    for left in by_size:
        choices = [f"{required[index]} {rules[left - {index}]}".rstrip() for index in sorted(left)]
        rules[left] = add(f"{between} ({' | '.join(choices)})".strip())
    return rules[by_size[-1]]


def _members(mask: int) -> list[int]:
    return [index for index in range(mask.bit_length()) if mask >> index & 1]

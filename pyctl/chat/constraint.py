"""Constraints on a reply: GBNF of the client, or a grammar for llguidance made of texts and JSON
schemas.

Each `Constraint` was compiled once without a vocabulary, within limits, to find errors of a schema
early.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pyctl.chat.exact_numbers import expression, has_exact_numbers
from pyctl.chat.grammar_rules import GrammarRules
from pyctl.chat.json_object import JsonObject
from pyctl.chat.json_schema import ready_schema
from pyctl.chat.reply import ReasoningTags, ReplyPart
from pyctl.errors import RequestError

__all__ = [
    "Constraint",
    "GrammarBuilder",
    "json_constraint",
    "reasoned",
    "reply_constraint",
    "reply_json",
]

_HEADER = '%llguidance {"no_forcing": true}\n'
"""The model may spell fixed text in any tokens."""

_JSON_OPTIONS = {
    "whitespace_pattern": r"(?: |\n{1,2}[ \t]{0,20})",
    "json_allow_general_unicode_escapes": True,
    "lenient": True,
}
"""Little white space, so that a model does not lose itself in it."""

_MAX_BYTES = 1 << 20


class Constraint(msgspec.Struct, frozen=True):
    """A constraint on a reply: ``grammar`` binds the whole reply, which goes on from ``prefill``;
    its ``kind`` is its language.

    With ``triggers`` (regular expressions) it binds nothing until the reply matches one of them,
    and from there on; where the reply starts with what is ``hidden`` (an opening, empty if the
    prompt has it, and a closing), only the text after that counts.
    """

    grammar: str
    triggers: tuple[str, ...] = ()
    prefill: str = ""
    hidden: tuple[str, str] | None = None
    kind: Literal["gbnf", "llguidance"] = "gbnf"


class GrammarBuilder(GrammarRules):
    """Puts a grammar together; every piece is an expression that may be joined with others, a space
    between.

    grammar = GrammarBuilder() call = f'{grammar.text("<call>")} {grammar.json({"type": "object"})}
    {grammar.text("</call>")}' grammar.constraint(f"{grammar.until('</think>')} {call}")

    ``controls`` are the control tokens of the vocabulary, id by text: `text` and `until` mean these
    tokens where they occur, while texts of clients, in `quoted` and `json`, are never more than
    text.
    """

    def __init__(self, controls: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self._controls = controls or {}
        self._control = re.compile(
            "|".join(map(re.escape, sorted(self._controls, key=len, reverse=True))) or r"(?!)"
        )

    def text(self, text: str) -> str:
        """Return the expression for ``text`` of the template, control tokens included."""
        parts = []
        end = 0
        for control in self._control.finditer(text):
            before = text[end : control.start()]
            if before:
                parts.append(self.quoted(before))
            token = self._controls[control.group()]
            parts.append(f"<[{token}]>")
            end = control.end()
        if end < len(text):
            parts.append(self.quoted(text[end:]))
        return " ".join(parts)

    def until(self, end: str, terminals: str = "") -> str:
        """Return the expression for any text, or START of these ``terminals`` of Lark's, up to and
        including the first ``end``.
        """
        control = self._control.search(end)
        suffix = ""
        if control is None:
            suffix = f"[suffix={json.dumps(end)}]"
        if terminals:
            text = self.rule(f"%lark {{\nstart: text\ntext{suffix}: START\n{terminals}\n}}")
        elif suffix:
            text = self.rule(f"{suffix}: /(?s:.*)/")
        else:
            text = self.rule("/(?s:.*)/")
        if control is None:
            return text
        rest = self.text(end[control.start() :])
        return f"{text} {rest}"

    def json(self, schema: Any, root: Any = None) -> str:
        """Return the expression for JSON that ``schema`` accepts, which is a part of ``root``.
        Raises RequestError if it is not a schema.
        """
        ready = ready_schema(schema, root)
        if has_exact_numbers(ready):
            return self.rule(expression(ready, self, _json_rule))
        return self.rule(_json_rule(ready))

    def constraint(
        self,
        start: str,
        triggers: tuple[str, ...] = (),
        prefill: str = "",
        hidden: tuple[str, str] | None = None,
    ) -> Constraint:
        """Return the constraint to replies that are ``start``. Raises RequestError if no reply can
        be, or if the grammar is too large to decide that.
        """
        grammar = f"{_HEADER}start: {start}\n{self.written()}"
        if len(grammar) > _MAX_BYTES:
            raise RequestError(f"the grammar has more than {_MAX_BYTES} bytes")
        error = _error_of(grammar)
        if error:
            raise RequestError(_reason(error))
        return Constraint(
            grammar=grammar,
            triggers=triggers,
            prefill=prefill,
            hidden=hidden,
            kind="llguidance",
        )


def _error_of(grammar: str) -> str:
    """Return the error of a grammar for llguidance, empty without one."""
    import llguidance  # with the first grammar: most servers compile none

    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    return llguidance.LLMatcher.validate_grammar(grammar, limits=limits)


def _json_rule(schema: JsonObject) -> str:
    """Return the body of a rule for JSON by a schema that `ready_schema` made."""
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"
    except RecursionError as error:
        raise RequestError("the JSON schema is nested too deeply") from error


def json_constraint(schema: Any) -> Constraint:
    """Return the constraint to replies that are JSON that ``schema`` accepts."""
    grammar = GrammarBuilder()
    return grammar.constraint(grammar.json(schema))


def reply_constraint(
    schema: Any,
    tags: ReasoningTags,
    part: ReplyPart,
    prefill: str = "",
    controls: Mapping[str, int] | None = None,
) -> Constraint:
    """Return the constraint to content that is JSON by ``schema``, after an optional reasoning
    block; ``part`` is the part in which the reply starts.
    """
    grammar = GrammarBuilder(controls)
    return grammar.constraint(reply_json(grammar, schema, tags, part), prefill=prefill)


def reply_json(
    grammar: GrammarBuilder,
    schema: Any,
    tags: ReasoningTags,
    part: ReplyPart,
    calls: str = "",
) -> str:
    """Return the expression for a reply whose content is JSON that ``schema`` accepts, or ``calls``
    instead.
    """
    content = grammar.json(schema)
    if tags.content_open and part != "content":
        content = f"{grammar.text(tags.content_open)} {content}"
    if calls:
        content = f"({calls} | {content})"
    return reasoned(grammar, content, tags, part, _GAP)


_GAP = r"/[ \t\n]{1,8}/?"


def reasoned(
    grammar: GrammarBuilder,
    content: str,
    tags: ReasoningTags,
    part: ReplyPart,
    gap: str = "",
) -> str:
    """Return the expression for ``content`` after a reasoning block and ``gap``, according to
    ``part``.
    """
    if part == "content":
        return content
    text = grammar.until(tags.close)
    next_message = grammar.text(tags.next_message)
    block = f"{text} {next_message} {gap}"
    if part != "start":
        return f"{block} {content}"
    opening = grammar.text(tags.open)
    return f"({opening} {block})? {content}"


_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")


def _reason(error: str) -> str:
    """Return the line of the library's message that has the reason."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    reason = next(
        (line for line in lines if line.startswith("error:")),
        lines[0] if lines else "it is refused",
    )
    return _PLACE.sub("", reason)[:300]

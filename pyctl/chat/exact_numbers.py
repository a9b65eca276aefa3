"""JSON by schemas with numbers that the grammar library would round.

llguidance reads the numbers of a schema as 64-bit floats, so that an integer of more than 53 bits
becomes another one, and 1.0 becomes 1. The values with such numbers, and the objects and lists
around them, are therefore written as rules of texts; all that they hold besides stays JSON by a
schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pyctl.chat.grammar_rules import GrammarRules
from pyctl.chat.json_schema import has_type
from pyctl.errors import RequestError

__all__ = ["MAX_EXACT", "expression", "has_exact_numbers"]

MAX_EXACT = 2**53
"""A float may stand for several integers beyond this one."""

_BLANKS = r"/(?: |\n{1,2}[ \t]{0,20})/?"
"""The blanks that may stand between two marks of JSON, as in `pyctl.chat.constraint`."""

_COMMA = f'{_BLANKS} "," {_BLANKS}'
_KEY = r'/"([^"\\\x00-\x1F\x7F]|\\(["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"/'

_MAX_BYTES = 1 << 20
"""The maximum size of all rules for one schema."""


def has_exact_numbers(schema: Any) -> bool:
    """Return whether a schema that `ready_schema` made has a number that a float would change."""
    if not isinstance(schema, dict):
        return False
    if any(_is_exact(value) for value in _values(schema)):
        return True
    parts = (*_children(schema), *schema.get("$defs", {}).values())
    return any(map(has_exact_numbers, parts))


def expression(
    schema: Mapping[str, Any], rules: GrammarRules, as_json: Callable[[Mapping[str, Any]], str]
) -> str:
    """Return an expression for JSON by ``schema``, which `ready_schema` made.

    ``as_json`` returns the body of a rule for a schema without exact numbers. Raises RequestError
    where the rules would become too long, and for parts that rules cannot express.
    """
    return _Writer(schema, rules, as_json).write(schema)


def _values(schema: JsonObject) -> Iterator[Any]:
    """Yield the values and bounds that a schema names itself."""
    yield from (schema[key] for key in ("const", "minimum", "maximum") if key in schema)
    yield from schema.get("enum", ())


def _is_exact(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_exact, value))
    if isinstance(value, dict):
        return any(map(_is_exact, value.values()))
    if isinstance(value, float):
        # The library writes 1.0 as 1, and 1e-07 as 0.0000001.
        return value.is_integer() or "e" in repr(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_EXACT


def _children(schema: JsonObject) -> Iterator[Any]:
    """Yield the schemas within a schema, except its definitions."""
    for key in ("allOf", "anyOf", "prefixItems"):
        yield from schema.get(key, ())
    for key in ("properties", "patternProperties"):
        yield from schema.get(key, {}).values()
    yield from (schema[key] for key in ("items", "additionalProperties") if key in schema)


def _references(schema: Any) -> Iterator[str]:
    """Yield the names of the definitions that a schema refers to by itself."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].removeprefix("#/$defs/")
        for child in _children(schema):
            yield from _references(child)


class _Writer:
    """A writer of the rules for one schema and its definitions."""

    def __init__(
        self,
        schema: Mapping[str, Any],
        rules: GrammarRules,
        as_json: Callable[[Mapping[str, Any]], str],
    ) -> None:
        """Mark the definitions and schemas that have exact numbers, or lead to one that has.

        Definitions may refer to each other in circles, so the marks spread until none is new.
        """
        self._definitions: JsonObject = schema.get("$defs", {})
        self._rules = rules
        self._as_json = as_json
        self._leads_to = {name: set(_references(each)) for name, each in self._definitions.items()}
        self._exact = {name for name, each in self._definitions.items() if has_exact_numbers(each)}
        while (
            more := {name for name, ends in self._leads_to.items() if ends & self._exact}
            - self._exact
        ):
            self._exact |= more
        self._marked: set[int] = set()
        for each in (schema, *self._definitions.values()):
            self._mark(each)
        self._named: dict[str, str] = {}
        self._waiting: list[str] = []
        self._size = 0

    def write(self, schema: JsonObject) -> str:
        """Return an expression for JSON by ``schema``, and define the rules of the definitions that
        it leads to.
        """
        written = self.expression(schema)
        while self._waiting:  # no recursion: one definition leads to the next
            name = self._waiting.pop()
            self._rules.define(self._named[name], self.expression(self._definitions[name]))
        return written

    def _mark(self, schema: Any) -> None:
        """Mark the schemas within ``schema`` that need rules and are examined more than once."""
        if isinstance(schema, dict):
            for child in _children(schema):
                self._mark(child)
            if self._needs_rules(schema):
                self._marked.add(id(schema))

    def _needs_rules(self, schema: Any) -> bool:
        """Return whether ``schema``, whose parts are marked, needs rules."""
        if not isinstance(schema, dict):
            return False
        if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") in self._exact:
            return True
        return any(map(_is_exact, _values(schema))) or any(
            id(child) in self._marked for child in _children(schema)
        )

    def expression(self, schema: Any) -> str:
        """Return an expression for JSON by ``schema``."""
        if isinstance(schema, dict) and "$ref" in schema:
            return self._defined(schema["$ref"].removeprefix("#/$defs/"))
        if not self._needs_rules(schema):
            return self._json(schema)
        if "allOf" in schema:
            raise RequestError(
                "a number of more than 53 bits, or like 1.0, cannot be combined with allOf"
            )
        if "anyOf" in schema:
            parts = [self._of_types(part, schema.get("type", ())) for part in schema["anyOf"]]
            return self._one_of([self.expression(part) for part in parts if part is not False])
        for key in ("const", "enum"):
            if key in schema:
                values = [schema[key]] if key == "const" else schema[key]
                return self._one_of([self._literal(value) for value in values])
        return self._one_of([self._typed(schema, kind) for kind in schema.get("type", ())])

    def _alone(self, schema: Any) -> JsonDict:
        """Return ``schema`` with the definitions that it refers to."""
        if not isinstance(schema, dict):
            return {} if schema else {"anyOf": [False]}
        left = list(_references(schema))
        known = dict[str, Any]()
        while left:
            name = left.pop()
            if name not in known:
                known[name] = self._definitions[name]
                left += self._leads_to[name]
        own = {key: value for key, value in schema.items() if key != "$defs"}
        return {**own, "$defs": known} if known else own

    def _json(self, schema: Any) -> str:
        return self._rules.rule(self._counted(self._as_json(self._alone(schema))))

    def _counted(self, text: str) -> str:
        self._size += len(text)
        if self._size > _MAX_BYTES:
            raise RequestError(f"the grammar has more than {_MAX_BYTES} bytes")
        return text

    def _one_of(self, choices: Sequence[str]) -> str:
        if not choices:
            raise RequestError("no value has the types and the values that the JSON schema names")
        return self._counted(self._rules.one_of(choices))

    def _defined(self, name: str) -> str:
        if name not in self._named:
            self._named[name] = self._rules.new_rule()
            self._waiting.append(name)
        return self._named[name]

    def _of_types(self, part: Any, kinds: Sequence[str]) -> Any:
        """Return ``part`` with only the values that have one of these types, all of them without
        any; False for none.
        """
        if not kinds or part is False:
            return part
        if part is True:
            return {"type": list(kinds)}
        if "const" in part or "enum" in part:
            values = [part["const"]] if "const" in part else part["enum"]
            left = [value for value in values if has_type(value, kinds)]
            return {"enum": left} if left else False
        if "type" in part:
            named = [
                kind
                for kind in part["type"]
                if kind in kinds or (kind == "integer" and "number" in kinds)
            ]
            return {**part, "type": named} if named else False
        if self._needs_rules(part):
            raise RequestError(
                "a number of more than 53 bits, or like 1.0, has a type around it in the JSON "
                "schema"
            )
        return {"allOf": [{"type": list(kinds)}, part]}

    def _typed(self, schema: JsonObject, kind: str) -> str:
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "integer" and any(
            _is_exact(schema.get(bound)) for bound in ("minimum", "maximum")
        ):
            if "multipleOf" in schema:
                raise RequestError("multipleOf cannot be combined with bounds of more than 53 bits")
            return f"/{_between(schema['minimum'], schema['maximum'])}/"
        return self._json({**schema, "type": [kind]})

    def _literal(self, value: Any) -> str:
        """Return one value, with blanks between its marks."""
        if isinstance(value, list):
            inner = _COMMA.join(f" {self._literal(each)} " for each in value)
        elif isinstance(value, dict):
            inner = _COMMA.join(
                f" {self._key(key)} {self._literal(each)} " for key, each in value.items()
            )
        else:
            return self._counted(self._rules.quoted(json.dumps(value, ensure_ascii=False)))
        opening, end = "[]" if isinstance(value, list) else "{}"
        return (
            f'"{opening}" {_BLANKS} {inner} {_BLANKS} "{end}"'
            if value
            else f'"{opening}" {_BLANKS} "{end}"'
        )

    def _key(self, name: str) -> str:
        """Return the name of a member, and what stands between it and the value."""
        text = self._rules.quoted(json.dumps(name, ensure_ascii=False))
        return self._counted(f'{text} {_BLANKS} ":" {_BLANKS}')

    def _object(self, schema: JsonObject) -> str:
        """Return the expression for an object by ``schema``.

        Raises RequestError for patternProperties, which exclude exact numbers.
        """
        if schema.get("patternProperties"):
            raise RequestError(
                "a number of more than 53 bits, or like 1.0, cannot be combined with "
                "patternProperties"
            )
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        pairs = [
            (f"{self._key(name)} {self.expression(each)}", name in required)
            for name, each in properties.items()
        ]
        more = schema.get("additionalProperties", True)
        others = ""
        if more is not False:
            name = self._other_name(properties)
            others = self._rules.rule(f'{name} {_BLANKS} ":" {_BLANKS} {self.expression(more)}')
        return f'"{{" {_BLANKS} {self._members(pairs, others)} {_BLANKS} "}}"'

    def _members(self, pairs: Sequence[tuple[str, bool]], others: str) -> str:
        """Return the members in this order, those that are not required maybe missing, and any
        number of ``others``.
        """
        # `first` has no member before it, `following` has one.
        following = f"({_COMMA} {others})*" if others else ""
        first = f"({others} {following})?" if others else ""
        for pair, is_required in reversed(pairs):
            pair = self._rules.rule(self._counted(pair))
            opened = f"{pair} {following}".rstrip()
            either = f"{opened} | {first}" if first else f"({opened})?"
            first = self._rules.rule(opened if is_required else either)
            rest = f"({_COMMA} {pair}){'' if is_required else '?'} {following}".rstrip()
            following = self._rules.rule(self._counted(rest))
        return first

    def _other_name(self, known: JsonObject) -> str:
        """Return any name of a member that is not ``known``."""
        if not known:
            return _KEY
        names = [self._rules.quoted(json.dumps(name, ensure_ascii=False)) for name in known]
        return self._rules.terminal(self._counted(f"{_KEY} & ~({' | '.join(names)})"))

    def _array(self, schema: JsonObject) -> str:
        """Return the expression for an array by ``schema``: the first items, then repeated ones.

        It is built from its end, since an optional item contains all that follow it. Raises
        RequestError if minItems is above the maximum.
        """
        first = [self.expression(each) for each in schema.get("prefixItems", ())]
        low = schema.get("minItems", 0)
        high = schema.get("maxItems")
        first = first[:high]
        rest = schema.get("items", True)
        if rest is False:
            high = len(first)
        if high is not None and high < low:
            raise RequestError(
                "'minItems' in the JSON schema is above the number of items that it allows"
            )
        tail = ""
        if high is None or high > len(first):
            item = self._rules.rule(self._counted(self.expression(rest)))
            if not first:  # the first of these has no comma before it
                first = [item]
            tail = _repeated(
                f"{_COMMA} {item}", max(low - len(first), 0), high and high - len(first)
            )
        for index in reversed(range(len(first))):
            item = f"{_COMMA} {first[index]}" if index else first[index]
            tail = self._counted(f"{item} {tail}" if index < low else f"({item} {tail})?")
        return f'"[" {_BLANKS} {tail} {_BLANKS} "]"'


def _repeated(expression: str, low: int, high: int | None) -> str:
    """Return ``expression`` ``low`` to ``high`` times, None for any number."""
    if high is None:
        return f"({expression}){{{low},}}"
    return f"({expression}){{{low},{high}}}" if high else ""


def _between(low: int, high: int) -> str:
    """Return a regular expression for the integers from ``low`` to ``high``."""
    if high < 0:
        return f"-({_digits(-high, -low)})"
    if low < 0:
        return f"-({_digits(1, -low)})|{_digits(0, high)}"
    return _digits(low, high)


def _digits(low: int, high: int) -> str:
    """Return a regular expression for the integers from ``low`` >= 0 to ``high``, by their number
    of digits.
    """
    parts = []
    while low <= high:
        last = min(high, 10 ** len(str(low)) - 1)
        parts += _of_one_length(str(low), str(last))
        low = last + 1
    return "|".join(parts)


def _of_one_length(low: str, high: str) -> list[str]:
    """Return regular expressions for the numbers from ``low`` to ``high``, which have as many
    digits.
    """
    if low == high:
        return [low]
    n = len(low) - 1
    if low[1:] == "0" * n and high[1:] == "9" * n:
        return [_digit(low[0], high[0]) + _any_digits(n)]
    if low[0] == high[0]:
        return [low[0] + each for each in _of_one_length(low[1:], high[1:])]
    parts = [low[0] + each for each in _of_one_length(low[1:], "9" * n)]
    if int(low[0]) + 1 < int(high[0]):
        parts.append(_digit(str(int(low[0]) + 1), str(int(high[0]) - 1)) + _any_digits(n))
    return parts + [high[0] + each for each in _of_one_length("0" * n, high[1:])]


def _digit(low: str, high: str) -> str:
    return low if low == high else f"[{low}-{high}]"


def _any_digits(n: int) -> str:
    return f"[0-9]{{{n}}}" if n else ""

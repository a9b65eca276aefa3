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
from pyctl.chat.json_object import JsonDict, JsonObject
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


def _definition_name(schema: JsonObject) -> str:
    """Return the name of the definition that ``$ref`` refers to."""
    return str(schema["$ref"]).removeprefix("#/$defs/")


def _as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _references(schema: Any) -> Iterator[str]:
    """Yield the names of the definitions that a schema refers to by itself."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield _definition_name(schema)
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
        self._leads_to: dict[str, set[str]] = {}
        self._exact: set[str] = set()
        for name, definition in self._definitions.items():
            self._leads_to[name] = set(_references(definition))
            if has_exact_numbers(definition):
                self._exact.add(name)
        self._spread()
        self._marked: set[int] = set()
        self._mark(schema)
        for definition in self._definitions.values():
            self._mark(definition)
        self._named: dict[str, str] = {}
        self._waiting: list[str] = []
        self._size = 0

    def _spread(self) -> None:
        """Mark the definitions that lead to a marked one as exact."""
        is_complete = False
        while not is_complete:
            is_complete = True
            for name, targets in self._leads_to.items():
                if name not in self._exact and targets & self._exact:
                    self._exact.add(name)
                    is_complete = False

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
        if "$ref" in schema and _definition_name(schema) in self._exact:
            return True
        if any(map(_is_exact, _values(schema))):
            return True
        return any(id(child) in self._marked for child in _children(schema))

    def expression(self, schema: Any) -> str:
        """Return an expression for JSON by ``schema``."""
        if isinstance(schema, dict) and "$ref" in schema:
            return self._defined(_definition_name(schema))
        if not self._needs_rules(schema):
            return self._json(schema)
        types = schema.get("type", ())
        if "allOf" in schema:
            raise RequestError(
                "a number of more than 53 bits, or like 1.0, cannot be combined with allOf"
            )
        if "anyOf" in schema:
            parts = [self._of_types(part, types) for part in schema["anyOf"]]
            return self._one_of([self.expression(part) for part in parts if part is not False])
        if "const" in schema:
            return self._one_of([self._literal(schema["const"])])
        if "enum" in schema:
            return self._one_of([self._literal(value) for value in schema["enum"]])
        return self._one_of([self._typed(schema, kind) for kind in types])

    def _self_contained(self, schema: Any) -> JsonDict:
        """Return ``schema`` with the definitions that it refers to."""
        if not isinstance(schema, dict):
            return {} if schema else {"anyOf": [False]}
        names = list(_references(schema))
        definitions = dict[str, Any]()
        while names:
            name = names.pop()
            if name not in definitions:
                definitions[name] = self._definitions[name]
                names += self._leads_to[name]
        own = {key: value for key, value in schema.items() if key != "$defs"}
        if definitions:
            own["$defs"] = definitions
        return own

    def _json(self, schema: Any) -> str:
        return self._rules.rule(self._counted(self._as_json(self._self_contained(schema))))

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
            typed = [value for value in values if has_type(value, kinds)]
            return {"enum": typed} if typed else False
        if "type" in part:
            allowed = set(kinds)
            if "number" in allowed:
                allowed.add("integer")
            both = [kind for kind in part["type"] if kind in allowed]
            return {**part, "type": both} if both else False
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
        low = schema.get("minimum")
        high = schema.get("maximum")
        if kind == "integer" and (_is_exact(low) or _is_exact(high)):
            if "multipleOf" in schema:
                raise RequestError("multipleOf cannot be combined with bounds of more than 53 bits")
            pattern = _between(schema["minimum"], schema["maximum"])
            return f"/{pattern}/"
        return self._json({**schema, "type": [kind]})

    def _literal(self, value: Any) -> str:
        """Return one value, with blanks between its marks."""
        opening = "["
        end = "]"
        parts = []
        if isinstance(value, list):
            for item in value:
                parts.append(f" {self._literal(item)} ")
        elif isinstance(value, dict):
            opening = "{"
            end = "}"
            for key, item in value.items():
                parts.append(f" {self._key(key)} {self._literal(item)} ")
        else:
            return self._counted(self._rules.quoted(_as_text(value)))
        if not parts:
            return f'"{opening}" {_BLANKS} "{end}"'
        inner = _COMMA.join(parts)
        return f'"{opening}" {_BLANKS} {inner} {_BLANKS} "{end}"'

    def _key(self, name: str) -> str:
        """Return the name of a member, and the text between it and the value."""
        text = self._rules.quoted(_as_text(name))
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
        pairs = []
        for name, part in properties.items():
            key = self._key(name)
            value = self.expression(part)
            pairs.append((f"{key} {value}", name in required))
        more = schema.get("additionalProperties", True)
        others = ""
        if more is not False:
            name = self._other_name(properties)
            value = self.expression(more)
            others = self._rules.rule(f'{name} {_BLANKS} ":" {_BLANKS} {value}')
        members = self._members(pairs, others)
        return f'"{{" {_BLANKS} {members} {_BLANKS} "}}"'

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
            mark = ""
            if not is_required:
                mark = "?"
                opened = f"{opened} | {first}" if first else f"({opened})?"
            first = self._rules.rule(opened)
            rest = f"({_COMMA} {pair}){mark} {following}".rstrip()
            following = self._rules.rule(self._counted(rest))
        return first

    def _other_name(self, known: JsonObject) -> str:
        """Return any name of a member that is not ``known``."""
        if not known:
            return _KEY
        names = [self._rules.quoted(_as_text(name)) for name in known]
        either = " | ".join(names)
        return self._rules.terminal(self._counted(f"{_KEY} & ~({either})"))

    def _array(self, schema: JsonObject) -> str:
        """Return the expression for an array by ``schema``: the first items, then repeated ones.

        It is built from its end, since an optional item contains all that follow it. Raises
        RequestError if minItems is above the maximum.
        """
        low = schema.get("minItems", 0)
        high = schema.get("maxItems")
        first = [self.expression(part) for part in schema.get("prefixItems", ())]
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
            at_least = max(low - len(first), 0)
            at_most = high and high - len(first)
            tail = _repeated(f"{_COMMA} {item}", at_least, at_most)
        for index in reversed(range(len(first))):
            item = f"{_COMMA} {first[index]}" if index else first[index]
            tail = f"{item} {tail}" if index < low else f"({item} {tail})?"
            self._counted(tail)
        return f'"[" {_BLANKS} {tail} {_BLANKS} "]"'


def _repeated(expression: str, low: int, high: int | None) -> str:
    """Return ``expression`` ``low`` to ``high`` times, None for any number."""
    if high is None:
        return f"({expression}){{{low},}}"
    if high == 0:
        return ""
    return f"({expression}){{{low},{high}}}"


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
        highest = 10 ** len(str(low)) - 1
        last = min(high, highest)
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
    first = low[0]
    last = high[0]
    zeros = "0" * n
    nines = "9" * n
    if low[1:] == zeros and high[1:] == nines:
        return [_digit(int(first), int(last)) + _any_digits(n)]
    if first == last:
        return [first + rest for rest in _of_one_length(low[1:], high[1:])]
    parts = [first + rest for rest in _of_one_length(low[1:], nines)]
    second = int(first) + 1
    if second < int(last):
        parts.append(_digit(second, int(last) - 1) + _any_digits(n))
    parts += [last + rest for rest in _of_one_length(zeros, high[1:])]
    return parts


def _digit(low: int, high: int) -> str:
    return str(low) if low == high else f"[{low}-{high}]"


def _any_digits(n: int) -> str:
    return f"[0-9]{{{n}}}" if n else ""

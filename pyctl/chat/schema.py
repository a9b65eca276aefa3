"""JSON schemas as grammars: what a reply may be that has to be an instance of a schema.

The dialect is what llama-server takes (common/json-schema.cpp says which keywords count): types, const and enum,
properties with required and additionalProperties, items, prefixItems, minItems and maxItems, lengths, patterns and
formats of strings, bounds of integers, anyOf, oneOf, allOf and references into the same document. Other keywords are
ignored. Required properties come first, then the others, each in their order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pyctl.chat.grammar import Grammar, literal, repeated
from pyctl.chat.json_rules import JsonRules, constant
from pyctl.chat.numerals import integers
from pyctl.chat.pattern import string_of
from pyctl.chat.reasoning import ReasoningTags, ReplyPart
from pyctl.errors import RequestError

__all__ = ["SchemaRules", "reply_grammar", "schema_grammar"]

_FORMATS = {"date": "date", "time": "time", "date-time": "date-time", "uuid": "uuid"}
_FORMATS |= {f"uuid{version}": "uuid" for version in range(1, 6)}
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null", "value"})
_DEPTH = 200
"""Of schemas within schemas; each takes a frame or two here and in llama.cpp."""


def schema_grammar(schema: Any) -> str:
    """The grammar of the JSON texts that ``schema`` accepts; RequestError if it cannot be converted."""
    grammar = Grammar()
    grammar.add("root", SchemaRules(grammar, schema).rule("reply"))
    return grammar.text()


def reply_grammar(schema: Any, tags: ReasoningTags, reply_part: ReplyPart) -> str:
    """The grammar of a reply whose content ``schema`` accepts, behind a reasoning block if there is one.

    ``reply_part`` says where the reply begins: inside of the block, behind it, or where one may be opened.
    """
    grammar = Grammar()
    content = SchemaRules(grammar, schema).rule("reply")
    block = ""
    if reply_part != "content":
        block = f"{grammar.until('reasoning', tags.close)} {literal(tags.close)} [ \\t\\n]{{0,8}} "
    grammar.add(
        "root", (block if reply_part == "reasoning" else block and f"({literal(tags.open)} {block})? ") + content
    )
    return grammar.text()


class SchemaRules:
    """Puts ``schema`` into a larger ``grammar``. References in it are looked up in ``schema`` itself.

    rules = SchemaRules(grammar, {"type": "object", "properties": {"city": {"type": "string"}}})
    grammar.add("root", f'"<arguments>" {rules.rule("arguments")} "</arguments>"')
    """

    def __init__(self, grammar: Grammar, schema: Any) -> None:
        self._grammar = grammar
        self._root = schema
        self._json = JsonRules(grammar)
        self._refs: dict[str, str] = {}
        self._depth = 0

    def rule(self, name: str, schema: Any = None) -> str:
        """The name of a rule, like ``name``, for the JSON texts that ``schema`` accepts; None for the whole one.

        RequestError says what cannot be converted.
        """
        try:
            return self._visit(self._root if schema is None else schema, name)
        except RecursionError as error:
            raise RequestError("the JSON schema is nested too deeply") from error

    def _visit(self, schema: Any, name: str) -> str:
        self._depth += 1
        if self._depth > _DEPTH:
            raise RequestError("the JSON schema is nested too deeply")
        try:
            return self._convert(schema, name)
        finally:
            self._depth -= 1

    def _convert(self, schema: Any, name: str) -> str:
        if schema is True:
            return self._json.rule("value")
        if not isinstance(schema, dict):
            raise RequestError(f"a JSON schema must be an object, not {_shown(schema)}")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        for key in ("oneOf", "anyOf"):
            if key in schema:
                parts = enumerate(_some_schemas(schema[key], key))
                return self._add(name, " | ".join(self._visit(part, f"{name}-{i}") for i, part in parts))
        if "const" in schema:
            return self._add(name, constant(schema["const"]))
        if "enum" in schema:
            values = schema["enum"]
            if not isinstance(values, list) or not values:
                raise RequestError("'enum' in a JSON schema must be a list with at least one value")
            return self._add(name, " | ".join(dict.fromkeys(constant(value) for value in values)))
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            return self._add(
                name, " | ".join(self._visit({**schema, "type": each}, f"{name}-{i}") for i, each in enumerate(kind))
            )
        if "allOf" in schema and kind in (None, "object", "string"):
            return self._all_of(schema, name)
        return self._typed(schema, kind if kind is not None else _guess(schema), name)

    def _typed(self, schema: Mapping[str, Any], kind: Any, name: str) -> str:
        if kind == "object":
            return self._object(schema, name)
        if kind == "array":
            return self._array(schema, name)
        if kind == "string":
            return self._string(schema, name)
        if kind == "integer" and (bounds := _bounds(schema)) != (None, None):
            return self._add(name, integers(*bounds))
        if isinstance(kind, str) and kind in _TYPES:
            return self._json.rule(kind)
        raise RequestError(f"unknown type {_shown(kind)} in the JSON schema")

    def _add(self, name: str, body: str) -> str:
        return self._grammar.add(name, body)

    # -- references and combinations ---------------------------------------------------------------------------------

    def _reference(self, ref: Any) -> str:
        target = self._target(ref)
        key = str(ref)
        if key not in self._refs:
            self._refs[key] = name = self._grammar.reserve(f"ref{key[:80]}")
            self._grammar.define(name, self._visit(target, f"{name}-is"))
        return self._refs[key]

    def _target(self, ref: Any) -> Any:
        """What a reference, a JSON pointer (RFC 6901) behind a number sign, points at."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise RequestError(f"unsupported $ref {_shown(ref)}: only references into the same document are supported")
        target = self._root
        for part in ref.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and part in target:
                target = target[part]
            elif isinstance(target, list) and part.isdecimal() and int(part) < len(target):
                target = target[int(part)]
            else:
                raise RequestError(f"cannot resolve $ref {ref}: there is no {part!r}")
        return target

    def _all_of(self, schema: dict[str, Any], name: str) -> str:
        parts = _some_schemas(schema["allOf"], "allOf")
        rest = {key: value for key, value in schema.items() if key != "allOf"}
        if len(parts) == 1 and not rest.keys() & {"properties", "required", "additionalProperties"}:
            return self._visit(parts[0], name)
        merged: dict[str, Any] = {}
        for part in (*parts, rest):
            self._merge(merged, part, 0)
        if merged.get("enum") == []:
            raise RequestError("the values of 'enum' in an 'allOf' have nothing in common")
        return self._visit(merged, name)

    def _merge(self, merged: dict[str, Any], part: Any, depth: int) -> None:
        """Add what ``part`` demands; the properties of alternatives become optional ones, as in llama-server."""
        while isinstance(part, dict) and "$ref" in part and depth < _DEPTH:
            part, depth = self._target(part["$ref"]), depth + 1
        if not isinstance(part, dict) or depth >= _DEPTH:
            raise RequestError("'allOf' in a JSON schema must be a list of schemas")
        for each in part.get("allOf", ()):
            self._merge(merged, each, depth + 1)
        for each in (*part.get("anyOf", ()), *part.get("oneOf", ())):
            inner: dict[str, Any] = {}
            self._merge(inner, each, depth + 1)
            merged["properties"] = {**inner.get("properties", {}), **merged.get("properties", {})}
        if "enum" in part and "enum" in merged:
            part = {**part, "enum": [value for value in merged["enum"] if value in part["enum"]]}
        required = [*merged.get("required", ()), *_names(part.get("required"))]
        properties = {**merged.get("properties", {}), **_properties(part)}
        merged.update({key: value for key, value in part.items() if key not in ("allOf", "anyOf", "oneOf")})
        merged |= {"required": required} if required else {}
        merged |= {"properties": properties} if properties else {}

    # -- types -------------------------------------------------------------------------------------------------------

    def _object(self, schema: Mapping[str, Any], name: str) -> str:
        properties, required = _properties(schema), set(_names(schema.get("required")))
        more = schema.get("additionalProperties", "properties" not in schema)
        if not isinstance(more, bool | dict):
            raise RequestError("'additionalProperties' in a JSON schema must be true, false or a schema")
        if more is True and not properties:
            return self._json.rule("object")
        space = self._json.rule("space")
        members = {key: self._member(key, value, name) for key, value in properties.items()}
        first = [rule for key, rule in members.items() if key in required]
        others = [(rule, "?") for key, rule in members.items() if key not in required]
        if more is not False:
            value = self._visit(more, f"{name}-additional-value")
            key = self._json.other_string(properties, f"{name}-key") if properties else self._json.rule("string")
            others.append((self._add(f"{name}-additional", f'{key} ":" {space} {value}'), "*"))
        body = f' "," {space} '.join(first)
        if others:
            choices = []
            rest = ""
            for number, (rule, sign) in reversed(list(enumerate(others))):
                again = f' ("," {space} {rule})*' if sign == "*" else ""
                choices.append(f"{rule}{again}{rest}")
                rest = " " + self._add(f"{name}-rest-{number}", f'("," {space} {rule}){sign}{rest}')
            body += f' ("," {space} ({" | ".join(choices)}))?' if first else f"({' | '.join(choices)})?"
        return self._add(name, f'"{{" {space} {body} {space} "}}"')

    def _member(self, key: str, schema: Any, name: str) -> str:
        value = self._visit(schema, f"{name}-{key[:40]}")
        space = self._json.rule("space")
        return self._add(f"{name}-{key[:40]}-member", f'{constant(key)} {space} ":" {space} {value}')

    def _array(self, schema: Mapping[str, Any], name: str) -> str:
        space = self._json.rule("space")
        comma = f'"," {space}'
        items = schema.get("items", schema.get("prefixItems", True))
        if isinstance(schema.get("prefixItems"), list) and not isinstance(items, dict):
            items = schema["prefixItems"]
        if isinstance(items, list):
            body = f" {comma} ".join(self._visit(each, f"{name}-{i}") for i, each in enumerate(items))
            return self._add(name, f'"[" {space} {body} {space} "]"')
        low, high = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if items is True and not low and high is None:
            return self._json.rule("array")
        item = self._visit(items, f"{name}-item")
        return self._add(name, f'"[" {space} {repeated(item, low, high, comma)} {space} "]"')

    def _string(self, schema: Mapping[str, Any], name: str) -> str:
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                raise RequestError("'pattern' in a JSON schema must be a string")
            body = string_of(schema["pattern"], self._json.rule("char"))
            return self._json.rule("string") if body is None else self._add(name, body)
        form = schema.get("format")
        if isinstance(form, str) and form in _FORMATS:
            return self._add(f"{form}-string", rf'"\"" {self._json.rule(_FORMATS[form])} "\""')
        low, high = _count(schema, "minLength") or 0, _count(schema, "maxLength")
        if not low and high is None:
            return self._json.rule("string")
        return self._add(name, rf'"\"" {repeated(self._json.rule("char"), low, high)} "\""')


def _guess(schema: Mapping[str, Any]) -> str:
    """The type of a schema that names none, by its keywords."""
    if "properties" in schema or schema.get("additionalProperties", True) is not True:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    if schema.keys() & {"pattern", "minLength", "maxLength"} or schema.get("format") in (*_FORMATS,):
        return "string"
    return "value"


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise RequestError("'properties' in a JSON schema must be an object")
    return properties


def _names(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _some_schemas(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"{key!r} in a JSON schema must be a list with at least one schema")
    return value


def _count(schema: Mapping[str, Any], key: str) -> int | None:
    value = schema.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise RequestError(f"{key!r} in a JSON schema must be a whole number from 0 on")
    return value


def _bounds(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The least and the greatest integer, None where there is none."""
    low = [math.ceil(value) for value in _number(schema, "minimum")]
    low += [math.floor(value) + 1 for value in _number(schema, "exclusiveMinimum")]
    high = [math.floor(value) for value in _number(schema, "maximum")]
    high += [math.ceil(value) - 1 for value in _number(schema, "exclusiveMaximum")]
    return max(low, default=None), min(high, default=None)


def _number(schema: Mapping[str, Any], key: str) -> list[int | float]:
    value = schema.get(key)
    if value is None or isinstance(value, bool):  # draft 4 has true for exclusive
        return []
    if not isinstance(value, int | float) or not abs(value) < 2**63:
        raise RequestError(f"{key!r} in a JSON schema must be a number of 64 bits")
    return [value]


def _shown(value: Any) -> str:
    """The beginning of a value, for an error."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."

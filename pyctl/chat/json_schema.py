"""JSON schemas made ready for the grammar library: what counts is kept, the rest dropped, and every
size is bounded.

docs/serve.md lists the keywords that bind a reply, and those that do not. As in llama-server, an
object with ``properties`` has no others unless the schema allows or requires them, a list of
``prefixItems`` is complete, and required properties come first, then the others, each in their
order.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from pyctl.errors import RequestError
from pyctl.limit import limit

__all__ = ["has_type", "ready_schema", "resolve"]

_FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_COMBINATORS = ("allOf", "anyOf", "oneOf")
_OF_NUMBERS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
_OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems")
_OF_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties")
_BINDING = frozenset(
    (*_COMBINATORS, "type", "const", "enum", *_OF_NUMBERS, *_OF_STRINGS, *_OF_ARRAYS, *_OF_OBJECTS)
)
"""Keywords that bind a value; the others describe it, or are not bound."""

_MAX_DEPTH = limit(100, "nesting of a JSON schema", "400", "request", "levels")
_MAX_LEVELS = 600
"""The maximum depth of all definitions together: the library follows one to the next on the stack
of a thread.
"""
_MAX_SCHEMAS = limit(10_000, "subschemas of a JSON schema", "400", "request")
_REGEX_PARTS = 20
"""A regular expression is as much work as so many schemas."""
_MAX_CHOICES = 1000
"""Alternatives, or optional properties of one object: each takes its time at every token before it
is decided.
"""
_MAX_LITERAL = 4096
_MAX_PATTERN = 4096
_MAX_INTEGER = 2**53 - 1
"""The bound of an integer without one, so that a model does not lose itself in digits; beyond it, a
float skips integers.
"""
_MIN_SIGNED = -(2**63)
_MAX_UNSIGNED = 2**64 - 1
_MAX_NUMBER = 1e15
_MIN_NUMBER = 1e-6

_ESCAPED_OR_CLASS = re.compile(r"\\[^1-9k]|\[(?:[^\]\\]|\\.)*(?:\]|\Z)", re.DOTALL)
"""A class that is never closed goes on to the end, so that nothing is looked at twice."""
_BEYOND_REGULAR = re.compile(r"\(\?<?[=!]|\\[1-9k]")


def ready_schema(schema: Any, root: Any = None) -> dict[str, Any]:
    """Return an equivalent of ``schema`` with its own definitions. RequestError names the fault.

    References are looked up in ``root``, or in ``schema`` itself.
    """
    return _Reader(schema if root is None else root).read(schema)


def resolve(reference: Any, root: Any) -> Any:
    """Return the value at ``reference``, a JSON pointer (RFC 6901) after a number sign, in
    ``root``; else RequestError.

    As a part of an address the pointer is percent-encoded. A name that has a percent sign itself is
    found as well.
    """
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise RequestError(
            f"unsupported $ref {_shown(reference)}: only references into the same document are "
            "supported"
        )
    target = root
    for part in reference.split("/")[1:]:
        encoded = part.replace("~1", "/").replace("~0", "~")
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and part not in target:
            part = encoded
        if isinstance(target, Mapping) and part in target:
            target = target[part]
        elif (
            isinstance(target, list)
            and part.isdecimal()
            and len(part) < 10
            and int(part) < len(target)
        ):
            target = target[int(part)]
        else:
            raise RequestError(
                f"cannot resolve $ref {_shown(reference)}: there is no {_shown(part)}"
            )
    return target


class _Reader:
    """A reader of one schema. It copies definitions once for each way in which they are used:
    alone, or as a part of an object.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[tuple[str, frozenset[str] | None], str] = {}
        self._waiting: list[tuple[str, str, frozenset[str] | None]] = []
        self._n_schemas = 0
        self._levels = 0
        self._deepest = 0

    def read(self, schema: Any) -> dict[str, Any]:
        if schema is False:
            raise RequestError("the JSON schema false accepts nothing")
        result = self._start(schema, None)
        definitions = {}
        while self._waiting:
            name, reference, scope = self._waiting.pop()
            definitions[name] = self._start(resolve(reference, self._root), scope)
        for name in definitions:
            _check_circle(name, definitions)
        ready = result if isinstance(result, dict) else {}
        return {**ready, "$defs": definitions} if definitions else ready

    def _start(self, schema: Any, scope: frozenset[str] | None) -> Any:
        self._deepest = 0
        ready = self._read(schema, scope, 1)
        self._levels += self._deepest
        if self._levels > _MAX_LEVELS:
            raise RequestError("the definitions of the JSON schema are nested too deeply")
        return ready

    def _read(self, schema: Any, scope: frozenset[str] | None, depth: int) -> Any:
        """Return ``schema`` as a part of an object whose properties are ``scope``, None for a
        schema outside of an object.
        """
        self._count()
        self._deepest = max(self._deepest, depth)
        if depth > _MAX_DEPTH:
            raise RequestError("the JSON schema is nested too deeply")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise RequestError(f"a JSON schema must be an object, not {_shown(schema)}")
        binding = schema.keys() & _BINDING
        if "$ref" in schema:
            if not binding:
                return {"$ref": self._reference(schema["$ref"], scope)}
            schema = _beside_reference(schema)
        elif binding == {"allOf"} and len(_parts(schema, "allOf")) == 1:
            return self._read(schema["allOf"][0], scope, depth + 1)
        if "allOf" in schema or (
            "properties" in schema and not schema.keys().isdisjoint(_COMBINATORS)
        ):
            return self._merged(schema, scope, depth)
        for word in ("oneOf", "anyOf"):
            if word in schema:
                kinds = _kinds(schema) if "type" in schema else []
                ready: dict[str, Any] = {"type": kinds} if kinds else {}
                return {
                    **ready,
                    "anyOf": [self._read(part, scope, depth + 1) for part in _parts(schema, word)],
                }
        return self._typed(schema, scope, depth)

    def _count(self, n: int = 1) -> None:
        self._n_schemas += n
        if self._n_schemas > _MAX_SCHEMAS:
            raise RequestError(f"the JSON schema has more than {_MAX_SCHEMAS} parts")

    def _reference(self, reference: Any, scope: frozenset[str] | None) -> str:
        resolve(reference, self._root)
        key = (reference, scope)
        if key not in self._names:
            self._names[key] = name = f"d{len(self._names)}"
            self._waiting.append((name, reference, scope))
        return f"#/$defs/{self._names[key]}"

    # -- parts of one object
    # ----------------------------------------------------------------------------------

    def _merged(self, schema: Mapping[str, Any], scope: frozenset[str] | None, depth: int) -> Any:
        """Return one schema for parts that hold at once. Together they define the properties that
        there may be.
        """
        rest = {key: value for key, value in schema.items() if key not in _COMBINATORS}
        names: dict[str, bool] = {}
        more = self._gather(schema, names, set(), 0)
        inside = frozenset(names) if scope is None else scope
        own = self._typed(rest, inside, depth) if rest else {}
        if scope is None and names:
            properties = {**dict.fromkeys(names, True), **own.get("properties", {})}
            own.setdefault("type", ["object"])
            own["properties"] = {
                key: properties[key] for key in _first(names, (key for key in names if names[key]))
            }
            own["additionalProperties"] = self._read(more, None, depth + 1)
        parts = (
            [self._read(part, inside, depth + 1) for part in _parts(schema, "allOf")]
            if "allOf" in schema
            else []
        )
        for word in ("anyOf", "oneOf"):
            if word in schema:
                parts.append(
                    {
                        "anyOf": [
                            self._read(part, inside, depth + 1) for part in _parts(schema, word)
                        ]
                    }
                )
        return {**own, "allOf": parts} if own or len(parts) > 1 else parts[0]

    def _gather(self, schema: Any, names: dict[str, bool], seen: set[str], depth: int) -> Any:
        """Collect the properties that the parts of ``schema`` name, and whether they require them.
        Return the schema of all others, False for none.
        """
        self._count()
        if depth > _MAX_DEPTH or isinstance(schema, bool):
            return False
        if not isinstance(schema, dict):
            raise RequestError(f"a JSON schema must be an object, not {_shown(schema)}")
        more: Any = False
        if "$ref" in schema:
            reference = schema["$ref"]
            target = resolve(reference, self._root)
            if reference not in seen:
                seen.add(reference)
                more = self._gather(target, names, seen, depth + 1)
        required = _strings(schema.get("required"))
        for name in _properties(schema):
            names[name] = names.get(name, False) or name in required
        for name in required:
            names.setdefault(name, False)
        for word in _COMBINATORS:
            for part in _parts(schema, word) if word in schema else ():
                more = self._gather(part, names, seen, depth + 1) or more
        return _additional(schema) if "additionalProperties" in schema else more

    # -- types
    # ----------------------------------------------------------------------------------

    def _typed(
        self, schema: Mapping[str, Any], scope: frozenset[str] | None, depth: int
    ) -> dict[str, Any]:
        """Return ``schema`` by its types: const and enum as listed, else the keywords of each
        type.
        """
        kinds = _kinds(schema)
        if "const" in schema:
            return {"const": self._literal(schema["const"])}
        if "enum" in schema:
            values = self._enum(schema)
            # Values that have not the type count only if no value has it, which is a slip of the
            # schema's author.
            return {
                "enum": [value for value in values if not kinds or has_type(value, kinds)] or values
            }
        ready: dict[str, Any] = {"type": kinds} if kinds else {}
        if "object" in kinds or (not kinds and scope is not None):
            ready |= self._object(schema, scope, depth)
        if "array" in kinds:
            ready |= self._array(schema, depth)
        if "string" in kinds:
            ready |= self._string(schema)
        if "integer" in kinds or "number" in kinds:
            ready |= _bounds(schema, whole="number" not in kinds)
        return ready

    def _object(
        self, schema: Mapping[str, Any], scope: frozenset[str] | None, depth: int
    ) -> dict[str, Any]:
        """Return the keywords of an object: required properties first.

        With a ``scope``, the schema is a part of an object with these properties, and other parts
        allow further ones. Raises RequestError for required properties that are not allowed, and
        for more optional ones than _MAX_CHOICES.
        """
        properties = _properties(schema)
        more = _additional(schema)
        required = list(dict.fromkeys(_strings(schema.get("required"))))
        if scope is not None:
            required = [name for name in required if name in scope]
        elif (
            unknown := [name for name in required if name not in properties]
            if more is False
            else []
        ):
            if schema.get("additionalProperties") is False:
                raise RequestError(
                    f"the JSON schema requires {_shown(unknown[0])}, which it does not allow"
                )
            properties = {**properties, **dict.fromkeys(unknown, True)}
        if len(properties) - len(required) > _MAX_CHOICES:
            raise RequestError(
                f"an object in the JSON schema has more than {_MAX_CHOICES} optional properties"
            )
        ready: dict[str, Any] = {}
        if properties:
            ready["properties"] = {
                self._literal(key): self._read(properties[key], None, depth + 1)
                for key in _first(properties, required)
            }
        if required:
            ready["required"] = required
        patterns = schema.get("patternProperties")
        if isinstance(patterns, dict):
            self._count(_REGEX_PARTS * len(patterns))
            ready["patternProperties"] = {
                pattern: self._read(value, None, depth + 1)
                for key, value in patterns.items()
                if (pattern := _regular_pattern(key)) is not None
            }
        if scope is None:
            ready["additionalProperties"] = self._read(more, None, depth + 1)
        return ready

    def _array(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        ready: dict[str, Any] = {}
        low = _size(schema, "minItems")
        high = _size(schema, "maxItems")
        items = schema.get("items", True)
        first = items if isinstance(items, list) else schema.get("prefixItems")
        if isinstance(first, list):
            items = items if isinstance(items, dict) else False
            low = len(first) if low is None else low
            ready["prefixItems"] = [self._read(part, None, depth + 1) for part in first]
        if items is not True:
            ready["items"] = self._read(items, None, depth + 1)
        return ready | _present(minItems=low, maxItems=high)

    def _string(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        ready: dict[str, Any] = _present(
            minLength=_size(schema, "minLength"), maxLength=_size(schema, "maxLength")
        )
        if "pattern" in schema or "format" in schema:
            self._count(_REGEX_PARTS)
        if "pattern" in schema:
            pattern = _regular_pattern(schema["pattern"])
            if pattern is not None:
                return {**ready, "pattern": pattern}
        form = schema.get("format")
        if isinstance(form, str) and (form in _FORMATS or re.fullmatch("uuid[1-5]", form)):
            ready["format"] = form[:4] if form.startswith("uuid") else form
        return ready

    def _enum(self, schema: Mapping[str, Any]) -> list[Any]:
        values = schema["enum"]
        if not isinstance(values, list) or not values:
            raise RequestError("'enum' in a JSON schema must be a list with at least one value")
        return [self._literal(value) for value in values]

    def _literal(self, value: Any, depth: int = 0) -> Any:
        """Return ``value`` unchanged if its texts are not too long and it is not nested too
        deeply.
        """
        self._count()
        if isinstance(value, list | dict):
            if depth > _MAX_DEPTH:
                raise RequestError("a value in the JSON schema is nested too deeply")
            for part in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
                self._literal(part, depth + 1)
        elif isinstance(value, str) and len(value) > _MAX_LITERAL:
            raise RequestError(f"a text in the JSON schema has more than {_MAX_LITERAL} characters")
        elif isinstance(value, int | float) and not abs(value) < 1e300:
            raise RequestError(f"the number {_shown(value)} in the JSON schema is too large")
        return value


def _check_circle(name: str, definitions: Mapping[str, Any]) -> None:
    """Raise RequestError if ``name`` stands for nothing but references to itself: no reply fits."""
    seen = {name}
    while isinstance(definition := definitions[name], dict) and "$ref" in definition:
        name = definition["$ref"].removeprefix("#/$defs/")
        if name in seen:
            raise RequestError("a $ref in the JSON schema leads to itself")
        seen.add(name)


def _beside_reference(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``schema`` with its reference as one of the parts that hold at once."""
    rest = {key: value for key, value in schema.items() if key != "$ref"}
    others = _parts(schema, "allOf") if "allOf" in schema else []
    return {**rest, "allOf": [{"$ref": schema["$ref"]}, *others]}


def has_type(value: Any, kinds: Sequence[str]) -> bool:
    """Return whether ``value`` has one of these types of JSON."""
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in kinds
    if isinstance(value, int | float):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    name = "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
    return name in kinds


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Return the types of a schema, guessed by its keywords if it names none; none for any type."""
    if "type" in schema:
        named = schema["type"]
        kinds = named if isinstance(named, list) and named else [named]
        for kind in kinds:
            if not isinstance(kind, str) or kind not in (*_TYPES, "value"):
                raise RequestError(f"unknown type {_shown(kind)} in the JSON schema")
        return [] if "value" in kinds else list(dict.fromkeys(kinds))
    if "properties" in schema or schema.get("additionalProperties", True) is not True:
        return ["object"]
    if "items" in schema or "prefixItems" in schema:
        return ["array"]
    known_format = isinstance(form := schema.get("format"), str) and form in (
        *_FORMATS,
        "uuid1",
        "uuid4",
    )
    if not schema.keys().isdisjoint(("pattern", "minLength", "maxLength")) or known_format:
        return ["string"]
    return [] if schema.keys().isdisjoint(_OF_NUMBERS) else ["number"]


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise RequestError("'properties' in a JSON schema must be an object")
    return properties


def _additional(schema: Mapping[str, Any]) -> Any:
    """Return the schema of properties that ``schema`` does not name."""
    more = schema.get("additionalProperties", "properties" not in schema)
    if not isinstance(more, bool | dict):
        raise RequestError(
            "'additionalProperties' in a JSON schema must be true, false or a schema"
        )
    return more


def _first(names: Iterable[str], first: Iterable[str]) -> list[str]:
    """Return ``names``, with the ones in ``first`` before the others, each in their order."""
    wanted = set(first)
    return sorted(names, key=lambda name: name not in wanted)


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _parts(schema: Mapping[str, Any], word: str) -> list[Any]:
    value = schema[word]
    if not isinstance(value, list) or not value:
        raise RequestError(f"{word!r} in a JSON schema must be a list with at least one schema")
    if len(value) > _MAX_CHOICES:
        raise RequestError(f"{word!r} in the JSON schema has more than {_MAX_CHOICES} schemas")
    return value


def _regular_pattern(pattern: Any) -> str | None:
    """Return ``pattern``, or None if it is not regular: with a look-around or a back reference."""
    if not isinstance(pattern, str):
        raise RequestError("'pattern' in a JSON schema must be a string")
    if len(pattern) > _MAX_PATTERN:
        raise RequestError(f"a pattern in the JSON schema has more than {_MAX_PATTERN} characters")
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise RequestError("a pattern in the JSON schema ends with a backslash")
    return None if _BEYOND_REGULAR.search(_ESCAPED_OR_CLASS.sub("", pattern)) else pattern


def _size(schema: Mapping[str, Any], key: str) -> int | None:
    value = schema.get(key)
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31
    ):
        raise RequestError(f"{key!r} in a JSON schema must be a whole number from 0 to 2147483647")
    return value


def _present(**keywords: int | None) -> dict[str, int]:
    return {key: value for key, value in keywords.items() if value is not None}


def _bounds(schema: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """Return the bounds of a number, always some if it is ``whole``. Bounds of other numbers that
    are too fine or too large are dropped.
    """
    found: dict[str, Any] = {}
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        value = schema.get(key)
        if value is None or isinstance(value, bool):  # draft 4 has true for exclusive
            continue
        if not isinstance(value, int | float) or not -(2**63) <= value <= 2**64:
            raise RequestError(f"{key!r} in a JSON schema must be a number of 64 bits")
        found[key] = value
    if not whole:
        return {
            key: value
            for key, value in found.items()
            if value == 0 or _MIN_NUMBER <= abs(value) <= _MAX_NUMBER
        }
    lows = [math.ceil(found["minimum"])] if "minimum" in found else []
    lows += [math.floor(found["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in found else []
    highs = [math.floor(found["maximum"])] if "maximum" in found else []
    highs += [math.ceil(found["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in found else []
    low = max(lows, default=-_MAX_INTEGER)
    high = min(highs, default=_MAX_INTEGER)
    # One bound beyond the usual ones is joined by another of 64 bits.
    if not highs and low > high:
        high = _MAX_UNSIGNED
    if not lows and low > high:
        low = _MIN_SIGNED
    if low > high:
        raise RequestError(f"no integer lies between minimum {low} and maximum {high}")
    factor = schema.get("multipleOf")
    is_whole = isinstance(factor, int | float) and 0 < factor < 2**31 and factor == int(factor)
    return {
        "minimum": low,
        "maximum": high,
        **({"multipleOf": int(factor or 0)} if is_whole else {}),
    }


def _shown(value: Any) -> str:
    """Return the beginning of a value, for an error."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):
        return "a value"
    return text if len(text) <= 60 else f"{text[:60]}..."

"""JSON schemas made ready for the grammar library: keywords that bind are kept, the rest dropped,
and every size is bounded.

docs/serve.md lists the keywords that bind a reply, and those that do not. As in llama-server, an
object with ``properties`` has no others unless the schema allows or requires them, a list of
``prefixItems`` is complete, and required properties come first, then the others, each in their
order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote

from pyctl.chat.json_object import JsonDict, JsonObject
from pyctl.chat.number_bounds import number_bounds
from pyctl.errors import RequestError
from pyctl.settings.limit import limit

__all__ = ["has_type", "ready_schema", "resolve"]

Scope: TypeAlias = frozenset[str] | None
"""The properties of the object that a schema is a part of; None for a schema outside of one."""

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

_ESCAPED_OR_CLASS = re.compile(r"\\[^1-9k]|\[(?:[^\]\\]|\\.)*(?:\]|\Z)", re.DOTALL)
"""A class that is never closed goes on to the end, so that nothing is looked at twice."""

_BEYOND_REGULAR = re.compile(r"\(\?<?[=!]|\\[1-9k]")


def ready_schema(schema: Any, root: Any = None) -> JsonDict:
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
        fault = "only references into the same document are supported"
        raise RequestError(f"unsupported $ref {_abbreviate(reference)}: {fault}")
    target = root
    for part in reference.split("/")[1:]:
        encoded = _unescape(part)
        name = _unescape(unquote(part))
        if isinstance(target, Mapping) and name not in target:
            name = encoded
        if isinstance(target, Mapping) and name in target:
            target = target[name]
        elif isinstance(target, list) and _is_index(name, target):
            target = target[int(name)]
        else:
            fault = f"there is no {_abbreviate(name)}"
            raise RequestError(f"cannot resolve $ref {_abbreviate(reference)}: {fault}")
    return target


def _unescape(part: str) -> str:
    """Return a part of a JSON pointer without its escapes (RFC 6901, section 4)."""
    return part.replace("~1", "/").replace("~0", "~")


def _is_index(text: str, items: list[Any]) -> bool:
    # The length comes first: int() takes long for millions of digits.
    return text.isdecimal() and len(text) < 10 and int(text) < len(items)


class _Reader:
    """A reader of one schema. It copies definitions once for each way in which they are used:
    alone, or as a part of an object.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[tuple[str, Scope], str] = {}
        self._waiting: list[tuple[str, str, Scope]] = []
        self._n_schemas = 0
        self._levels = 0
        self._deepest = 0

    def read(self, schema: Any) -> JsonDict:
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

    def _start(self, schema: Any, scope: Scope) -> Any:
        self._deepest = 0
        ready = self._read(schema, scope, 1)
        self._levels += self._deepest
        if self._levels > _MAX_LEVELS:
            raise RequestError("the definitions of the JSON schema are nested too deeply")
        return ready

    def _read(self, schema: Any, scope: Scope, depth: int) -> Any:
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
            raise RequestError(f"a JSON schema must be an object, not {_abbreviate(schema)}")
        binding = schema.keys() & _BINDING
        if "$ref" in schema:
            if not binding:
                return {"$ref": self._reference(schema["$ref"], scope)}
            schema = _beside_reference(schema)
        elif binding == {"allOf"} and len(_parts(schema, "allOf")) == 1:
            return self._read(schema["allOf"][0], scope, depth + 1)
        is_combined = not schema.keys().isdisjoint(_COMBINATORS)
        if "allOf" in schema or ("properties" in schema and is_combined):
            return self._merged(schema, scope, depth)
        for word in ("oneOf", "anyOf"):
            if word not in schema:
                continue
            ready: JsonDict = {}
            kinds = _kinds(schema) if "type" in schema else []
            if kinds:
                ready["type"] = kinds
            ready["anyOf"] = self._read_all(schema, word, scope, depth)
            return ready
        return self._typed(schema, scope, depth)

    def _read_all(
        self,
        schema: JsonObject,
        word: str,
        scope: Scope,
        depth: int,
    ) -> list[Any]:
        return [self._read(part, scope, depth + 1) for part in _parts(schema, word)]

    def _count(self, n: int = 1) -> None:
        self._n_schemas += n
        if self._n_schemas > _MAX_SCHEMAS:
            raise RequestError(f"the JSON schema has more than {_MAX_SCHEMAS} parts")

    def _reference(self, reference: Any, scope: Scope) -> str:
        resolve(reference, self._root)
        key = (reference, scope)
        if key not in self._names:
            self._names[key] = name = f"d{len(self._names)}"
            self._waiting.append((name, reference, scope))
        return f"#/$defs/{self._names[key]}"

    # -- parts of one object
    # ----------------------------------------------------------------------------------

    def _merged(self, schema: JsonObject, scope: Scope, depth: int) -> Any:
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
            required = [name for name, is_required in names.items() if is_required]
            own.setdefault("type", ["object"])
            own["properties"] = {key: properties[key] for key in _first(names, required)}
            own["additionalProperties"] = self._read(more, None, depth + 1)
        parts = []
        if "allOf" in schema:
            parts = self._read_all(schema, "allOf", inside, depth)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                parts.append({"anyOf": self._read_all(schema, word, inside, depth)})
        if not own and len(parts) == 1:
            return parts[0]
        return {**own, "allOf": parts}

    def _gather(
        self,
        schema: Any,
        names: dict[str, bool],
        seen: set[str],
        depth: int,
    ) -> Any:
        """Collect the properties that the parts of ``schema`` name, and whether they require them.
        Return the schema of all others, False for none.
        """
        self._count()
        if depth > _MAX_DEPTH or isinstance(schema, bool):
            return False
        if not isinstance(schema, dict):
            raise RequestError(f"a JSON schema must be an object, not {_abbreviate(schema)}")
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
            if word not in schema:
                continue
            for part in _parts(schema, word):
                more = self._gather(part, names, seen, depth + 1) or more
        if "additionalProperties" in schema:
            return _additional(schema)
        return more

    # -- types
    # ----------------------------------------------------------------------------------

    def _typed(self, schema: JsonObject, scope: Scope, depth: int) -> JsonDict:
        """Return ``schema`` by its types: const and enum as listed, else the keywords of each
        type.
        """
        kinds = _kinds(schema)
        if "const" in schema:
            return {"const": self._literal(schema["const"])}
        if "enum" in schema:
            values = self._enum(schema)
            typed = [value for value in values if not kinds or has_type(value, kinds)]
            # Values of other types count only if no value has one of these, which is a slip of the
            # schema's author.
            return {"enum": typed or values}
        ready: JsonDict = {"type": kinds} if kinds else {}
        if "object" in kinds or (not kinds and scope is not None):
            ready |= self._object(schema, scope, depth)
        if "array" in kinds:
            ready |= self._array(schema, depth)
        if "string" in kinds:
            ready |= self._string(schema)
        if "integer" in kinds or "number" in kinds:
            ready |= number_bounds(schema, whole="number" not in kinds)
        return ready

    def _object(self, schema: JsonObject, scope: Scope, depth: int) -> JsonDict:
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
        elif more is False:
            unknown = [name for name in required if name not in properties]
            if unknown and schema.get("additionalProperties") is False:
                name = _abbreviate(unknown[0])
                raise RequestError(f"the JSON schema requires {name}, which it does not allow")
            properties = {**properties, **dict.fromkeys(unknown, True)}
        n_optional = len(properties) - len(required)
        if n_optional > _MAX_CHOICES:
            raise RequestError(
                f"an object in the JSON schema has more than {_MAX_CHOICES} optional properties"
            )
        ready: JsonDict = {}
        if properties:
            ready["properties"] = {
                self._literal(key): self._read(properties[key], None, depth + 1)
                for key in _first(properties, required)
            }
        if required:
            ready["required"] = required
        patterns = schema.get("patternProperties")
        if isinstance(patterns, dict):
            ready["patternProperties"] = self._patterns(patterns, depth)
        if scope is None:
            ready["additionalProperties"] = self._read(more, None, depth + 1)
        return ready

    def _patterns(self, patterns: JsonObject, depth: int) -> JsonDict:
        """Return the schemas of properties by the regular patterns of their names."""
        self._count(_REGEX_PARTS * len(patterns))
        ready = {}
        for key, value in patterns.items():
            pattern = _regular_pattern(key)
            if pattern is not None:
                ready[pattern] = self._read(value, None, depth + 1)
        return ready

    def _array(self, schema: JsonObject, depth: int) -> JsonDict:
        ready: JsonDict = {}
        low = _size(schema, "minItems")
        high = _size(schema, "maxItems")
        items = schema.get("items", True)
        first = items if isinstance(items, list) else schema.get("prefixItems")
        if isinstance(first, list):
            if not isinstance(items, dict):
                items = False
            if low is None:
                low = len(first)
            ready["prefixItems"] = [self._read(part, None, depth + 1) for part in first]
        if items is not True:
            ready["items"] = self._read(items, None, depth + 1)
        return ready | _present(minItems=low, maxItems=high)

    def _string(self, schema: JsonObject) -> JsonDict:
        """Return the keywords of a string. A pattern wins over a format, of which only the known
        ones count.
        """
        low = _size(schema, "minLength")
        high = _size(schema, "maxLength")
        ready: JsonDict = _present(minLength=low, maxLength=high)
        if "pattern" in schema or "format" in schema:
            self._count(_REGEX_PARTS)
        if "pattern" in schema:
            pattern = _regular_pattern(schema["pattern"])
            if pattern is not None:
                return {**ready, "pattern": pattern}
        form = schema.get("format")
        if not isinstance(form, str):
            return ready
        if re.fullmatch("uuid[1-5]", form):  # one version of the format that the library has
            form = "uuid"
        if form in _FORMATS:
            ready["format"] = form
        return ready

    def _enum(self, schema: JsonObject) -> list[Any]:
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
            parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value
            for part in parts:
                self._literal(part, depth + 1)
        elif isinstance(value, str) and len(value) > _MAX_LITERAL:
            raise RequestError(f"a text in the JSON schema has more than {_MAX_LITERAL} characters")
        elif isinstance(value, int | float) and not abs(value) < 1e300:
            raise RequestError(f"the number {_abbreviate(value)} in the JSON schema is too large")
        return value


def _check_circle(name: str, definitions: JsonObject) -> None:
    """Raise RequestError if ``name`` stands for nothing but references to itself: no reply fits."""
    seen = {name}
    while isinstance(definition := definitions[name], dict) and "$ref" in definition:
        name = definition["$ref"].removeprefix("#/$defs/")
        if name in seen:
            raise RequestError("a $ref in the JSON schema leads to itself")
        seen.add(name)


def _beside_reference(schema: JsonObject) -> JsonDict:
    """Return ``schema`` with its reference as one of the parts that hold at once."""
    rest = {key: value for key, value in schema.items() if key != "$ref"}
    others = _parts(schema, "allOf") if "allOf" in schema else []
    return {**rest, "allOf": [{"$ref": schema["$ref"]}, *others]}


def has_type(value: Any, kinds: Sequence[str]) -> bool:
    """Return whether ``value`` has one of these types of JSON."""
    if value is None:
        return "null" in kinds
    if isinstance(value, bool):  # before int, of which it is a kind in Python
        return "boolean" in kinds
    if isinstance(value, int | float):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    if isinstance(value, str):
        return "string" in kinds
    if isinstance(value, list):
        return "array" in kinds
    return "object" in kinds


def _kinds(schema: JsonObject) -> list[str]:
    """Return the types of a schema, guessed by its keywords if it names none; none for any type."""
    if "type" in schema:
        named = schema["type"]
        kinds = named if isinstance(named, list) and named else [named]
        for kind in kinds:
            if not isinstance(kind, str) or kind not in (*_TYPES, "value"):
                raise RequestError(f"unknown type {_abbreviate(kind)} in the JSON schema")
        if "value" in kinds:
            return []
        return list(dict.fromkeys(kinds))
    if "properties" in schema or schema.get("additionalProperties", True) is not True:
        return ["object"]
    if "items" in schema or "prefixItems" in schema:
        return ["array"]
    form = schema.get("format")
    if isinstance(form, str) and form in (*_FORMATS, "uuid1", "uuid4"):
        return ["string"]
    if not schema.keys().isdisjoint(("pattern", "minLength", "maxLength")):
        return ["string"]
    if not schema.keys().isdisjoint(_OF_NUMBERS):
        return ["number"]
    return []


def _properties(schema: JsonObject) -> JsonDict:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise RequestError("'properties' in a JSON schema must be an object")
    return properties


def _additional(schema: JsonObject) -> Any:
    """Return the schema of properties that ``schema`` does not name."""
    more = schema.get("additionalProperties", "properties" not in schema)
    if not isinstance(more, bool | dict):
        raise RequestError(
            "'additionalProperties' in a JSON schema must be true, false or a schema"
        )
    return more


def _first(names: Iterable[str], first: Iterable[str]) -> list[str]:
    """Return ``names``, with the ones in ``first`` before the others, each in their order."""
    leading = set(first)
    return sorted(names, key=lambda name: name not in leading)


def _strings(value: Any) -> list[str]:
    if not isinstance(value, list):
        return []
    return [item for item in value if isinstance(item, str)]


def _parts(schema: JsonObject, word: str) -> list[Any]:
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
    n_backslashes = len(pattern) - len(pattern.rstrip("\\"))
    if n_backslashes % 2:
        raise RequestError("a pattern in the JSON schema ends with a backslash")
    bare = _ESCAPED_OR_CLASS.sub("", pattern)
    if _BEYOND_REGULAR.search(bare):
        return None
    return pattern


def _size(schema: JsonObject, key: str) -> int | None:
    value = schema.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise RequestError(f"{key!r} in a JSON schema must be a whole number from 0 to 2147483647")
    return value


def _present(**keywords: int | None) -> dict[str, int]:
    return {key: value for key, value in keywords.items() if value is not None}


def _abbreviate(value: Any) -> str:
    """Return the beginning of a value, for an error."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):
        return "a value"
    if len(text) <= 60:
        return text
    return f"{text[:60]}..."

"""A call without its tags: a reply that is one JSON object with the name and arguments of a tool, bare or in a fence.

Some models forget the tags of their format. Only the whole reply tells a call from an answer in JSON, so that what may
still become a call is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyctl.chat.call_formats.scan import (
    NeedMoreInput,
    ValueEnd,
    parse_json,
    skip_blanks,
    starts_with,
    string_at,
    type_names,
)
from pyctl.chat.json_schema import ready_schema
from pyctl.chat.reply import CallDelta, ReplyDelta, ReplyParser
from pyctl.chat.tools import Tools
from pyctl.errors import RequestError
from pyctl.limit import limit
from pyctl.text import random_id

__all__ = ["BareCallParser", "is_instance"]

_MAX_ARGUMENTS = limit(1 << 16, "arguments of a call without tags", "it is text", "reply", "characters")
_MAX_AROUND = 1 << 10
"""Characters before the arguments, and after them."""

_MAX_CHECKS = limit(10_000, "values and schemas compared for a call without tags", "it is text", "reply")
_MAX_DEPTH = 100

_FENCE = "```"


class BareCallParser:
    """Reads what ``parser`` leaves as content: all of it is one call of ``tools``, or text."""

    def __init__(self, parser: ReplyParser, tools: Tools, new_id: Callable[[], str] = random_id) -> None:
        self._parser = parser
        self._tools = tools
        self._new_id = new_id
        self._object_end = ValueEnd(max_size=_MAX_ARGUMENTS)
        self._held = ""
        self._is_text, self._is_whole = False, False
        self._name, self._is_fenced = "", False
        self._begin, self._end = 0, 0  # of the arguments, 0 as long as unknown

    def feed(self, text: str) -> ReplyDelta:
        """The parts that became certain with ``text``."""
        return self._read(self._parser.feed(text))

    def finish(self) -> ReplyDelta:
        """The parts that were held back until the end of the reply."""
        delta = self._read(self._parser.finish())
        if self._is_text:
            return delta
        arguments = self._held[self._begin : self._end]
        if self._is_whole and self._fits(arguments):
            return delta._replace(calls=(CallDelta(0, self._new_id(), self._name), CallDelta(0, arguments=arguments)))
        return delta._replace(content=self._held)

    def _read(self, delta: ReplyDelta) -> ReplyDelta:
        if self._is_text:
            return delta
        self._held += delta.content
        self._is_text = bool(delta.calls) or not self._may_be_call()
        return delta._replace(content=self._held if self._is_text else "")

    def _may_be_call(self) -> bool:
        try:
            self._begin = self._begin or self._arguments_at()
            if 0 < self._begin <= _MAX_AROUND and not self._end:
                self._end = self._object_end.find(self._held, self._begin)
            return self._end > 0 and self._closes()
        except NeedMoreInput:
            return self._begin > 0 or len(self._held) <= _MAX_AROUND

    def _arguments_at(self) -> int:
        """Where the arguments of a call of a tool begin; 0 if the text is another one."""
        at = skip_blanks(self._held, 0)
        self._is_fenced = starts_with(_FENCE, self._held, at)
        if self._is_fenced:
            at += len(_FENCE)
            at += len("json") if starts_with("json", self._held, at) else 0
        at = self._after(at, "{", '"name"', ":")
        if at:
            self._name, at = string_at(self._held, skip_blanks(self._held, at))
        if not any(tool.name == self._name for tool in self._tools.tools):
            return 0
        return max(self._after(at, ",", '"arguments"', ":", "{") - 1, 0)

    def _closes(self) -> bool:
        """Whether nothing but the end of the call follows its arguments."""
        if len(self._held) - self._end > _MAX_AROUND:
            return False
        at = self._after(self._end, "}", *([_FENCE] if self._is_fenced else ()))
        self._is_whole = at > 0 and not self._held[at:].strip()
        return self._is_whole

    def _after(self, at: int, *marks: str) -> int:
        """Where ``marks`` end that follow there, blanks between them; 0 if something else does."""
        for mark in marks:
            at = skip_blanks(self._held, at)
            if not starts_with(mark, self._held, at):
                return 0
            at += len(mark)
        return at

    def _fits(self, arguments: str) -> bool:
        try:
            return is_instance(parse_json(arguments), {"type": "object", **self._tools.parameters(self._name)})
        except (ValueError, RequestError):
            return False


def is_instance(value: Any, schema: Any) -> bool:
    """Whether JSON ``value`` fits ``schema`` in the dialect of `ready_schema`, apart from patterns and formats.

    False if that takes too long to find out. RequestError for what is no schema.
    """
    ready = ready_schema(schema)
    return _Checker(ready.get("$defs", {})).fits(value, ready, 0)


class _Checker:
    """Compares a value with a schema as `ready_schema` writes it; a grammar would fix the order of members, too."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._n_left = _MAX_CHECKS

    def fits(self, value: Any, schema: Any, depth: int) -> bool:
        if isinstance(schema, bool):
            return schema
        words = [schema["const"]] if "const" in schema else schema.get("enum")
        self._n_left -= 1 + len(words or ())
        if self._n_left < 0 or depth > _MAX_DEPTH:
            return False
        if "$ref" in schema:
            return self.fits(value, self._definitions[schema["$ref"].removeprefix("#/$defs/")], depth + 1)
        if words is not None:
            return any(value == word and type_names(value)[0] == type_names(word)[0] for word in words)
        if (kinds := schema.get("type")) and set(kinds).isdisjoint(type_names(value)):
            return False
        if "anyOf" in schema and not any(self.fits(value, part, depth + 1) for part in schema["anyOf"]):
            return False
        if not all(self.fits(value, part, depth + 1) for part in schema.get("allOf", ())):
            return False
        if isinstance(value, dict):
            return self._fits_object(value, schema, depth)
        if isinstance(value, list):
            return self._fits_array(value, schema, depth)
        if isinstance(value, str):
            return _lies_in(len(value), schema.get("minLength"), schema.get("maxLength"))
        return type_names(value)[0] not in ("integer", "number") or _is_within(value, schema)

    def _fits_object(self, value: Mapping[str, Any], schema: Mapping[str, Any], depth: int) -> bool:
        known = schema.get("properties", {})
        others = True if schema.get("patternProperties") else schema.get("additionalProperties", True)
        return all(name in value for name in schema.get("required", ())) and all(
            self.fits(each, known.get(name, others), depth + 1) for name, each in value.items()
        )

    def _fits_array(self, value: list[Any], schema: Mapping[str, Any], depth: int) -> bool:
        first, others = schema.get("prefixItems", []), schema.get("items", True)
        return _lies_in(len(value), schema.get("minItems"), schema.get("maxItems")) and all(
            self.fits(each, first[at] if at < len(first) else others, depth + 1) for at, each in enumerate(value)
        )


def _lies_in(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _is_within(value: float, schema: Mapping[str, Any]) -> bool:
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    is_between = (above is None or value > above) and (below is None or value < below)
    return is_between and _lies_in(value, schema.get("minimum"), schema.get("maximum"))

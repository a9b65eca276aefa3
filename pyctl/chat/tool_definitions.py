"""The tools of a request: the functions that the model may call, and the types of their
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyctl.chat.json_object import JsonDict, JsonObject, JsonObjects
from pyctl.chat.json_schema import resolve
from pyctl.errors import RequestError
from pyctl.settings.limit import limit

__all__ = [
    "ALL_TYPES",
    "Tool",
    "Tools",
    "json_types",
    "read_tools",
    "template_tools",
]

_DEPTH = 64
"""The maximum depth of schemas within schemas; deeper ones are ignored."""

_MAX_TOOLS = limit(512, "`tools`", "400", "request")

_MAX_GRAMMAR = limit(4_096, "a grammar of a custom tool", "400", "request", "characters")

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})


@dataclass(frozen=True)
class Tool:
    """A function with the JSON schema of its arguments; with ``strict``, a call must be an instance
    of that.

    ``grammar`` are terminals of Lark's, of which START describes each argument that is a string;
    empty for none.
    """

    name: str
    parameters: JsonObject
    strict: bool = False
    grammar: str = ""

    @property
    def properties(self) -> JsonObject:
        """The schema of each argument."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required(self) -> tuple[str, ...]:
        """The arguments that a call must have."""
        required = self.parameters.get("required")
        names = required if isinstance(required, Sequence) and not isinstance(required, str) else ()
        return tuple(name for name in names if name in self.properties)

    def types(self, argument: str) -> frozenset[str]:
        """Return the JSON types that the schema allows for ``argument``; all for one that it
        lacks.
        """
        return json_types(self.properties.get(argument, True), self.parameters)

    def words(self, argument: str) -> list[str | None]:
        """Return the values that may be written for ``argument``, see `_words`."""
        return _words(self.properties[argument], self.parameters)


@dataclass(frozen=True)
class Tools:
    """The tools that the model may call: ``parallel`` for several calls in one reply, ``forced``
    for at least one.
    """

    tools: tuple[Tool, ...]
    parallel: bool = True
    forced: bool = False

    @classmethod
    def from_request(cls, tools: JsonObjects, parallel: bool = True, forced: bool = False) -> Tools:
        """Read tools of type function in OpenAI's form, each with a name. Raises RequestError for a
        long grammar.
        """
        read = []
        for tool in tools:
            function = tool["function"]
            parameters = function.get("parameters")
            if not isinstance(parameters, Mapping):
                parameters = {}
            strict = function.get("strict") is True
            grammar = function.get("grammar")
            if not isinstance(grammar, str):
                grammar = ""
            if len(grammar) > _MAX_GRAMMAR:
                raise RequestError(f"the grammar of a tool has more than {_MAX_GRAMMAR} characters")
            read.append(
                Tool(
                    name=function["name"],
                    parameters=parameters,
                    strict=strict,
                    grammar=grammar,
                )
            )
        return cls(tuple(read), parallel, forced)

    def types(self, name: str, argument: str) -> frozenset[str]:
        """Return the types of an argument of tool ``name``."""
        for tool in self.tools:
            if tool.name == name:
                return tool.types(argument)
        return ALL_TYPES


def template_tools(tools: object) -> list[JsonDict] | None:
    """Return the tools as llama-server passes them to the template: name, description and
    parameters only.

    ``tools`` come from a client, None for none; RequestError names the fault.
    """
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError("'tools' must be a list of objects")
    if len(tools) > _MAX_TOOLS:
        raise RequestError(f"'tools' must have at most {_MAX_TOOLS} entries, not {len(tools)}")
    return [_template_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _template_tool(tool: JsonObject, where: str) -> JsonDict:
    """Return a checked tool with name, description and parameters. Raises RequestError, which names
    the fault at ``where``.
    """
    function = tool.get("function")
    if (
        tool.get("type") != "function"
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise RequestError(f"{where} must be of type function, with a function that has a name")
    if not function["name"]:
        raise RequestError(f"{where}.function.name must not be empty")
    description = function.get("description")
    parameters = function.get("parameters")
    if not isinstance(description, str | None):
        raise RequestError(f"{where}.function.description must be a string")
    if not isinstance(parameters, dict | None):
        raise RequestError(f"{where}.function.parameters must be an object")
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": description or "",
            "parameters": parameters or {},
        },
    }


def read_tools(
    tools: Any,
    choice: object,
    *,
    callable_tools: Any = None,
    parallel: bool = True,
    parse: bool = True,
    has_grammar: bool = False,
) -> tuple[list[JsonDict] | None, Tools | None]:
    """Return the tools for the template, and those that the reply may call, by ``choice``
    (``tool_choice``); None for none.

    The choice is among ``callable_tools``, None for all that the template shows. Without ``parse``
    the reply is not searched for calls. Raises RequestError for an impossible choice, or with a
    grammar.
    """
    shown = template_tools(tools)
    if callable_tools is not None:
        template_tools(callable_tools)  # checks them
        tools = callable_tools
    has_tools = bool(tools)
    mode, names = _chosen(choice or "auto")
    if has_tools and names is not None:
        unknown = names - {tool["function"]["name"] for tool in tools}
        if unknown:
            raise RequestError(
                f"'tool_choice' names {min(unknown)!r}, which is not among the tools"
            )
        tools = [tool for tool in tools if tool["function"]["name"] in names]
    if mode == "required" and not has_tools:
        raise RequestError("'tool_choice' requires a call, and the request has no 'tools'")
    if mode == "required" and not tools:
        raise RequestError("'tool_choice' requires a call and allows no tool")
    if mode == "none" or not tools:
        return shown, None
    if has_grammar:
        raise RequestError("Cannot use custom grammar constraints with tools.")
    if not parse:
        return shown, None
    return shown, Tools.from_request(tools, parallel, forced=mode == "required")


_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def _chosen(choice: object) -> tuple[str, set[str] | None]:
    """Return the mode and the names of a ``tool_choice`` in any of OpenAI's forms.

    The mode leaves calls to the model ("auto"), requires one or forbids them ("none"). The names
    are the only tools that it allows, None for all.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if isinstance(kind, str) and kind in _MODES:
        return _MODES[kind], None
    if not isinstance(choice, dict) or kind not in ("function", "allowed_tools"):
        kinds = "auto, none, required or an object of type function or allowed_tools"
        raise RequestError(f"'tool_choice' must be {kinds}, not {str(kind)[:40]!r}")
    if kind == "function":
        return "required", {_referenced_name(choice, "'tool_choice'")}
    allowed = choice.get("allowed_tools", choice)
    mode = ""
    tools = None
    if isinstance(allowed, dict):
        mode = allowed.get("mode") or "auto"
        tools = allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise RequestError(
            "'tool_choice' of type allowed_tools must have a list 'tools', and a 'mode' auto or "
            "required"
        )
    names = set()
    for index, tool in enumerate(tools):
        names.add(_referenced_name(tool, f"'tool_choice': tools[{index}]"))
    return mode, names


def _referenced_name(tool: object, where: str) -> str:
    """Return the name in a reference to a function, nested as in chat completions or flat as in
    Responses.
    """
    function = None
    if isinstance(tool, dict) and tool.get("type") == "function":
        function = tool.get("function", tool)
    name = None
    if isinstance(function, dict):
        name = function.get("name")
    if not isinstance(name, str):
        raise RequestError(f"{where} must be of type function, with a function that has a name")
    return name


def json_types(schema: object, root: JsonObject) -> frozenset[str]:
    """Return the JSON types of the values that ``schema`` allows, all if it names none; ``root``
    resolves references.
    """
    return _types(schema, root, {}, 0) or ALL_TYPES


def _resolved(schema: object, root: JsonObject) -> JsonObject:
    """Return ``schema``, or its target in ``root``; an empty one if it is not a schema."""
    for _ in range(_DEPTH):
        if not isinstance(schema, Mapping):
            break
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _target(reference, root)
    return {}


def _words(schema: object, root: JsonObject) -> list[str | None]:
    """Return the strings that ``schema`` lists, alone or as alternatives, and None if it allows
    null as well.

    Nothing is returned for any other schema, or if null could be taken for a string that is listed.
    """
    words: list[str | None] = []
    waiting = [schema]
    for _ in range(_DEPTH):
        if not waiting:
            break
        part = waiting.pop(0)
        if not (isinstance(part, Mapping) and ("const" in part or "enum" in part)):
            part = _resolved(part, root)
        values = [part["const"]] if "const" in part else part.get("enum")
        if values is None and part.get("type") == "null":
            values = [None]
        if values is None:
            alternatives = _listed(part.get("anyOf")) or _listed(part.get("oneOf"))
            if alternatives:
                waiting += alternatives
                continue
        if not isinstance(values, list):
            return []
        if not all(isinstance(value, str | None) for value in values):
            return []
        words += values
    if waiting or not any(isinstance(word, str) for word in words):
        return []
    if None in words and "null" in words:
        return []
    return list(dict.fromkeys(words))


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _types(
    schema: object,
    root: JsonObject,
    known: dict[str, frozenset[str]],
    depth: int,
) -> frozenset[str]:
    """Return the types that ``schema`` allows. ``known`` has the types of references; none while
    they are resolved, so that a circle ends.
    """
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return ALL_TYPES
    types = ALL_TYPES
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = frozenset()
            known[reference] = _types(_target(reference, root), root, known, depth + 1)
        types = known[reference]
    kind = schema.get("type")
    if isinstance(kind, str):
        types &= _named((kind,))
    elif isinstance(kind, list):
        types &= _named(kind)
    elif isinstance(schema.get("enum"), list):
        types &= frozenset(_json_type(value) for value in schema["enum"])
    elif "const" in schema:
        types &= {_json_type(schema["const"])}
    elif "properties" in schema:
        types &= {"object"}
    elif "items" in schema or "prefixItems" in schema:
        types &= {"array"}
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            either: frozenset[str] = frozenset()
            for child in schema[word]:
                either |= _types(child, root, known, depth + 1)
            types &= either
    if isinstance(schema.get("allOf"), list):
        for child in schema["allOf"]:
            types &= _types(child, root, known, depth + 1)
    return types


def _named(kinds: Sequence[Any]) -> frozenset[str]:
    types = frozenset(kind for kind in kinds if isinstance(kind, str))
    types &= ALL_TYPES
    if "number" in types:
        types |= {"integer"}
    return types


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "object"


def _target(reference: str, root: JsonObject) -> Any:
    """Return the schema that a reference points at; None if there is none."""
    try:
        return resolve(reference, root)
    except RequestError:
        return None

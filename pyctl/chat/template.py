"""Chat templates: rendering them as transformers does, but for members that are missing, which are
nothing, as in llama-server; and samples that show the features of a template.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyctl.chat import CHATML, keep_reasoning
from pyctl.chat.json_object import JsonDict, JsonObject, JsonObjects
from pyctl.errors import ModelError, RequestError

__all__ = [
    "EFFORTS",
    "SAMPLE_CALL_ID",
    "SAMPLE_KEY",
    "SAMPLE_TOOL",
    "SAMPLE_VALUE",
    "Template",
    "TemplateCapabilities",
    "sample_call",
    "sample_message",
    "sample_tool",
]

EFFORTS = ("low", "medium", "high", "xhigh")
"""Values of ``reasoning_effort`` that templates accept; Qwen3.8's accepts low, medium and xhigh."""

_SCALE = ("minimal", *EFFORTS, "max")
"""The levels that clients request, in order."""

SAMPLE_CALL_ID = "Ab3dEf7hI"
"""Nine letters and digits, which is the only form that some templates take."""

SAMPLE_TOOL = "sample"
_A, _B = SAMPLE_KEY, SAMPLE_VALUE = "pyctlsamplea", "pyctlsampleb"


def sample_message(role: str, text: str, *, as_text: bool = True) -> JsonDict:
    """Return a message of ``role``; its content is a list of one part unless ``as_text``."""
    return {"role": role, "content": text if as_text else [{"type": "text", "text": text}]}


def sample_call(
    *arguments: Mapping[str, str], as_text: bool = True, as_object: bool = True
) -> JsonDict:
    """Return an assistant message that calls the sample tool with each of ``arguments``, as JSON
    text unless ``as_object``.
    """
    functions = [
        {"name": SAMPLE_TOOL, "arguments": argument if as_object else json.dumps(argument)}
        for argument in arguments
    ]
    calls = [
        {"type": "function", "id": SAMPLE_CALL_ID, "function": function} for function in functions
    ]
    return {**sample_message("assistant", "", as_text=as_text), "tool_calls": calls}


_NO_PARAMETERS = {"type": "object", "properties": {}, "required": []}
"""The schema of a tool without parameters, with the members that some templates require."""


def sample_tool(name: str = SAMPLE_TOOL) -> JsonDict:
    """Return a tool as templates take it."""
    return {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": _NO_PARAMETERS},
    }


log = logging.getLogger(__name__)


class Template:
    """A chat template: ``Template(source, bos_token="", eos_token="<|im_end|>").render([{"role":
    "user", "content": "Hi"}])``

    An empty ``source`` stands for ChatML, with a warning in the log. One that jinja2 cannot parse
    raises ModelError. ``of_tools`` is another template for conversations with tools, None if this
    one writes them as well.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        of_tools: Template | None = None,
    ) -> None:
        """Compile the template. Raises ModelError if jinja2 cannot parse it."""
        # The byte order mark of the file that it came from, not a part of each prompt.
        source = source.removeprefix("\ufeff")
        if not source.strip():
            log.warning("the model has no chat template; using ChatML")
            source = CHATML
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.of_tools = of_tools
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"broken chat template: {error.message} (line {error.lineno})"
            ) from error

    @cached_property
    def capabilities(self) -> TemplateCapabilities:
        """The abilities of the template, found by rendering samples."""
        return TemplateCapabilities.probe(self)

    def render(
        self,
        messages: JsonObjects,
        *,
        tools: JsonObjects | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the conversation as text; ``kwargs`` are further variables of the template.

        Raises RequestError if the template refuses or fails.
        """
        today = (
            datetime.now()
        )  # as in llama-server: the day, so that a prompt stays the same for as long
        variables: JsonDict = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "date_string": today.strftime("%d %b %Y"),
            "datetime": today.strftime("%b %d %Y"),
            **kwargs,
        }
        if "functions" in self.source:  # a name for the tools as text, which some templates have
            variables.setdefault(
                "functions", json.dumps(tools, ensure_ascii=False, indent=2) if tools else ""
            )
        lists = {
            "messages": list(messages),
            "tools": tools and list(tools),
        }  # which the template may change
        variables.update(**lists, add_generation_prompt=add_generation_prompt)
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise RequestError(f"chat template: {error.message or error}") from error
        except Exception as error:  # a template may fail in any way that Python code may
            raise RequestError(f"chat template failed: {error}") from error


class _Missing(jinja2.ChainableUndefined):
    """A missing variable or member. Its members are missing, its methods make nothing, as in
    llama-server.
    """

    def strip(self, *args: Any) -> str:
        return ""

    capitalize = join = lower = replace = title = upper = strip

    def items(self) -> tuple[()]:
        return ()


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with two shortcuts that change no answer and save a third of the time on long
    conversations.

    Lists may grow and shrink: Kimi's template keeps ids in one, and llama-server lets it. A text
    and nothing is the text, as there.
    """

    intercepted_binops = frozenset({"+"})
    _dict_attributes = frozenset(dir(dict))
    _list_changes = frozenset({"append", "pop"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in self._dict_attributes:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(
        self,
        context: Context,
        operator: str,
        left: Any,
        right: Any,
    ) -> Any:
        try:
            return left + right
        except (TypeError, jinja2.UndefinedError):
            text, other = (left, right) if isinstance(left, str) else (right, left)
            if isinstance(text, str) and (other is None or isinstance(other, jinja2.Undefined)):
                return text
            raise

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) in (str, LoopContext):  # immutable, and without internals under a public name
            return not attr.startswith("_")
        if type(obj) is list and attr in self._list_changes:
            return True
        return super().is_safe_attribute(obj, attr, value)


class _Generation(Extension):
    """The tag ``{% generation %}``, by which transformers marks assistant text in training; here
    only the inside counts.
    """

    tags = {"generation"}  # noqa: RUF012 (an instance variable in jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _environment() -> jinja2.Environment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, undefined=_Missing, extensions=extensions
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, Iterator):  # of a filter such as map
        value = list(value)
    form: JsonDict = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, default=_null, **form)


def _null(value: Any) -> None:
    if not isinstance(value, jinja2.Undefined):
        raise TypeError(f"a value of type {type(value).__name__} has no JSON")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


_REASONING_KEYS = ("reasoning_content", "thinking")


@dataclass(frozen=True)
class TemplateCapabilities:
    """The features of a template. ``system_first``, ``system_inside``: system messages at the
    start, later on. ``repeated_user``: user messages in a row. ``text``, ``parts``: content as a
    string, as a list of parts. ``tools``, ``tool_calls``: a list of tools, calls in assistant
    messages, ``parallel_calls`` several in one, ``object_arguments`` their arguments as an object
    (else as JSON text). ``old_reasoning``: reasoning of earlier turns if it is to be kept.
    ``reasoning_effort``: the words for how much of it there should be, empty if the template reads
    none; ``reasoning_key`` is the member of a message that has it, and ``content_beside_reasoning``
    whether a message that calls may have both. ``without_user``: conversations without a message of
    the user.
    """

    system_first: bool
    system_inside: bool
    repeated_user: bool
    text: bool
    parts: bool
    tools: bool
    tool_calls: bool
    object_arguments: bool
    parallel_calls: bool = False
    old_reasoning: bool = False
    reasoning_effort: tuple[str, ...] = ()
    reasoning_key: str = "reasoning_content"
    content_beside_reasoning: bool = True
    without_user: bool = True

    def effort(self, requested: Any) -> Any:
        """Return ``requested``, or the nearest word that the template accepts; of two the one for
        more reasoning.
        """
        if (
            not self.reasoning_effort
            or requested in self.reasoning_effort
            or requested not in _SCALE
        ):
            return requested
        rank = _SCALE.index(requested)
        return min(reversed(self.reasoning_effort), key=lambda word: abs(_SCALE.index(word) - rank))

    @classmethod
    def probe(cls, template: Template) -> TemplateCapabilities:
        """Render samples for the capabilities and look at the output."""
        parts = _shows(template, [sample_message("user", _A, as_text=False)], _A, never="'type'")
        text = _shows(template, [sample_message("user", _A)], _A) or not parts

        def said(role: str, content: str) -> JsonDict:
            return sample_message(role, content, as_text=text)

        def called(*arguments: Mapping[str, str], as_object: bool) -> list[JsonDict]:
            return [said("user", "a"), sample_call(*arguments, as_text=text, as_object=as_object)]

        def objects_shown(tools: JsonObjects | None) -> bool:
            return _shows(
                template, called({_A: _B}, as_object=True), _A, _B, never=f"'{_A}'", tools=tools
            )

        # Some templates take no call without tools.
        known = (
            [sample_tool()] if not objects_shown(None) and objects_shown([sample_tool()]) else None
        )
        objects = known is not None or objects_shown(None)
        requested, answer = called({"b": "b"}, as_object=objects)
        result = {**said("tool", "b"), "tool_call_id": SAMPLE_CALL_ID, "name": SAMPLE_TOOL}

        def reasons(key: str, content: str = "") -> bool:
            message = {**answer, **said("assistant", content), key: _A}
            return _shows(template, [requested, message, result], _A, content)

        key = next(filter(reasons, _REASONING_KEYS), "")
        reasoned = [
            said("user", "a"),
            {**said("assistant", "b"), "reasoning_content": _A},
            said("user", "c"),
        ]
        return cls(
            system_first=_shows(template, [said("system", _A), said("user", _B)], _A, _B),
            system_inside=_shows(
                template,
                [said("user", "a"), said("assistant", "b"), said("system", _A), said("user", _B)],
                _A,
                _B,
            ),
            repeated_user=_shows(template, [said("user", _A), said("user", _B)], _A, _B),
            text=text,
            parts=parts,
            tools=_shows(template, [said("user", "a")], _A, tools=[sample_tool(_A)]),
            tool_calls=objects or _shows(template, called({_A: _B}, as_object=False), _A, _B),
            object_arguments=objects,
            parallel_calls=_shows(
                template, called({_A: "b"}, {_B: "b"}, as_object=objects), _A, _B, tools=known
            ),
            old_reasoning=_shows(
                template, reasoned, _A, variables={"enable_thinking": True, **keep_reasoning(True)}
            ),
            reasoning_effort=_efforts(template, [said("user", "a")]),
            reasoning_key=key or _REASONING_KEYS[0],
            content_beside_reasoning=not key or reasons(key, content=_B),
            without_user=_shows(template, [said("assistant", _A)], _A),
        )


def _efforts(template: Template, messages: JsonObjects) -> tuple[str, ...]:
    texts: dict[str, str] = {}
    for effort in EFFORTS:
        with suppress(RequestError):
            texts[effort] = template.render(messages, reasoning_effort=effort)
    return tuple(texts) if len(set(texts.values())) > 1 else ()


def _shows(
    template: Template,
    messages: JsonObjects,
    *needles: str,
    never: str | None = None,
    tools: JsonObjects | None = None,
    variables: JsonObject | None = None,
) -> bool:
    """Return whether the rendered sample holds all ``needles`` and not ``never`` (how Python would
    write a value).

    No reply follows a message that calls: some templates would omit the call.
    """
    calls = "tool_calls" in messages[-1]
    try:
        text = template.render(
            messages, tools=tools, add_generation_prompt=not calls, **(variables or {})
        )
    except RequestError:
        return False
    return all(needle in text for needle in needles) and (never is None or never not in text)

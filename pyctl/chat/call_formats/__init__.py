"""Tool calls: the known formats, which of them a template writes, and constraints by the schemas of
tools.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from pyctl.chat.call_formats.call_format import CallFormat
from pyctl.chat.call_formats.families import FALLBACK, FAMILIES
from pyctl.chat.call_formats.llama3 import LlamaFormat
from pyctl.chat.call_formats.message_format import HARMONY
from pyctl.chat.constraint import Constraint
from pyctl.chat.json_object import JsonObject
from pyctl.chat.reply import ReasoningTags, ReplyPart
from pyctl.chat.template import (
    SAMPLE_KEY,
    SAMPLE_VALUE,
    Template,
    sample_call,
    sample_message,
    sample_tool,
)
from pyctl.chat.tool_definitions import Tool, Tools
from pyctl.errors import RequestError
from pyctl.settings.limit import limit

__all__ = ["FALLBACK", "FORMATS", "CallConstraintCache", "find_call_format"]

log = logging.getLogger(__name__)

_MAX_KNOWN = 16
_MAX_PROBES = limit(
    200,
    "arguments checked one by one if schemas of tools cannot be converted",
    "the others may be any JSON",
    "request",
)
_ANYTHING = {"type": "object", "additionalProperties": True}


class CallConstraintCache:
    """The constraints on calls as ``form`` writes them. The last few are remembered: agents repeat
    their tools. Thread-safe.
    """

    def __init__(self, form: CallFormat, tags: ReasoningTags, controls: Mapping[str, int]) -> None:
        self._form = form
        self._tags = tags
        self._controls = controls
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Constraint | None] = OrderedDict()

    def constraint(
        self,
        tools: Tools,
        part: ReplyPart,
        schema: Any = None,
        prefill: str = "",
    ) -> Constraint | None:
        """Return the constraint on calls in a reply that starts in ``part``. With ``schema``, which
        can be converted, it binds the reply to calls or to JSON that continues ``prefill``.

        An argument whose schema cannot be converted may be any JSON, unless its tool is strict:
        then RequestError. None if nothing that binds all these tools can be made, and none of them
        has to be called.
        """
        key = _key(tools, part, schema, prefill)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        made = self._make(tools, part, schema, prefill)
        if key:
            with self._lock:
                self._known[key] = made
                while len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        return made

    def _make(
        self,
        tools: Tools,
        part: ReplyPart,
        schema: Any,
        prefill: str,
    ) -> Constraint | None:
        """Return the constraint on calls, with looser tools if no grammar can be made of their
        schemas.

        Each attempt loosens more: nothing, the arguments that fail, all arguments; a strict tool
        stays as it is. Raises the first error if a call is forced or a tool is strict, and
        otherwise returns None with a warning.
        """
        probes = iter(range(_MAX_PROBES))
        error: RequestError | None = None
        for loosen in (_unchanged, self._relax_failing, _relax_all):
            loosened = replace(
                tools, tools=tuple(t if t.strict else loosen(t, probes) for t in tools.tools)
            )
            try:
                return self._form.constraint(
                    loosened, self._tags, part, self._controls, schema, prefill
                )
            except RequestError as problem:
                error = error or problem
        if error is not None and (tools.forced or any(tool.strict for tool in tools.tools)):
            raise error
        log.warning("tool calls are not constrained to their schemas: %s", error)
        return None

    def _relax_failing(self, tool: Tool, probes: Iterator[int]) -> Tool:
        """Return ``tool`` with any JSON for each argument of which no grammar can be made."""
        if self._fits(tool.parameters, tool, probes):
            return tool
        shared = {
            key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters
        }
        properties = {
            key: schema
            if self._fits(
                {"type": "object", "properties": {key: schema}, "required": [key], **shared},
                tool,
                probes,
            )
            else {}
            for key, schema in tool.properties.items()
        }
        loosened = {
            "type": "object",
            "properties": properties,
            "required": list(tool.required),
            **shared,
        }
        return replace(
            tool,
            parameters=loosened if properties and self._fits(loosened, tool, probes) else _ANYTHING,
        )

    def _fits(self, parameters: JsonObject, tool: Tool, probes: Iterator[int]) -> bool:
        """Return whether a grammar can be made of these parameters; False if they are too large to
        examine.
        """
        if next(probes, None) is None:
            return False
        alone = Tools((replace(tool, parameters=parameters),), forced=True)
        try:
            self._form.constraint(alone, self._tags, "content", self._controls)
        except RequestError:
            return False
        return True


def _unchanged(tool: Tool, probes: Iterator[int]) -> Tool:
    return tool


def _relax_all(tool: Tool, probes: Iterator[int]) -> Tool:
    return replace(tool, parameters=_ANYTHING)


def _key(*parts: object) -> bytes:
    """Return a key that is the same for the same tools, part, schema and prefill; empty if they
    have no key.
    """
    try:
        encoded = msgspec.json.encode(parts)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return b""
    return hashlib.blake2b(encoded, digest_size=16).digest()


FORMATS: tuple[CallFormat, ...] = (*FAMILIES, LlamaFormat(), HARMONY)
"""The known formats, in the order in which `find_call_format` tries them."""


def find_call_format(template: Template) -> CallFormat:
    """Return the format in which ``template`` writes calls, found from the rendering of a sample,
    and log it.
    """
    capabilities = template.capabilities
    text = capabilities.text
    as_object = capabilities.object_arguments
    messages = [
        sample_message("user", "a", as_text=text),
        sample_call({SAMPLE_KEY: SAMPLE_VALUE}, as_text=text, as_object=as_object),
    ]
    try:
        sample = template.render(
            messages, tools=[sample_tool(SAMPLE_KEY)], add_generation_prompt=False
        )
    except RequestError:
        sample = ""
    form_of_sample = next((form for form in FORMATS if form.recognizes(sample)), None)
    form_of_sample = form_of_sample or next(
        (form for form in FAMILIES if form.is_named_in(template.source)), None
    )
    if form_of_sample is not None:
        log.debug("tool calls: format of %s, parsed and constrained", form_of_sample.name)
    elif capabilities.tool_calls:
        log.warning(
            "tool calls: unknown format of the chat template; replies may contain calls as text"
        )
    elif capabilities.tools:
        log.warning(
            "tool calls: no format in the chat template; JSON in <tool_call> tags is parsed"
        )
    return form_of_sample or FALLBACK

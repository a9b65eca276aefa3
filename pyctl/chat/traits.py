"""What a chat template can express, found by rendering samples; no template is known by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyctl.chat.template import Template
from pyctl.chat.tools import CallForm
from pyctl.errors import RequestError

__all__ = ["SAMPLE_CALL_ID", "Traits"]

SAMPLE_CALL_ID = "Ab3dEf7hI"
"""Nine letters and digits, which is the only form that some templates take."""

_A, _B = "pyctlsamplea", "pyctlsampleb"


@dataclass(frozen=True)
class Traits:
    """``system_first``, ``system_inside``: system messages at the start, later on. ``repeated_user``: user messages
    in a row. ``text``, ``parts``: content as a string, as a list of parts. ``tools``, ``tool_calls``: a list of tools,
    calls in assistant messages, ``object_arguments`` their arguments as an object (else as JSON text), ``call_form``
    how they are written.
    """

    system_first: bool
    system_inside: bool
    repeated_user: bool
    text: bool
    parts: bool
    tools: bool
    tool_calls: bool
    object_arguments: bool
    call_form: CallForm = ""

    @classmethod
    def of(cls, template: Template) -> Traits:
        """Render what the traits ask about and see what comes out."""
        parts = _shows(template, [_message("user", [{"type": "text", "text": _A}])], _A, never="'type'")
        text = _shows(template, [_message("user", _A)], _A) or not parts

        def said(role: str, content: str) -> dict[str, Any]:
            return _message(role, content if text else [{"type": "text", "text": content}])

        def called(arguments: Any) -> list[dict[str, Any]]:
            function = {"name": "sample", "arguments": arguments}
            call = {"type": "function", "id": SAMPLE_CALL_ID, "function": function}
            return [said("user", "a"), {**said("assistant", ""), "tool_calls": [call]}]

        tool = {"type": "function", "function": {"name": _A, "description": "", "parameters": {"type": "object"}}}
        objects = _shows(template, called({_A: _B}), _A, _B, never=f"'{_A}'")
        return cls(
            system_first=_shows(template, [said("system", _A), said("user", _B)], _A, _B),
            system_inside=_shows(
                template, [said("user", "a"), said("assistant", "b"), said("system", _A), said("user", _B)], _A, _B
            ),
            repeated_user=_shows(template, [said("user", _A), said("user", _B)], _A, _B),
            text=text,
            parts=parts,
            tools=_shows(template, [said("user", "a")], _A, tools=[tool]),
            tool_calls=objects or _shows(template, called(f'{{"{_A}": "{_B}"}}'), _A, _B),
            object_arguments=objects,
            call_form=_call_form(template, called({_A: _B} if objects else f'{{"{_A}": "{_B}"}}'), tool),
        )


def _call_form(template: Template, messages: Sequence[Mapping[str, Any]], tool: Mapping[str, Any]) -> CallForm:
    try:
        text = template.render(messages, tools=[tool])
    except RequestError:
        return ""
    if re.search(rf"<tool_call>\s*<function=sample>\s*<parameter={_A}>\s*{_B}\s*</parameter>", text):
        return "xml"
    return "json" if re.search(r'<tool_call>\s*\{"name": "sample", "arguments": \{', text) else ""


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _shows(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    *needles: str,
    never: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> bool:
    """Whether the rendered sample holds all ``needles`` and not ``never`` (how Python would write a value)."""
    try:
        text = template.render(messages, tools=tools)
    except RequestError:
        return False
    return all(needle in text for needle in needles) and (never is None or never not in text)

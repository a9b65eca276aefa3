"""What a chat template can express, found by rendering samples; no template is known by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyctl.chat.template import Template
from pyctl.chat.tools import CallForm
from pyctl.errors import RequestError

__all__ = ["SAMPLE_CALL_ID", "Traits", "keep_reasoning"]

SAMPLE_CALL_ID = "Ab3dEf7hI"
"""Nine letters and digits, which is the only form that some templates take."""

_A, _B = "pyctlsamplea", "pyctlsampleb"


@dataclass(frozen=True)
class Traits:
    """``system_first``, ``system_inside``: system messages at the start, later on. ``repeated_user``: user messages
    in a row. ``text``, ``parts``: content as a string, as a list of parts. ``tools``, ``tool_calls``: a list of tools,
    calls in assistant messages, ``parallel_calls`` several in one, ``object_arguments`` their arguments as an object
    (else as JSON text), ``call_form`` how they are written. ``old_reasoning``, ``reasoning_effort``: reasoning of
    earlier turns if it is to be kept, and a word for how much of it there should be.
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
    parallel_calls: bool = False
    old_reasoning: bool = False
    reasoning_effort: bool = False

    @classmethod
    def of(cls, template: Template) -> Traits:
        """Render what the traits ask about and see what comes out."""
        parts = _shows(template, [_message("user", [{"type": "text", "text": _A}])], _A, never="'type'")
        text = _shows(template, [_message("user", _A)], _A) or not parts

        def said(role: str, content: str) -> dict[str, Any]:
            return _message(role, content if text else [{"type": "text", "text": content}])

        def called(*arguments: Any) -> list[dict[str, Any]]:
            functions = [{"name": "sample", "arguments": each} for each in arguments]
            calls = [{"type": "function", "id": SAMPLE_CALL_ID, "function": function} for function in functions]
            return [said("user", "a"), {**said("assistant", ""), "tool_calls": calls}]

        tool = {"type": "function", "function": {"name": _A, "description": "", "parameters": {"type": "object"}}}
        objects = _shows(template, called({_A: _B}), _A, _B, never=f"'{_A}'")
        reasoned = [said("user", "a"), {**said("assistant", "b"), "reasoning_content": _A}, said("user", "c")]
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
            parallel_calls=_shows(
                template, called(*({name: "b"} if objects else f'{{"{name}": "b"}}' for name in (_A, _B))), _A, _B
            ),
            old_reasoning=_shows(template, reasoned, _A, variables={"enable_thinking": True, **keep_reasoning(True)}),
            reasoning_effort=_reads_effort(template, [said("user", "a")]),
        )


def _call_form(template: Template, messages: Sequence[Mapping[str, Any]], tool: Mapping[str, Any]) -> CallForm:
    try:
        text = template.render(messages, tools=[tool])
    except RequestError:
        return ""
    if re.search(rf"<tool_call>\s*<function=sample>\s*<parameter={_A}>\s*{_B}\s*</parameter>", text):
        return "xml"
    return "json" if re.search(r'<tool_call>\s*\{"name": "sample", "arguments": \{', text) else ""


def keep_reasoning(keep: bool) -> dict[str, bool]:
    """Variables by which templates are told to write the reasoning of earlier turns, or to leave it out."""
    return {"preserve_thinking": keep, "clear_thinking": not keep, "truncate_history_thinking": not keep}


def _reads_effort(template: Template, messages: Sequence[Mapping[str, Any]]) -> bool:
    try:
        low, high = (template.render(messages, reasoning_effort=effort) for effort in ("low", "high"))
    except RequestError:
        return False
    return low != high


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _shows(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    *needles: str,
    never: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the rendered sample holds all ``needles`` and not ``never`` (how Python would write a value)."""
    try:
        text = template.render(messages, tools=tools, **(variables or {}))
    except RequestError:
        return False
    return all(needle in text for needle in needles) and (never is None or never not in text)

"""Sample messages, by whose rendering a template shows what it can express."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = [
    "SAMPLE_CALL_ID",
    "SAMPLE_KEY",
    "SAMPLE_TOOL",
    "SAMPLE_VALUE",
    "sample_call",
    "sample_message",
    "sample_tool",
]

SAMPLE_CALL_ID = "Ab3dEf7hI"
"""Nine letters and digits, which is the only form that some templates take."""

SAMPLE_TOOL = "sample"
SAMPLE_KEY, SAMPLE_VALUE = "pyctlsamplea", "pyctlsampleb"


def sample_message(role: str, text: str, *, as_text: bool = True) -> dict[str, Any]:
    """A message of ``role``; its content is a list of one part unless ``as_text``."""
    return {"role": role, "content": text if as_text else [{"type": "text", "text": text}]}


def sample_call(*arguments: Mapping[str, str], as_text: bool = True, as_object: bool = True) -> dict[str, Any]:
    """A message of the assistant that calls the sample tool with each of ``arguments``, as JSON text unless
    ``as_object``.
    """
    functions = [{"name": SAMPLE_TOOL, "arguments": each if as_object else json.dumps(each)} for each in arguments]
    calls = [{"type": "function", "id": SAMPLE_CALL_ID, "function": function} for function in functions]
    return {**sample_message("assistant", "", as_text=as_text), "tool_calls": calls}


def sample_tool(name: str = SAMPLE_TOOL) -> dict[str, Any]:
    """A tool as templates take it."""
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}

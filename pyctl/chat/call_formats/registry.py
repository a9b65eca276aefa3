"""The formats of tool calls that are known, and which of them a template writes."""

from __future__ import annotations

import logging

from pyctl.chat.call_formats.call_format import CallFormat
from pyctl.chat.call_formats.gpt_oss import HarmonyFormat
from pyctl.chat.call_formats.hermes import HermesFormat
from pyctl.chat.call_formats.llama3 import LlamaFormat
from pyctl.chat.call_formats.mistral import MistralFormat, MistralListFormat
from pyctl.chat.call_formats.qwen import QwenFormat
from pyctl.chat.samples import SAMPLE_KEY, SAMPLE_VALUE, sample_call, sample_message, sample_tool
from pyctl.chat.template import Template, TemplateCapabilities
from pyctl.errors import RequestError

log = logging.getLogger(__name__)

__all__ = ["FALLBACK", "FORMATS", "find_call_format"]

FALLBACK: CallFormat = HermesFormat()
"""For templates that write no calls, or in a form that none recognizes."""

FORMATS: tuple[CallFormat, ...] = (
    QwenFormat(),
    FALLBACK,
    LlamaFormat(),
    MistralFormat(),
    MistralListFormat(),
    HarmonyFormat(),
)
"""In the order in which they are asked."""


def find_call_format(template: Template, capabilities: TemplateCapabilities) -> CallFormat:
    """The format in which ``template`` writes calls, told by how it renders a sample; the log says which it is."""
    text, as_object = capabilities.text, capabilities.object_arguments
    messages = [
        sample_message("user", "a", as_text=text),
        sample_call({SAMPLE_KEY: SAMPLE_VALUE}, as_text=text, as_object=as_object),
    ]
    try:
        sample = template.render(messages, tools=[sample_tool(SAMPLE_KEY)])
    except RequestError:
        sample = ""
    found = next((form for form in FORMATS if form.recognizes(sample)), None)
    if found is not None:
        log.info("tool calls are read and bound in the form of %s", found.name)
    elif capabilities.tool_calls:
        log.warning("the chat template writes tool calls in an unknown form: replies may hold calls as text")
    elif capabilities.tools:
        log.warning("the chat template tells of tools, but writes no calls: JSON between <tool_call> tags is one")
    return found or FALLBACK

"""Families of models whose calls have delimiters."""

from __future__ import annotations

import re
from dataclasses import replace

from pyctl.chat.call_formats.delimited_format import DelimitedFormat
from pyctl.chat.call_formats.literal_delimiters import LiteralDelimiters
from pyctl.chat.call_formats.name_delimiters import NameDelimiters
from pyctl.chat.call_formats.object_delimiters import ObjectDelimiters
from pyctl.chat.call_formats.tag_delimiters import TagDelimiters
from pyctl.chat.reply import BRACKETS, SEED, THINK, ReasoningTags

__all__ = ["FALLBACK", "FAMILIES", "HERMES", "QWEN"]

_TOOL_CALL = "<tool_call>"
_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_ID = re.compile("[A-Za-z0-9]{9}")


def _reasoning(
    *interrupts: str, tags: tuple[ReasoningTags, ...] = (THINK, SEED, BRACKETS)
) -> tuple[ReasoningTags, ...]:
    """Return ``tags`` around reasoning that a call also ends."""
    return tuple(replace(tag, interrupts=interrupts) for tag in tags)


_OBJECT = ObjectDelimiters(open=f"{_TOOL_CALL}\n", close="\n</tool_call>")
_QWEN = TagDelimiters(
    begin=f"{_TOOL_CALL}\n",
    open="<function=",
    name_end=">\n",
    key_open="<parameter=",
    key_end=">\n",
    value_end="\n</parameter>\n",
    close="</function>\n",
    end="</tool_call>",
    wraps_each_call=True,
)
_SEED = replace(
    _QWEN,
    begin="<seed:tool_call>\n",
    key_end=">",
    value_end="</parameter>\n",
    end="</seed:tool_call>",
)
_GLM = TagDelimiters(
    open=_TOOL_CALL,
    name_end="",
    key_open="<arg_key>",
    key_end="</arg_key>",
    value_opens=("<arg_value>",),
    value_end="</arg_value>",
    close="</tool_call>",
    is_loose=True,
)
_HUNYUAN = TagDelimiters(
    begin="<tool_calls:opensource>\n",
    open="<tool_call:opensource>",
    name_end="<tool_sep:opensource>\n",
    key_open="<arg_key:opensource>",
    key_end="</arg_key:opensource>\n",
    value_opens=("<arg_value:opensource>",),
    value_end="</arg_value:opensource>\n",
    close="</tool_call:opensource>\n",
    between="",
    end="</tool_calls:opensource>",
)
_INVOKE = TagDelimiters(
    begin="<minimax:tool_call>\n",
    open='<invoke name="',
    name_end='">\n',
    key_open='<parameter name="',
    key_end='">',
    value_end="</parameter>\n",
    close="</invoke>\n",
    between="",
    end="</minimax:tool_call>",
)
_DSML = TagDelimiters(
    begin=f"<{_BAR}DSML{_BAR}tool_calls>\n",
    open=f'<{_BAR}DSML{_BAR}invoke name="',
    name_end='">\n',
    key_open=f'<{_BAR}DSML{_BAR}parameter name="',
    key_end='"',
    value_opens=(' string="true">', ' string="false">'),
    value_end=f"</{_BAR}DSML{_BAR}parameter>\n",
    close=f"</{_BAR}DSML{_BAR}invoke>\n",
    between="",
    end=f"</{_BAR}DSML{_BAR}tool_calls>",
    tokens=(f"{_BAR}DSML{_BAR}",),
)
_DSML_OLD = replace(
    _DSML, begin=f"<{_BAR}DSML{_BAR}function_calls>\n", end=f"</{_BAR}DSML{_BAR}function_calls>"
)
_DEEPSEEK = NameDelimiters(
    begin=f"<{_BAR}tool▁calls▁begin{_BAR}>",
    open=f"<{_BAR}tool▁call▁begin{_BAR}>",
    parts=(None, f"<{_BAR}tool▁sep{_BAR}>"),
    close=f"<{_BAR}tool▁call▁end{_BAR}>",
    between="",
    end=f"<{_BAR}tool▁calls▁end{_BAR}>",
)
_DEEPSEEK_R1 = replace(
    _DEEPSEEK,
    parts=(f"function<{_BAR}tool▁sep{_BAR}>", None, "\n```json\n"),
    close=f"\n```<{_BAR}tool▁call▁end{_BAR}>",
    between="\n",
)
_KIMI = NameDelimiters(
    begin="<|tool_calls_section_begin|>",
    open="<|tool_call_begin|>",
    parts=("functions.", None, ":", re.compile("[0-9]{1,4}"), "<|tool_call_argument_begin|>"),
    ids="all",
    close="<|tool_call_end|>",
    between="",
    end="<|tool_calls_section_end|>",
)
_SOLAR = NameDelimiters(
    begin="<|tool_calls|>",
    open="<|tool_call:begin|>",
    parts=(re.compile("[A-Za-z0-9]{1,32}"), "<|tool_call:name|>", None, "<|tool_call:args|>"),
    ids="pattern",
    close="<|tool_call:end|>",
    between="",
    end="<|calls|>",
)
_MISTRAL = NameDelimiters(
    open="[TOOL_CALLS]",
    parts=(None, ("[CALL_ID]", _ID), "[ARGS]"),
    ids="pattern",
)
_LIST = ObjectDelimiters(
    begin="<tool_calls>",
    brackets=("[", "]"),
    between=", ",
    end="</tool_calls>",
)
_MISTRAL_LIST = replace(_LIST, begin="[TOOL_CALLS]", end="", id_after="id")
_COHERE = replace(
    _LIST,
    begin="<|START_ACTION|>",
    brackets=("[\n    ", "\n]"),
    between=",\n    ",
    end="<|END_ACTION|>",
    name_key="tool_name",
    arguments_key="parameters",
    id_before="tool_call_id",
)
_LFM2 = LiteralDelimiters(
    begin="<|tool_call_start|>",
    brackets=("[", "]"),
    between=", ",
    end="<|tool_call_end|>",
    round=True,
    separator="=",
    quotes=("'", '"'),
)
_GEMMA = LiteralDelimiters(
    open="<|tool_call>call:",
    close="<tool_call|>",
    between="",
    quotes=('<|"|>',),
    is_sorted=True,
)

_ACTION = replace(
    _COHERE,
    begin="Action:\n```json\n",
    end="```",
    id_before="",
    blanks=("\n        ", "\n        ", "\n    "),
)
_GIGACHAT = ObjectDelimiters(open="<|function_call|>", between="")
_GIGACHAT_3 = ObjectDelimiters(open="<|message_sep|>\n\nfunction call<|role_sep|>\n", between="")
_FUNCTIONARY = NameDelimiters(
    open="<function=",
    parts=(None, ">"),
    close="</function>",
    between="",
)
_MINICPM = TagDelimiters(
    open='<function name="',
    name_end='">',
    key_open='<param name="',
    key_end='">',
    value_end="</param>",
    close="</function>",
)

_HERMES_REASONING = (
    replace(THINK, interrupts=(_TOOL_CALL,)),
    replace(SEED, forced_close=f"\n{SEED.close}"),
    BRACKETS,
)
HERMES = DelimitedFormat(
    "Hermes (JSON between tags)",
    _OBJECT,
    _QWEN,
    reasoning=_HERMES_REASONING,
)
"""Hermes, Qwen 2.5 and 3, Granite 4, MiMo, Bielik: most models with no better form were taught this
one.
"""

FALLBACK = DelimitedFormat(
    "unknown (JSON between <tool_call> tags is read)",
    _OBJECT,
    _QWEN,
    reasoning=_HERMES_REASONING,
)
"""The format for templates that write no calls, or in a form that none recognizes."""

QWEN = DelimitedFormat(
    "Qwen (between tags)",
    _QWEN,
    _OBJECT,
    reasoning=(
        replace(THINK, interrupts=(_TOOL_CALL,), forced_close=f"\n{THINK.close}"),
        replace(SEED, forced_close=f"\n{SEED.close}"),
        BRACKETS,
    ),
)
"""Qwen3-Coder and its successors, Nemotron 3. The end of reasoning has its own line."""

_BRACKETS_FIRST = _reasoning(_MISTRAL.opener, tags=(BRACKETS, THINK, SEED))

FAMILIES: tuple[DelimitedFormat, ...] = (
    QWEN,
    HERMES,
    DelimitedFormat(
        "Seed",
        _SEED,
        reasoning=_reasoning(_SEED.opener, tags=(SEED, THINK)),
    ),
    DelimitedFormat(
        "GLM, Ling, Laguna",
        _GLM,
        reasoning=_reasoning(_TOOL_CALL),
    ),
    DelimitedFormat(
        "Hunyuan 3",
        _HUNYUAN,
        reasoning=_reasoning(
            _HUNYUAN.opener, tags=(ReasoningTags("<think:opensource>", "</think:opensource>"),)
        ),
    ),
    DelimitedFormat(
        "MiniMax M2",
        _INVOKE,
        reasoning=_reasoning(_INVOKE.opener),
    ),
    DelimitedFormat(
        "DeepSeek 4",
        _DSML,
        reasoning=_reasoning(_DSML.opener),
    ),
    DelimitedFormat(
        "DeepSeek 3.2",
        _DSML_OLD,
        reasoning=_reasoning(_DSML_OLD.opener),
    ),
    DelimitedFormat(
        "DeepSeek 3.1",
        _DEEPSEEK,
        _DEEPSEEK_R1,
        reasoning=_reasoning(_DEEPSEEK.opener),
    ),
    DelimitedFormat(
        "DeepSeek R1",
        _DEEPSEEK_R1,
        _DEEPSEEK,
        reasoning=_reasoning(_DEEPSEEK.opener),
    ),
    DelimitedFormat(
        "Kimi K2",
        _KIMI,
        reasoning=_reasoning(_KIMI.opener, _KIMI.open),
    ),
    DelimitedFormat(
        "Solar",
        _SOLAR,
        reasoning=_reasoning(_SOLAR.opener),
        around_content=("<|content|>",),
    ),
    DelimitedFormat(
        "Mistral (name and arguments)",
        _MISTRAL,
        _MISTRAL_LIST,
        reasoning=_BRACKETS_FIRST,
        id_size=9,
    ),
    DelimitedFormat(
        "Mistral (list)",
        _MISTRAL_LIST,
        _MISTRAL,
        reasoning=_BRACKETS_FIRST,
        id_size=9,
    ),
    DelimitedFormat(
        "Command-R",
        _COHERE,
        reasoning=_reasoning(
            _COHERE.opener, tags=(ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),)
        ),
        around_content=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    DelimitedFormat(
        "Nemotron 2",
        replace(_LIST, begin="<TOOLCALL>", end="</TOOLCALL>"),
        reasoning=_reasoning("<TOOLCALL>"),
    ),
    DelimitedFormat(
        "Apriel",
        _LIST,
        reasoning=_reasoning(
            _LIST.opener,
            tags=(
                THINK,
                SEED,
                BRACKETS,
                ReasoningTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
            ),
        ),
    ),
    DelimitedFormat(
        "MiniMax M1",
        ObjectDelimiters(
            begin="<tool_calls>\n",
            close="\n",
            between="",
            end="</tool_calls>",
        ),
        reasoning=_reasoning("<tool_calls>"),
    ),
    DelimitedFormat(
        "Granite 3",
        replace(_LIST, begin="<|tool_call|>", end=""),
        reasoning=_reasoning("<|tool_call|>"),
        named_in=("respond only with <|tool_call|>",),
    ),
    DelimitedFormat(
        "GigaChat 3.1",
        _GIGACHAT,
        reasoning=_reasoning(_GIGACHAT.opener),
    ),
    DelimitedFormat(
        "GigaChat 3",
        _GIGACHAT_3,
        reasoning=_reasoning(_GIGACHAT_3.opener),
    ),
    DelimitedFormat(
        "Apertus",
        replace(_LIST, begin="<|tools_prefix|>", end="<|tools_suffix|>", name_key=""),
        reasoning=_reasoning("<|tools_prefix|>"),
    ),
    DelimitedFormat(
        "Functionary 3.1",
        _FUNCTIONARY,
        reasoning=_reasoning(_FUNCTIONARY.opener),
    ),
    DelimitedFormat(
        "Functionary 3.2",
        NameDelimiters(
            open=">>>",
            parts=(None, "\n"),
            between="",
            is_known=True,
        ),
        reasoning=_reasoning(">>>"),
        around_content=(">>>all\n",),
        opening=">>>",
    ),
    DelimitedFormat(
        "Firefunction",
        replace(_LIST, begin=" functools", end=""),
        reasoning=_reasoning("functools["),
    ),
    DelimitedFormat(
        "Command R+",
        _ACTION,
        replace(_ACTION, begin="Action: ```json\n"),
        reasoning=_reasoning(_ACTION.opener),
    ),
    DelimitedFormat(
        "MiniCPM 5",
        _MINICPM,
        reasoning=_reasoning(_MINICPM.opener),
    ),
    DelimitedFormat(
        "LFM2",
        _LFM2,
        reasoning=_reasoning(_LFM2.opener),
        named_in=("List of tools: ",),
    ),
    DelimitedFormat(
        "Gemma 4",
        _GEMMA,
        reasoning=_reasoning(
            "<|tool_call>", tags=(ReasoningTags("<|channel>thought", "<channel|>"),)
        ),
    ),
)
"""The known families, in the order in which `find_call_format` tries them."""

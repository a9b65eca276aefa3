"""Every family of call formats, with a template, a reply and a call of each."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from pyctl.chat.call_formats.call_format import CallFormat
from pyctl.chat.call_formats.delimited_format import DelimitedFormat
from pyctl.chat.call_formats.families import FAMILIES, HERMES, QWEN
from pyctl.chat.call_formats.llama3 import LlamaFormat
from pyctl.chat.call_formats.message_format import HARMONY, MessageFormat
from pyctl.chat.reply import ReplyPart
from pyctl.chat.template import Template
from pyctl.chat.tool_definitions import Tools
from tests.unit.chat.conftest import unpacked
from tests.unit.chat.parsing import TOOLS, Parsed, parse_reply

BAR = "\N{FULLWIDTH VERTICAL LINE}"


@dataclass(frozen=True)
class Family:
    """A template with its format: what stands before and after a reply, and a call of the tool
    without arguments.

    ``marks`` are texts that lead its parser astray. ``is_plain`` if the template leaves strings as
    they are where they would need escapes.
    """

    name: str
    form: CallFormat
    header: str
    end: str
    call: str
    marks: tuple[str, ...] = ()
    is_plain: bool = False

    def template(self) -> Template:
        return _template(self.name)

    @property
    def twice(self) -> str:
        """Two calls."""
        if isinstance(self.form, MessageFormat):
            return f"{self.call}{self.form.delimiters.ends[0]}<|start|>assistant{self.call}"
        if self.form.name == "Functionary 3.2":
            return f"{self.call}>>>{self.call}"
        marks = self.form.delimiters[0] if isinstance(self.form, DelimitedFormat) else None
        if marks is None or not marks.begin or marks.wraps_each_call:
            return f"{self.call}\n{self.call}"
        begin = marks.begin + marks.brackets[0]
        end = marks.brackets[1] + marks.end
        inner = self.call.removeprefix(begin).removesuffix(end)
        return f"{begin}{inner}{marks.between}{inner}{end}"


@cache
def _template(name: str) -> Template:
    return Template(unpacked(f"templates/{name}.jinja").read_text(), "<s>", "</s>")


def marked(
    name: str, form: str, header: str, end: str, call: str, is_plain: bool = False
) -> Family:
    """Return a family that marks describe: these are what leads astray, and each begun and ended
    once more.
    """
    found = next(each for each in FAMILIES if each.name == form)
    pieces = re.findall(r"<[^<>]*>|\[[A-Z_]+\]|[^<>\s]+", call)
    return Family(
        name,
        found,
        header,
        end,
        call,
        tuple(dict.fromkeys((*pieces, *found.control_tokens[:12]))),
        is_plain,
    )


CHATML = ("<|im_start|>assistant\n", "<|im_end|>\n")


LLAMA = ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")


LLAMA_CALL = '{"name": "stop", "parameters": {}}'


LLAMA_MARKS = ("<|python_tag|>", "stop", ";", '{"name": "stop", "parameters": ', '"type"')


MISTRAL = ("[/INST]", "</s>")


LIST_CALL = '[TOOL_CALLS][{"name": "stop", "arguments": {}, "id": "Ab3dEf7hI"}]'


NAMED_CALL = "[TOOL_CALLS]stop[ARGS]{}"


HARMONY_MARKS = (
    *(
        "<|start|>",
        "assistant",
        "<|channel|>",
        "analysis",
        "final",
        "commentary",
        "<|message|>",
        "<|end|>",
        "<|call|>",
    ),
    *(" to=functions.stop", "to=", "<|return|>", " <|constrain|>", "json", "<|start|>assistant"),
)


HERMES_CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


QWEN_CALL = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"


DEEPSEEK = (f"<{BAR}Assistant{BAR}>", f"<{BAR}end▁of▁sentence{BAR}>")


DSML_CALL = (
    f"<{BAR}DSML{BAR}X>\n<{BAR}DSML{BAR}invoke "
    f'name="stop">\n</{BAR}DSML{BAR}invoke>\n</{BAR}DSML{BAR}X>'
)


KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.stop:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)


KIMI = ("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>")


GLM = "GLM, Ling, Laguna"


GLM_CALL = "<tool_call>stop</tool_call>"


HY = "opensource"


COHERE_CALL = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "stop", "parameters": '
    "{}}\n]<|END_ACTION|>"
)


SOLAR_CALL = (
    "<|tool_calls|><|tool_call:begin|>Ab3dEf7hI<|tool_call:name|>stop"
    "<|tool_call:args|>{}<|tool_call:end|><|calls|>"
)


STOP_LIST = '[{"name": "stop", "arguments": {}}]'


GRANITE = ("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n")


SEED = ("<seed:bos>assistant\n", "<seed:eos>")


SEED_CALL = QWEN_CALL.replace("tool_call>", "seed:tool_call>")


HUNYUAN = (f"<{BAR}hy_Assistant:{HY}{BAR}>", f"<{BAR}hy_eos:{HY}{BAR}>")


HUNYUAN_CALL = (
    f"<tool_calls:{HY}>\n<tool_call:{HY}>stop<tool_sep:{HY}>\n</tool_call:{HY}>\n</tool_calls:{HY}>"
)


COHERE = ("<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>")


COMMAND_R_PLUS = ("<|CHATBOT_TOKEN|>", "\n<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>")


ACTION_CALL = (
    'Action:\n```json\n[\n    {\n        "tool_name": "stop",\n        "parameters": '
    "{}\n    }\n]```"
)


NEMOTRON = ("<SPECIAL_11>Assistant\n", "<SPECIAL_12>\n\n")


APRIEL = ("<|assistant|>\n", "\n<|end|>\n</s>")


GEMMA = ("<|turn>model\n", "<|tool_response>")


GIGACHAT = ("assistant<|role_sep|>\n", "<|message_sep|>\n\n")


FUNCTIONARY = (f"{LLAMA[0]}>>>", "<|eot_id|>")


GPT_OSS_CALL = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}<|call|>"


DEEPSEEK_4 = (f"{DEEPSEEK[0]}</think>", DEEPSEEK[1])

V31_CALL = (
    f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>stop<{BAR}tool▁sep{BAR}>{{}}<{BAR}tool▁call▁end{BAR}>"
    f"<{BAR}tool▁calls▁end{BAR}>"
)

R1_CALL = V31_CALL.replace("stop", f"function<{BAR}tool▁sep{BAR}>stop").replace(
    f"stop<{BAR}tool▁sep{BAR}>", "stop"
)
R1_CALL = R1_CALL.replace("{}", "\n```json\n{}\n```")

M2_CALL = '<minimax:tool_call>\n<invoke name="stop">\n</invoke>\n</minimax:tool_call>'

GIGACHAT_3 = '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "stop", "arguments": {}}'

GIGACHAT_31 = '<|function_call|>{"name": "stop", "arguments": {}}'

CASES = (
    marked("Qwen3.5-4B", QWEN.name, *CHATML, QWEN_CALL),
    marked("Qwen3-Coder", QWEN.name, *CHATML, QWEN_CALL),
    marked("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", HERMES.name, *CHATML, HERMES_CALL),
    marked("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", QWEN.name, *CHATML, QWEN_CALL),
    marked("Qwen-Qwen3-0.6B", HERMES.name, *CHATML, HERMES_CALL),
    marked("ibm-granite-granite-4.0", HERMES.name, *GRANITE, HERMES_CALL),
    marked("ByteDance-Seed-OSS", "Seed", *SEED, SEED_CALL, is_plain=True),
    marked("GLM-4.6", GLM, "<|assistant|>", "", GLM_CALL),
    marked("GLM-4.7-Flash", GLM, "<|assistant|></think>", "", GLM_CALL),
    marked("inclusionai-ling-3.0-flash", GLM, "<role>ASSISTANT</role>\n", "<|role_end|>", GLM_CALL),
    marked("poolside-Laguna-S-2.1", GLM, "<assistant>", "</assistant>\n", GLM_CALL),
    marked("tencent-Hy3", "Hunyuan 3", *HUNYUAN, HUNYUAN_CALL),
    marked("MiniMax-M2", "MiniMax M2", "]~b]ai\n", "[e~[\n", M2_CALL),
    marked(
        "MiniMax-M1",
        "MiniMax M1",
        "ai name=assistant\n",
        "<end_of_sentence>\n",
        HERMES_CALL.replace("l>", "ls>"),
    ),
    marked(
        "deepseek-ai-DeepSeek-V4", "DeepSeek 4", *DEEPSEEK_4, DSML_CALL.replace("X", "tool_calls")
    ),
    marked(
        "deepseek-ai-DeepSeek-V3.2",
        "DeepSeek 3.2",
        *DEEPSEEK_4,
        DSML_CALL.replace("X", "function_calls"),
    ),
    marked("deepseek-ai-DeepSeek-V3.1", "DeepSeek 3.1", *DEEPSEEK, V31_CALL),
    marked(
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "DeepSeek R1",
        DEEPSEEK[0],
        DEEPSEEK[1] + DEEPSEEK[0],
        R1_CALL,
    ),
    marked("moonshotai-Kimi-K2", "Kimi K2", *KIMI, KIMI_CALL),
    marked("Kimi-K2-Thinking", "Kimi K2", *KIMI, KIMI_CALL),
    marked("upstage-Solar-Open-100B", "Solar", "<|begin|>assistant", "", SOLAR_CALL),
    marked("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "Command-R", *COHERE, COHERE_CALL),
    marked("Cohere2MoE", "Command-R", *COHERE, COHERE_CALL),
    marked("NVIDIA-Nemotron-Nano-v2", "Nemotron 2", *NEMOTRON, f"<TOOLCALL>{STOP_LIST}</TOOLCALL>"),
    marked("unsloth-Apriel-1.5", "Apriel", *APRIEL, f"<tool_calls>{STOP_LIST}</tool_calls>"),
    marked(
        "LFM2.5-8B-A1B",
        "LFM2",
        *CHATML,
        "<|tool_call_start|>[stop()]<|tool_call_end|>",
        is_plain=True,
    ),
    marked(
        "google-gemma-4-31B-it",
        "Gemma 4",
        *GEMMA,
        "<|tool_call>call:stop{}<tool_call|>",
        is_plain=True,
    ),
    marked("GigaChat3.1-10B-A1.8B", "GigaChat 3.1", *GIGACHAT, GIGACHAT_31),
    marked(
        "openbmb-MiniCPM5-1B",
        "MiniCPM 5",
        *CHATML,
        '<function name="stop"></function>',
        is_plain=True,
    ),
    Family("meta-llama-Llama-3.1-8B-Instruct", LlamaFormat(), *LLAMA, LLAMA_CALL, LLAMA_MARKS),
    Family("meta-llama-Llama-3.3-70B-Instruct", LlamaFormat(), *LLAMA, LLAMA_CALL, LLAMA_MARKS),
    marked("mistralai-Mistral-Nemo-Instruct-2407", "Mistral (list)", *MISTRAL, LIST_CALL),
    marked(
        "Mistral-Small-3.2-24B-Instruct-2506", "Mistral (name and arguments)", *MISTRAL, NAMED_CALL
    ),
    marked(
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "Mistral (name and arguments)",
        *MISTRAL,
        NAMED_CALL,
    ),
    marked(
        "Apertus-8B-Instruct",
        "Apertus",
        "<|assistant_start|>",
        "",
        '<|tools_prefix|>[{"stop": {}}]<|tools_suffix|>',
    ),
    marked(
        "CohereForAI-c4ai-command-r-plus-tool_use",
        "Command R+",
        *COMMAND_R_PLUS,
        ACTION_CALL,
        is_plain=True,
    ),
    marked(
        "meetkai-functionary-medium-v3.1",
        "Functionary 3.1",
        LLAMA[0],
        "<|eom_id|>",
        "<function=stop>{}</function>",
    ),
    marked("meetkai-functionary-medium-v3.2", "Functionary 3.2", *FUNCTIONARY, "stop\n{}"),
    marked(
        "fireworks-ai-llama-3-firefunction-v2", "Firefunction", *LLAMA, f" functools{STOP_LIST}"
    ),
    marked("GigaChat3-10B-A1.8B", "GigaChat 3", *GIGACHAT, GIGACHAT_3),
    Family(
        "openai-gpt-oss-120b",
        HARMONY,
        "<|start|>assistant",
        "<|call|>",
        GPT_OSS_CALL,
        HARMONY_MARKS,
    ),
)


BY_NAME = pytest.mark.parametrize("family", CASES, ids=lambda family: family.name)


HI = {"role": "user", "content": "Hi there"}


def parse(
    form: CallFormat, text: str, tools: Tools | None = TOOLS, reply_part: ReplyPart = "start"
) -> Parsed:
    """Parse the reply whole and letter by letter, which gives the same; return it."""
    whole = parse_reply(form, [text], tools, reply_part)
    assert parse_reply(form, list(text), tools, reply_part) == whole
    return whole


def calls_of(parsed: Parsed) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in parsed[2]]


def xml(name: str, **arguments: str) -> str:
    inner = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def look_up(arguments: str) -> list[tuple[str, str]]:
    return [("look_up", arguments)]

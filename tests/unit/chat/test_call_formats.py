"""Every call format, on the real templates; each family has its own cases below."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.chat.call_formats import FORMATS, find_call_format
from pyctl.chat.call_formats.call_format import CallFormat
from pyctl.chat.call_formats.delimited_format import DelimitedFormat
from pyctl.chat.call_formats.families import FALLBACK, FAMILIES, HERMES, QWEN
from pyctl.chat.call_formats.llama3 import LlamaFormat
from pyctl.chat.call_formats.message_format import HARMONY, MessageFormat
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.constraint import reply_constraint
from pyctl.chat.replay import Replay
from pyctl.chat.reply import ParsedReply, ReplyPart
from pyctl.chat.template import Template
from pyctl.chat.tool_definitions import Tools
from tests.effort import examples
from tests.unit.chat import toy
from tests.unit.chat.accepted import accepts
from tests.unit.chat.conftest import unpacked
from tests.unit.chat.parsing import STOP_TOOL, TOOLS, Parsed, parse_reply
from tests.unit.chat.toy import ByteTokenizer, prepare

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
        if marks is None or not marks.begin or marks.is_alone:
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
DEEPSEEK_4 = (f"{DEEPSEEK[0]}</think>", DEEPSEEK[1])
DSML_CALL = (
    f"<{BAR}DSML{BAR}X>\n<{BAR}DSML{BAR}invoke "
    f'name="stop">\n</{BAR}DSML{BAR}invoke>\n</{BAR}DSML{BAR}X>'
)
V31_CALL = (
    f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>stop<{BAR}tool▁sep{BAR}>{{}}<{BAR}tool▁call▁end{BAR}>"
    f"<{BAR}tool▁calls▁end{BAR}>"
)
R1_CALL = V31_CALL.replace("stop", f"function<{BAR}tool▁sep{BAR}>stop").replace(
    f"stop<{BAR}tool▁sep{BAR}>", "stop"
)
R1_CALL = R1_CALL.replace("{}", "\n```json\n{}\n```")
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
M2_CALL = '<minimax:tool_call>\n<invoke name="stop">\n</invoke>\n</minimax:tool_call>'
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
GIGACHAT_3 = '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "stop", "arguments": {}}'
GIGACHAT_31 = '<|function_call|>{"name": "stop", "arguments": {}}'
FUNCTIONARY = (f"{LLAMA[0]}>>>", "<|eot_id|>")
GPT_OSS_CALL = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}<|call|>"
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
NOISE = (
    "\n",
    " ",
    "<",
    "[",
    "]",
    "{",
    "}",
    '"',
    "\\",
    ",",
    ":",
    "é",
    "7",
    "null",
    "x",
    "<think>",
    "</think>",
    "text",
)


def parse(
    form: CallFormat, text: str, tools: Tools | None = TOOLS, reply_part: ReplyPart = "start"
) -> Parsed:
    """Parse the reply whole and letter by letter, which gives the same; return it."""
    whole = parse_reply(form, [text], tools, reply_part)
    assert parse_reply(form, list(text), tools, reply_part) == whole
    return whole


def calls_of(parsed: Parsed) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in parsed[2]]


@BY_NAME
def test_the_format_is_found_by_rendering(family: Family) -> None:
    template = family.template()
    assert find_call_format(template).name == family.form.name


@pytest.mark.parametrize("name", ["Kimi-K3", "MiniMax-M3", "muse-glimmer"])
def test_calls_of_an_unknown_format_are_rendered_and_come_as_text(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    chat = ChatFormat(Template(unpacked(f"templates/{name}.jinja").read_text()), ByteTokenizer(()))
    assert chat.dialect.call_format is FALLBACK
    assert "unknown format of the chat template" in caplog.text
    call = {"type": "function", "id": "a", "function": {"name": "stop", "arguments": "{}"}}
    asked = [
        HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {**HI, "role": "tool", "tool_call_id": "a"},
    ]
    turn = prepare(chat, asked, tools=[{"type": "function", "function": STOP_TOOL}])
    reply = turn.text[turn.text.index(HI["content"]) + 2 : turn.text.rindex(HI["content"])]
    assert "stop" in reply
    splitter = turn.splitter()
    parsed = ParsedReply()
    for delta in (splitter.feed(reply), splitter.finish()):
        parsed.add(delta)
    assert (parsed.content.strip(), parsed.calls) == (reply.strip(), [])


def test_a_template_without_calls_has_the_fallback() -> None:
    assert find_call_format(Template(toy.LLAMA3)) is FALLBACK


def test_every_format_is_tested() -> None:
    assert {form.name for form in FORMATS} - {"Granite 3"} == {family.form.name for family in CASES}


LITERALS = ("true", "false", "null")  # in a text without quotes they are no words
PLAIN = st.text(st.characters(categories=("Ll",)), min_size=1, max_size=6).filter(
    lambda text: text not in LITERALS
)
KEYS = {False: st.text(max_size=4), True: PLAIN}


def arguments_of(*, is_plain: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Return arguments of a call; with ``is_plain`` nothing in them would need an escape."""
    others = st.booleans() | st.none()
    words = (
        PLAIN
        if is_plain
        else st.text(max_size=30).filter(lambda text: "</" not in text and "<|" not in text)
    )
    inner = PLAIN if is_plain else st.text(max_size=5)
    return st.fixed_dictionaries(
        {},
        optional={
            "text": words,
            "count": st.integers(-(10**12), 10**12),
            "deep": st.booleans(),
            "where": st.dictionaries(KEYS[is_plain], st.integers() | inner, max_size=3),
            "tags": st.lists(others | inner, max_size=4),
        },
    )


def reply_of(family: Family, arguments: dict[str, Any], n_calls: int) -> str:
    """Return the reply with these calls, as the template renders it."""
    given = arguments if family.template().capabilities.object_arguments else json.dumps(arguments)
    call = {
        "type": "function",
        "id": "Ab3dEf7hI",
        "function": {"name": "look_up", "arguments": given},
    }
    message = {"role": "assistant", "content": "", "tool_calls": [call] * n_calls}
    tools = [{"type": "function", "function": STOP_TOOL}]
    text = family.template().render([HI, message], tools=tools, add_generation_prompt=False)
    reply = text[text.index(family.header, text.rindex(HI["content"])) + len(family.header) :]
    reply = reply[: reply.rindex(family.end)] if family.end else reply
    return reply.lstrip("\n")


@BY_NAME
@settings(max_examples=examples(20))
@given(st.data())
def test_every_rendered_call_parses_back(family: Family, data: st.DataObject) -> None:
    capabilities = family.template().capabilities
    arguments = data.draw(arguments_of(is_plain=family.is_plain))
    n_calls = data.draw(st.integers(1, 3 if capabilities.parallel_calls else 1))
    parsed = parse(family.form, reply_of(family, arguments, n_calls))
    assert calls_of(parsed) == [("look_up", arguments)] * n_calls
    assert parsed[1].strip() == ""


QUOTED = (
    "don't",
    'it\'s "so"',
    "a', b='c",
    "'",
    '"',
    "''",
    "'a'",
    "dogs' bones",
    "x'y'",
    'a", "b": "c',
    "f(x='1')",
    "it's (so)",
)


@BY_NAME
@pytest.mark.parametrize("text", QUOTED)
@pytest.mark.parametrize("others", [{}, {"count": 3}])
def test_quotes_within_a_value_are_a_part_of_it(
    family: Family, text: str, others: dict[str, Any]
) -> None:
    """Quotes within a value are read as the template writes them, also where the template escapes
    nothing.
    """
    if family.name == "CohereForAI-c4ai-command-r-plus-tool_use" and '"' in text:
        pytest.skip("its template writes JSON without escapes, which no reader can understand")
    arguments = {"text": text, **others}
    assert calls_of(parse(family.form, reply_of(family, arguments, 1))) == [("look_up", arguments)]


@BY_NAME
@settings(max_examples=examples(60))
@given(st.data())
def test_any_cutting_gives_the_same(family: Family, data: st.DataObject) -> None:
    noise = st.lists(
        st.sampled_from((*NOISE, *family.marks)) | st.text(max_size=3), max_size=10
    ).map("".join)
    cut_off = st.integers(0, len(family.call)).map(lambda size: family.call[:size])
    text = "".join(data.draw(st.lists(noise | cut_off | st.just(family.call), max_size=4)))
    reply_part: ReplyPart = data.draw(st.sampled_from(("start", "reasoning", "content")))
    tools = data.draw(st.sampled_from((TOOLS, Tools(TOOLS.tools, parallel=False), None)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(family.form, text, tools, reply_part)
    assert parse_reply(family.form, pieces, tools, reply_part) == whole
    if not whole[2] and reply_part == "content" and not isinstance(family.form, MessageFormat):
        assert whole[1] == text


@BY_NAME
@settings(max_examples=examples(20))
@given(text=st.lists(st.sampled_from(NOISE) | st.text(max_size=8), max_size=10).map("".join))
def test_what_has_no_marks_is_content_but_for_the_blanks_before_it(
    family: Family, text: str
) -> None:
    marks = ["<think>", *(mark for mark in family.marks if mark.lstrip()[0] in "<[")]
    for tools in (TOOLS, None):
        if text.strip() and not any(mark in text for mark in marks):
            kept = text if isinstance(family.form, MessageFormat) else text.lstrip()
            assert parse(family.form, text, tools) == ("", kept, [])


@BY_NAME
def test_a_call_behind_reasoning_and_one_that_is_cut_off(family: Family) -> None:
    tags = family.form.reasoning[0]
    reasoning, content, calls = parse(
        family.form, f"{tags.open}hm{tags.close}{tags.next_message}{family.call}"
    )
    assert (reasoning, content.strip(), calls) == ("hm", "", [("stop", "{}")])
    begun = family.call.replace("{}", '{"a": [1, "b')
    if begun != family.call and not family.is_plain:
        assert parse(family.form, begun.partition("b")[0] + "b")[2] in (
            [("stop", '{"a": [1, "b')],
            [],
        )


@BY_NAME
def test_a_forced_call_is_bound_to_the_form_that_is_read(family: Family) -> None:
    form = family.form
    call = family.call.removesuffix("<|call|>")
    stop = Tools(TOOLS.tools[1:], parallel=False, forced=True)
    assert accepts(form.constraint(stop, form.reasoning[0], "content"), call)
    assert not accepts(
        form.constraint(stop, form.reasoning[0], "content"), call.replace("stop", "other")
    )
    tags = form.reasoning[0]
    behind = form.constraint(stop, tags, "start")
    assert accepts(behind, f"{tags.open}hm{tags.close}{tags.next_message}{call}")
    assert accepts(behind, call)
    optional = form.constraint(Tools(stop.tools, parallel=False), tags, "start")
    assert any(re.search(trigger, family.call) for trigger in optional.triggers)
    if form is HARMONY:
        return  # whose replies end with a call
    twice = f"{call}\n{call}" if isinstance(form, LlamaFormat) else family.twice
    assert len(parse(form, twice)[2]) == 2
    assert accepts(form.constraint(Tools(stop.tools, forced=True), tags, "content"), twice)


OTHER_WORDS = {
    "ByteDance-Seed-OSS": "writes objects as Python does",
    "openbmb-MiniCPM5-1B": "writes objects as Python does",
    "openai-gpt-oss-120b": "writes the recipient before the channel",
}
"""Templates that write calls in other words than the model is bound to."""


@BY_NAME
def test_a_grammar_takes_what_the_template_writes(family: Family) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "where": {"type": "object"},
            "tags": {"type": "array"},
        },
        "required": ["text"],
    }
    tool = {"type": "function", "function": {"name": "look_up", "parameters": parameters}}
    tags = family.form.tags(family.template().source)
    bound = family.form.constraint(Tools.of([tool], parallel=True, forced=True), tags, "content")

    def taken(arguments: dict[str, Any]) -> bool:
        reply = re.sub(
            rf"^\s*{re.escape(tags.open)}\s*{re.escape(tags.close)}\s*",
            "",
            reply_of(family, arguments, 1),
        )
        return accepts(bound, reply.strip("\n"))

    whole = {"text": "Paris", "count": 3, "where": {"a": 1, "b": "x"}, "tags": [1, "x"]}
    assert taken(whole) is (family.name not in OTHER_WORDS)
    assert taken({"text": "Paris"}) is (family.name != "openai-gpt-oss-120b")
    assert not taken({"count": 3})


NEED_CALLS = {
    "MiniMax-M2": ("]~!b[", "]~b]", "[e~["),
    "openai-gpt-oss-120b": (
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ),
}
"""Templates that refuse a result without a call before it, and special tokens of their models."""


@BY_NAME
def test_a_reply_that_calls_goes_back_into_the_prompt_as_it_was_sampled(family: Family) -> None:
    start = family.header.removesuffix(">>>").strip().removesuffix("</think>")
    chat = ChatFormat(
        family.template(), ByteTokenizer(NEED_CALLS.get(family.name, (start,))), replay=Replay()
    )
    if not chat.dialect.marks.replay.n_bytes and chat.dialect.starts == ():
        pytest.skip("nothing begins a message here")
    tools = [{"type": "function", "function": STOP_TOOL}]
    turn = prepare(chat, [HI], tools=tools)
    reasons = turn.rendered.reply_part == "reasoning"
    sampled = (f"hm{chat.dialect.tags.close}" if reasons else "") + family.call + " "
    said = toy.told(turn, sampled)
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["stop"]
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "done"}
    following = prepare(chat, [HI, said, result], tools=tools).prompt.tokens.tolist()
    before = [*turn.prompt.tokens.tolist(), *sampled.encode()]
    assert following[: len(before)] == before


@pytest.mark.parametrize("name", NEED_CALLS)
def test_a_whole_chain_of_calls_stays_as_it_was_sampled(name: str) -> None:
    family = next(each for each in CASES if each.name == name)
    chat = ChatFormat(family.template(), ByteTokenizer(NEED_CALLS[name]), replay=Replay())
    tools = [{"type": "function", "function": STOP_TOOL}]
    last = {"openai-gpt-oss-120b": "<|channel|>final<|message|>Well"}.get(
        name, f"hm{chat.dialect.tags.close}Well"
    )
    calls = family.call if isinstance(family.form, MessageFormat) else family.twice
    messages = [HI]
    before = list[int]()
    for sampled in (family.call, calls, last, last):
        turn = prepare(chat, messages, tools=tools, parallel_tool_calls=True)
        tokens = turn.prompt.tokens.tolist()
        assert tokens[: len(before)] == before
        if turn.rendered.reply_part == "reasoning" and chat.dialect.tags.close not in sampled:
            sampled = f"so{chat.dialect.tags.close}{sampled}"
        said = toy.told(turn, sampled)
        before = [*tokens, *sampled.encode()]
        calls_said = said.get("tool_calls", ())
        messages += [
            said,
            *({"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls_said),
        ]
        messages += [] if calls_said else [HI]


def test_content_by_a_schema_comes_on_its_channel() -> None:
    (tags,) = HARMONY.reasoning
    bound = reply_constraint({"type": "integer"}, tags, "start")
    assert accepts(bound, "<|channel|>final<|message|>42")
    assert accepts(bound, f"{tags.open}hm<|end|><|start|>assistant<|channel|>final<|message|>42")
    assert not accepts(bound, "42")
    assert accepts(reply_constraint({"type": "integer"}, tags, "content"), "42")


def xml(name: str, **arguments: str) -> str:
    inner = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def look_up(arguments: str) -> list[tuple[str, str]]:
    return [("look_up", arguments)]


class TestQwen:
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            (xml("look_up", text="a\nb"), "", look_up('{"text":"a\\nb"}')),
            ("Let me see.\n\n" + QWEN_CALL + "\n", "Let me see.\n\n", [("stop", "{}")]),
            ("\n\n" + QWEN_CALL + "\n" + QWEN_CALL, "", [("stop", "{}"), ("stop", "{}")]),
            (QWEN_CALL + "\nAnd so on.", "\nAnd so on.", [("stop", "{}")]),
            (
                xml("look_up", count="3", ratio=" 1.5 ", deep="True"),
                "",
                look_up('{"count":3,"ratio":1.5,"deep":true}'),
            ),
            (xml("look_up", count="three"), "", look_up('{"count":"three"}')),
            (xml("look_up", count="NaN"), "", look_up('{"count":"NaN"}')),
            (
                xml("look_up", text="3", free="3", maybe="3"),
                "",
                look_up('{"text":"3","free":3,"maybe":"3"}'),
            ),
            (
                xml("look_up", maybe="null", text="null"),
                "",
                look_up('{"maybe":null,"text":"null"}'),
            ),
            (
                xml("look_up", where="{'a': \"it's\", 'b': None}"),
                "",
                look_up('{"where":{"a": "it\'s", "b": null}}'),
            ),
            (xml("look_up", tags='["a",\n 1]'), "", look_up('{"tags":["a",\n 1]}')),
            (xml("look_up", unknown="x"), "", look_up('{"unknown":"x"}')),
            (xml("other", a="x"), "", [("other", '{"a":"x"}')]),
            (xml("look_up", text=""), "", look_up('{"text":""}')),
            (xml("look_up", text="\n x \n"), "", look_up('{"text":"\\n x \\n"}')),
            (
                xml("look_up", text="a\n</parameter>\nb </function>"),
                "",
                look_up('{"text":"a\\n</parameter>\\nb </function>"}'),
            ),
            (xml("look_up", text="</parameter>"), "", look_up('{"text":"</parameter>"}')),
            (
                "<tool_call><function=look_up><parameter=text>a</parameter></function></tool_call>",
                "",
                look_up('{"text":"a"}'),
            ),
            (
                "<function=look_up>\n<parameter=text>\n</parameter>\n</function>",
                "",
                look_up('{"text":""}'),
            ),
            (
                "<function=look_up>\n<parameter=text>\na\n</parameter>\n</tool_call>",
                "",
                look_up('{"text":"a"}'),
            ),
            # no head: content, byte for byte
            (
                "#include <functional>\n<function=other>",
                "#include <functional>\n<function=other>",
                [],
            ),
            ("<tool_call>\nno\n</tool_call>", "<tool_call>\nno\n</tool_call>", []),
            ("<tool_call>\n<function=look up>", "<tool_call>\n<function=look up>", []),
            (" \n<tool_call>\n<funct", " \n<tool_call>\n<funct", []),
            ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
            ('<tool_call>{"name": "a", "arg', '<tool_call>{"name": "a", "arg', []),
            ("<tool_call>" + QWEN_CALL, "<tool_call>", [("stop", "{}")]),
            # what ends within, or goes astray
            ("<tool_call>\n<function=look_up>\n<parameter=text>\nab", "", look_up('{"text":"ab')),
            ("<tool_call>\n<function=look_up>\n<parameter=count>\n12", "", look_up('{"count":12')),
            (
                "<tool_call>\n<function=look_up>\n<parameter=text>\nab\n</parameter>\n",
                "",
                look_up('{"text":"ab"'),
            ),
            ("<tool_call>\n<function=look_up>\n<param", "", [("look_up", "")]),
            ("<tool_call>\n<function=look_up>\nhm", "\nhm", [("look_up", "{}")]),
            # JSON
            (
                (
                    '<tool_call>\n{"name": "look_up", "arguments": {"text": '
                    '"}\\"</tool_call>"}}\n</tool_call>'
                ),
                "",
                look_up('{"text": "}\\"</tool_call>"}'),
            ),
            (
                '<tool_call>{"name":"stop","arguments":{}}</tool_call>' * 2,
                "",
                [("stop", "{}"), ("stop", "{}")],
            ),
            (
                '<tool_call>{"arguments": {"a": [1]}, "name": "stop"}</tool_call>',
                "",
                [("stop", '{"a": [1]}')],
            ),
            (
                '<tool_call>{"name": "stop", "arguments": "{\\"a\\": 1}"}</tool_call>',
                "",
                [("stop", '{"a": 1}')],
            ),
            ('<tool_call>{"name": "stop"}</tool_call>', "", [("stop", "{}")]),
            ('<tool_call>{"name": "stop", "arguments": {"a": "b', "", [("stop", '{"a": "b')]),
            ('<tool_call>{"name": "stop", "arguments": {}}', "", [("stop", "{}")]),
            ('<tool_call>["stop"]</tool_call>', '<tool_call>["stop"]</tool_call>', []),
        ],
    )
    def test_replies(self, text: str, content: str, calls: list[tuple[str, str]]) -> None:
        assert parse(QWEN, text, reply_part="content") == ("", content, calls)

    def test_reasoning_comes_first_and_holds_no_calls(self) -> None:
        text = f"I could {QWEN_CALL[1:]}\n</think>\n\nWell\n{QWEN_CALL}"
        assert parse(QWEN, text, reply_part="reasoning") == (
            f"I could {QWEN_CALL[1:]}\n",
            "Well\n",
            [("stop", "{}")],
        )
        assert parse(QWEN, f"hm\n{QWEN_CALL}", reply_part="reasoning") == (
            "hm\n",
            "",
            [("stop", "{}")],
        )

    def test_without_parallel_calls_only_the_first_is_one(self) -> None:
        one = Tools(TOOLS.tools, parallel=False)
        assert parse(QWEN, QWEN_CALL + "\n" + QWEN_CALL, one) == (
            "",
            "\n" + QWEN_CALL,
            [("stop", "{}")],
        )

    def test_arguments_come_out_as_soon_as_they_are_certain(self) -> None:
        parser = QWEN.call_parser(TOOLS)
        parser.feed("<tool_call>\n<function=look_up>\n<parameter=text>\n")
        assert [call.arguments for call in parser.feed("Hello ").calls] == ['"Hello ']
        assert parser.feed("\n</para").calls == ()
        assert [call.arguments for call in parser.feed("graph>").calls] == ["\\n</paragraph>"]


class TestLlama:
    form = LlamaFormat()

    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            (
                '\n{"name": "look_up", "parameters": {"text": "}"}}',
                "",
                [("look_up", {"text": "}"})],
            ),
            ('{"type": "function", "name": "stop", "parameters": {}}', "", [("stop", {})]),
            ('{"name": "stop", "arguments": {"a": 1}}', "", [("stop", {"a": 1})]),
            ('<|python_tag|>{"name": "stop", "parameters": {}}', "", [("stop", {})]),
            (f"{LLAMA_CALL}; {LLAMA_CALL}\n{LLAMA_CALL}", "", [("stop", {})] * 3),
            # content: an unknown function, JSON that is an answer, a call in the middle of a
            # sentence
            ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
            ('{"answer": 42}', '{"answer": 42}', []),
            (f"I say {LLAMA_CALL}", f"I say {LLAMA_CALL}", []),
            ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ],
    )
    def test_replies(self, text: str, content: str, calls: list[Any]) -> None:
        parsed = parse(self.form, text)
        assert (parsed[1], calls_of(parsed)) == (content, calls)

    def test_json_that_is_no_call_is_not_held_back_for_long(self) -> None:
        parser = self.form.call_parser(TOOLS)
        assert parser.feed('{"an').content == '{"an'
        text = '{"type": "' + "x" * 10_000
        held = self.form.call_parser(TOOLS)
        assert len("".join(held.feed(piece).content for piece in text)) > 5_000

    def test_arguments_come_out_as_they_stream(self) -> None:
        parser = self.form.call_parser(TOOLS)
        parser.feed('{"name": "look_up", "parameters": {"text": "a')
        assert [call.arguments for call in parser.feed("bc").calls] == ["bc"]


class TestMistral:
    form = next(form for form in FAMILIES if form.name == "Mistral (name and arguments)")

    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            ('Well.[TOOL_CALLS]look_up[ARGS]{"text": "]"}', "Well.", [("look_up", {"text": "]"})]),
            ("[TOOL_CALLS]stop[CALL_ID]Ab3dEf7hI[ARGS]{}", "", [("stop", {})]),
            ("[TOOL_CALLS]stop{}", "", [("stop", {})]),
            (NAMED_CALL * 2, "", [("stop", {})] * 2),
            (LIST_CALL, "", [("stop", {})]),
            ('[TOOL_CALLS] [{"name": "stop", "arguments": {}}]', "", [("stop", {})]),
            ('[TOOL_CALLS][{"arguments": {"a": 1}, "name": "stop"}]', "", [("stop", {"a": 1})]),
            (
                LIST_CALL[:-1] + ', {"name": "stop", "arguments": {"b": 2}}] so',
                " so",
                [("stop", {}), ("stop", {"b": 2})],
            ),
            ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
            ("[TOOL_CALLS]what is this", "[TOOL_CALLS]what is this", []),
            ("a [list] of [TOOL", "a [list] of [TOOL", []),
        ],
    )
    def test_replies(self, text: str, content: str, calls: list[Any]) -> None:
        parsed = parse(self.form, text)
        assert (parsed[1], calls_of(parsed)) == (content, calls)

    def test_calls_get_ids_that_the_templates_take(self) -> None:
        (given,) = (
            self.form.call_parser(TOOLS).feed("[TOOL_CALLS]stop[CALL_ID]0123abcDE[ARGS]{").calls[:1]
        )
        (made,) = self.form.call_parser(TOOLS).feed("[TOOL_CALLS]stop[ARGS]{").calls[:1]
        assert given.id == "0123abcDE"
        assert len(made.id) == 9
        assert made.id.isalnum()


class TestHarmony:
    form = HARMONY

    @pytest.mark.parametrize(
        ("text", "parsed"),
        [
            ("<|channel|>final<|message|>Hi", ("", "Hi", [])),
            (
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
                ("hm", "Hi", []),
            ),
            (
                ' to=functions.stop<|channel|>commentary json<|message|>{"a": 1}<|call|>',
                ("", "", [("stop", '{"a": 1}')]),
            ),
            (
                "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
                "<|channel|>commentary<|message|>I look.<|end|>"
                "<|start|>assistant<|channel|>commentary to=functions.stop "
                "<|constrain|>json<|message|>{}<|call|>",
                ("a", "I look.", [("stop", "{}")]),
            ),
            (
                "<|channel|>commentary to=functions.stop<|message|><|call|>",
                ("", "", [("stop", "{}")]),
            ),
            ("<|channel|>commentary to=functions.stop<|message|>", ("", "", [("stop", "")])),
            ("<|message|>Hi", ("", "Hi", [])),
            ("Hi", ("", "Hi", [])),
            ("<|channel|>fin", ("", "<|channel|>fin", [])),
            ("<|channel|>" + "x" * 500, ("", "<|channel|>" + "x" * 500, [])),
            ("a<|end|><|start|>user<|message|>b", ("", "a<|start|>user<|message|>b", [])),
            (
                "<|channel|>commentary to=python<|message|>1",
                ("", "<|channel|>commentary to=python<|message|>1", []),
            ),
        ],
    )
    def test_replies(self, text: str, parsed: Parsed) -> None:
        assert parse(self.form, text) == parsed

    def test_without_tools_a_call_is_content_and_without_tags_reasoning_is(self) -> None:
        call = "<|channel|>commentary to=functions.stop<|message|>{}"
        assert parse(self.form, call, None) == ("", call, [])
        raw = self.form.parser(None, None, "start")
        text = (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
        )
        assert raw.feed(text).content + raw.finish().content == "<|channel|>analysis<|message|>hmHi"

    def test_what_is_continued_begins_in_its_part(self) -> None:
        assert parse(self.form, "on<|return|>", reply_part="content") == ("", "on", [])
        assert parse(
            self.form, "on<|end|><|start|>assistant<|message|>a", reply_part="reasoning"
        ) == ("on", "a", [])

    def test_reasoning_before_a_call_goes_back_into_the_prompt(self) -> None:
        template = Template(unpacked("templates/openai-gpt-oss-120b.jinja").read_text())
        chat = ChatFormat(
            template, ByteTokenizer(("<|start|>", "<|end|>", "<|return|>"), eos="<|return|>")
        )
        call = {"type": "function", "function": {"name": "stop", "arguments": "{}"}}
        answer = {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [call],
        }
        text = prepare(
            chat, [HI, answer, {"role": "tool", "tool_call_id": "x", "content": "done"}]
        ).text
        assert (
            "<|start|>assistant<|channel|>analysis<|message|>hm<|end|><|start|>assistant "
            "to=functions.stop"
        ) in text


class TestFunctionary:
    form = next(form for form in FAMILIES if form.name == "Functionary 3.2")

    @pytest.mark.parametrize(
        ("text", "parsed"),
        [
            ("all\nHi", ("", "Hi", [])),
            ("Hi", ("", "Hi", [])),
            (
                'look_up\n{"text": ">>>stop\\n{}"}',
                ("", "", [("look_up", '{"text": ">>>stop\\n{}"}')]),
            ),
            ("stop\n{}>>>stop\n{}", ("", "", [("stop", "{}")] * 2)),
            ("all\nI look.>>>stop\n{}", ("", "I look.", [("stop", "{}")])),
            # content: Python's prompt, and a function that is none
            ("all\n>>> x = {1: 2}", ("", ">>> x = {1: 2}", [])),
            ("all\n>>>x\n{1: 2}", ("", ">>>x\n{1: 2}", [])),
        ],
    )
    def test_replies(self, text: str, parsed: Parsed) -> None:
        assert parse(self.form, text) == parsed

    def test_without_tools_the_mark_of_content_goes(self) -> None:
        assert parse(self.form, "all\nHi >>> you", None) == ("", "Hi >>> you", [])

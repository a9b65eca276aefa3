"""pyctl reads tool calls in replies as llama-server's own parser does, for every family of models.

A small program, built against the libraries beside llama-server, reads each reply with the
template. Runs where LLAMA_SERVER names the binary, as the rest of the contract.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyctl.chat.call_formats import find_call_format
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.reply import ParsedReply
from pyctl.chat.template import Template
from tests.unit.chat.families import CASES, HI, Family
from tests.unit.chat.toy import ByteTokenizer, prepare

LLAMA_SERVER = os.environ.get("LLAMA_SERVER", "")
ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "vendor" / "llama.cpp"
TEMPLATES = HEADERS / "models" / "templates"
MARK = "pyctl-said"
PROPERTIES: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "deep": {"type": "boolean"},
    "where": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    "tags": {"type": "array", "items": {"type": "string"}},
}


def tools_of(properties: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    def tool(name: str, properties: dict[str, dict[str, Any]]) -> dict[str, Any]:
        described = {key: {**schema, "description": ""} for key, schema in properties.items()}
        parameters = {"type": "object", "properties": described, "required": []}
        return {
            "type": "function",
            "function": {"name": name, "description": "", "parameters": parameters},
        }

    return [tool("look_up", properties), tool("stop", {})]


TOOLS = tools_of(PROPERTIES)
SIMPLE = tools_of({key: PROPERTIES[key] for key in ("text", "count", "deep")})


def tools_for(family: Family) -> list[dict[str, Any]]:
    """llama-server makes no parser of the template of Command R+ where a tool takes an object."""
    return SIMPLE if family.form.name == "Command R+" else TOOLS


REASONS = (
    (
        "Qwen|Seed|MiniCPM",
        r">\s*(True|False|[\[{].*')",
        (
            "values as Python writes them are read, which these templates write; llama-server "
            "reads "
            "no call"
        ),
    ),
    (
        "MiniMax M[12]",
        "look_up.*look_up",
        "llama-server refuses two calls as the template writes them",
    ),
    ("Solar|Mistral .name", "look_up", "llama-server refuses every call as the template writes it"),
    ("Functionary 3.2", ">>>", "llama-server takes a second call for content, or refuses it"),
    (
        "Apriel-1.6",
        "",
        (
            "llama-server counts the words that the template opens reasoning with, and reads no "
            "call "
            "there"
        ),
    ),
    ("Command R\\+", "^(Just|Let me|<think>)", "llama-server takes nothing but calls"),
    ("rwkv", "</think>", "the prompt opens reasoning, which llama-server leaves in the content"),
    (
        "Llama 3",
        "^Let me see",
        "JSON is a call only where the message begins, so that an answer may show it",
    ),
)
"""(formats or templates, replies, why pyctl reads a call where llama-server does not, or the other
way round).
"""
CONTENT = {
    "Cohere2MoE": ("<|START_TEXT|>", "<|END_TEXT|>"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "meetkai-functionary-medium-v3.2": ("all\n", ""),
    "openai-gpt-oss-120b": ("<|channel|>final<|message|>", ""),
}
"""Text around content, by template; such a reply has content or calls."""
WORDS = ("a", "Paris", "x y", "two\nlines", "é", "a < b", "3", "true", "")


@pytest.fixture(scope="module")
def parser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Yield the program, which waits for a line."""
    if (
        not LLAMA_SERVER
        or shutil.which("c++") is None
        or not (HEADERS / "common" / "chat.h").is_file()
    ):
        pytest.skip(
            "LLAMA_SERVER does not name a llama-server to compare with, or nothing can be built "
            "against it"
        )
    libraries = Path(LLAMA_SERVER).resolve().parent
    program = tmp_path_factory.mktemp("parser") / "parse_replies"
    includes = [f"-I{HEADERS / name}" for name in ("common", "include", "ggml/include")]
    names = [f"-l{name}" for name in ("llama-common", "llama", "ggml", "ggml-base")]
    source = Path(__file__).with_name("parse_replies.cpp")
    command = ["c++", "-std=c++17", *includes, str(source), "-o", str(program)]
    subprocess.run(
        [*command, f"-L{libraries}", *names, f"-Wl,-rpath,{libraries}"], check=True, timeout=120
    )
    with subprocess.Popen(
        [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def family_of(name: str) -> Family:
    """Return the family with this template: one of CASES, or the one that a rendered message
    shows.
    """
    if found := next((family for family in CASES if family.name == name), None):
        return found
    template = Template((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), "<s>", "</s>")
    form = find_call_format(template)
    said = template.render(
        [HI, {"role": "assistant", "content": MARK}], tools=TOOLS, add_generation_prompt=False
    )
    between = said[said.rindex(HI["content"]) + len(HI["content"]) : said.index(MARK)]
    asked = template.render([HI], tools=TOOLS, add_generation_prompt=True)
    header = asked[asked.rindex(HI["content"]) + len(HI["content"]) :].partition(
        form.tags(template.source).open
    )[0]
    header = header if header and between.startswith(header) else between
    return Family(name, form, header, said[said.index(MARK) + len(MARK) :].strip(), "")


def lender_of(family: Family) -> Family:
    """Return the family itself, or where its template writes no calls another one that writes them
    in this form.
    """
    if family.template().capabilities.tool_calls:
        return family
    return next((each for each in CASES if each.form is family.form), family)


def replies(family: Family) -> Iterator[tuple[str, str]]:
    """Yield (kind, reply) of this family: calls as its template writes them, and what may stand
    around them.
    """
    chosen = random.Random(0)
    capabilities = family.template().capabilities
    words = [word for word in WORDS if word.isalpha()] if family.is_plain else list(WORDS)

    known = tools_for(family)

    def arguments() -> dict[str, Any]:
        whole = {
            "text": chosen.choice(words),
            "count": chosen.randrange(-5, 100),
            "deep": chosen.random() < 0.5,
            "where": {"a": chosen.randrange(9), "b": chosen.choice(words)},
            "tags": ["x", chosen.choice(words)],
        }
        drawn = {key: whole[key] for key in whole if chosen.random() < 0.6}
        return {
            key: value
            for key, value in drawn.items()
            if key in known[0]["function"]["parameters"]["properties"]
        }

    lender = lender_of(family)
    calls = lender.template().capabilities.tool_calls
    for _ in range(6 * calls):
        yield "call", rendered(lender, [arguments()])
    if capabilities.parallel_calls:
        yield "calls", rendered(lender, [arguments(), arguments()])
    opens, closes = CONTENT.get(family.name, ("", ""))
    if calls and not opens:
        yield "content before", "Let me see." + rendered(lender, [arguments()])
    yield "content", f"{opens}Just an answer.{closes}"
    tags = family.form.tags(family.template().source)
    if tags.is_known and calls:
        yield (
            "reasoning",
            f"{tags.open}hm{tags.close}{tags.next_message}" + rendered(lender, [arguments()]),
        )
    if tags.is_known:
        yield (
            "reasoning and content",
            f"{tags.open}hm{tags.close}{tags.next_message}{opens}Well.{closes}",
        )


def rendered(family: Family, arguments: list[dict[str, Any]]) -> str:
    """Return calls with these arguments as the family's template writes them, without the header
    and the end of the message.
    """
    as_object = family.template().capabilities.object_arguments
    calls = [
        {
            "type": "function",
            "id": f"Ab3dEf7h{index}",
            "function": {"name": "look_up", "arguments": each if as_object else json.dumps(each)},
        }
        for index, each in enumerate(arguments)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    tools = tools_for(family)
    text = family.template().render([HI, message], tools=tools, add_generation_prompt=False)
    reply = text[text.index(family.header, text.rindex(HI["content"])) + len(family.header) :]
    reply = reply[: reply.rindex(family.end)] if family.end and family.end in reply else reply
    tags = family.form.tags(family.template().source)
    return re.sub(rf"^\s*{re.escape(tags.open)}\s*{re.escape(tags.close)}\s*", "", reply).lstrip(
        "\n"
    )


def ask(
    parser: subprocess.Popen[str], family: Family, texts: list[str], tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    assert parser.stdin is not None
    assert parser.stdout is not None
    body = {"template": family.template().source, "tools": tools, "replies": texts}
    parser.stdin.write(json.dumps(body) + "\n")
    parser.stdin.flush()
    while not (line := parser.stdout.readline()).startswith(("[{", "[]", '{"error"')):
        assert line, "the program ended"  # what the library prints comes in between
    answer: list[dict[str, Any]] = json.loads(line)
    assert isinstance(answer, list), answer
    return answer


def ours(chat: ChatFormat, text: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    turn = prepare(chat, [HI], tools=tools)
    splitter = turn.splitter()
    reply = ParsedReply()
    for delta in (splitter.feed(text), splitter.finish()):
        reply.add(delta)
    calls = [{"name": call.name, "arguments": call.arguments} for call in reply.calls]
    return {"reasoning": reply.reasoning, "content": reply.content, "calls": calls}


def meaning(parsed: dict[str, Any]) -> dict[str, Any]:
    """Without blanks around texts, and arguments as values."""
    if "error" in parsed:
        return parsed
    calls = [(call["name"], json.loads(call["arguments"] or "{}")) for call in parsed["calls"]]
    return {
        "reasoning": parsed["reasoning"].strip(),
        "content": parsed["content"].strip(),
        "calls": calls,
    }


UNREAD = {"Kimi-K3", "MiniMax-M3", "muse-glimmer"}
"""Calls of these large models come as text."""


def names() -> list[str]:
    """Return every template that llama.cpp has, but for those whose calls pyctl does not read."""
    return sorted({path.stem for path in TEMPLATES.glob("*.jinja")} - UNREAD)


@pytest.mark.parametrize("name", names())
def test_replies_mean_the_same(parser: subprocess.Popen[str], name: str) -> None:
    """pyctl reads the reasoning, content and calls that llama-server reads in each reply;
    differences need an entry in REASONS, so that a client can change servers.
    """
    family = family_of(name)
    chat = ChatFormat(family.template(), ByteTokenizer(("<s>", "</s>"), bos="<s>", eos="</s>"))
    tools = tools_for(family)
    turn = prepare(chat, [HI], tools=tools)
    tags = chat.dialect.tags
    cases = [
        (what, text.removeprefix(tags.open) if turn.rendered.reply_part == "reasoning" else text)
        for what, text in replies(family)
    ]
    if turn.rendered.reply_part == "reasoning":
        cases = [
            (what, text if what.startswith("reasoning") else f"{tags.close}{text}")
            for what, text in cases
        ]
    theirs = ask(parser, family, [text for _, text in cases], tools)
    different = [
        (text, meaning(their), meaning(our))
        for (_, text), their in zip(cases, theirs, strict=True)
        if meaning(our := ours(chat, text, tools)) != meaning(their)
    ]
    known = [
        text for form, text, _ in REASONS if re.search(form, f"{family.form.name} {family.name}")
    ]
    assert [
        each for each in different if not any(re.search(text, each[0], re.DOTALL) for text in known)
    ] == []
    print(f"\n{family.name}: {len(cases) - len(different)} of {len(cases)} the same")

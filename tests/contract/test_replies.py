"""pyctl reads tool calls in replies as llama-server's own parser does, for every family of models.

A small program, built against the libraries beside llama-server, reads each reply with the template. Runs where
LLAMA_SERVER names the binary, as the rest of the contract.
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

from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.reply import ParsedReply
from tests.unit.chat.test_call_formats import CASES, HI, Family
from tests.unit.chat.toy import ByteTokenizer, prepare

LLAMA_SERVER = os.environ.get("LLAMA_SERVER", "")
ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "vendor" / "llama.cpp"
PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "deep": {"type": "boolean"},
    "where": {"type": "object"},
    "tags": {"type": "array", "items": {}},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": properties, "required": []},
        },
    }
    for name, properties in (("look_up", PROPERTIES), ("stop", {}))
]
REASONS = (
    (
        "Qwen|Seed|MiniCPM",
        r">\s*(True|False|[\[{].*')",
        "values as Python writes them are read, which these templates write; llama-server reads no call",
    ),
    ("MiniMax", "look_up.*look_up", "llama-server refuses two calls as the template writes them"),
    ("Solar|Mistral .name", "look_up", "llama-server refuses every call as the template writes it"),
    ("Llama 3", "^Let me see", "JSON is a call only where the message begins, so that an answer may show it"),
)
"""(formats, replies, why pyctl reads a call where llama-server does not, or the other way round)."""
CONTENT = {
    "Cohere2MoE": ("<|START_TEXT|>", "<|END_TEXT|>"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "Kimi-K3": ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    "openai-gpt-oss-120b": ("<|channel|>final<|message|>", ""),
}
"""What stands around content; such a reply has content or calls."""
WORDS = ("a", "Paris", "x y", "two\nlines", "é", "a < b", "3", "true", "")


@pytest.fixture(scope="module")
def parser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """The program, which waits for a line."""
    if not LLAMA_SERVER or shutil.which("c++") is None or not (HEADERS / "common" / "chat.h").is_file():
        pytest.skip("LLAMA_SERVER does not name a llama-server to compare with, or nothing can be built against it")
    libraries = Path(LLAMA_SERVER).resolve().parent
    program = tmp_path_factory.mktemp("parser") / "parse_replies"
    includes = [f"-I{HEADERS / name}" for name in ("common", "include", "ggml/include")]
    names = [f"-l{name}" for name in ("llama-common", "llama", "ggml", "ggml-base")]
    source = Path(__file__).with_name("parse_replies.cpp")
    command = ["c++", "-std=c++17", *includes, str(source), "-o", str(program)]
    subprocess.run([*command, f"-L{libraries}", *names, f"-Wl,-rpath,{libraries}"], check=True, timeout=120)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def replies(family: Family) -> Iterator[tuple[str, str]]:
    """(what it is, reply) of this family: calls as its template writes them, and what may stand around them."""
    chosen = random.Random(0)
    capabilities = family.template().capabilities
    words = [word for word in WORDS if word.isalpha()] if family.is_plain else list(WORDS)

    def arguments() -> dict[str, Any]:
        whole = {
            "text": chosen.choice(words),
            "count": chosen.randrange(-5, 100),
            "deep": chosen.random() < 0.5,
            "where": {"a": chosen.randrange(9), "b": chosen.choice(words)},
            "tags": [1, chosen.choice(words)],
        }
        return {key: whole[key] for key in whole if chosen.random() < 0.6}

    for _ in range(6):
        yield "call", rendered(family, [arguments()])
    if capabilities.parallel_calls:
        yield "calls", rendered(family, [arguments(), arguments()])
    opens, closes = CONTENT.get(family.name, ("", ""))
    if not opens:
        yield "content before", "Let me see." + rendered(family, [arguments()])
    yield "content", f"{opens}Just an answer.{closes}"
    tags = family.form.tags(family.template().source)
    if tags.is_known:
        yield "reasoning", f"{tags.open}hm{tags.close}{tags.next_message}" + rendered(family, [arguments()])
        yield "reasoning and content", f"{tags.open}hm{tags.close}{tags.next_message}{opens}Well.{closes}"


def rendered(family: Family, arguments: list[dict[str, Any]]) -> str:
    calls = [
        {"type": "function", "id": f"Ab3dEf7h{index}", "function": {"name": "look_up", "arguments": each}}
        for index, each in enumerate(arguments)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    text = family.template().render([HI, message], tools=TOOLS, add_generation_prompt=False)
    reply = text[text.index(family.header, text.rindex(HI["content"])) + len(family.header) :]
    reply = reply[: reply.rindex(family.end)] if family.end else reply
    tags = family.form.tags(family.template().source)
    return re.sub(rf"^\s*{re.escape(tags.open)}\s*{re.escape(tags.close)}\s*", "", reply).lstrip("\n")


def ask(parser: subprocess.Popen[str], family: Family, texts: list[str]) -> list[dict[str, Any]]:
    assert parser.stdin is not None
    assert parser.stdout is not None
    body = {"template": family.template().source, "tools": TOOLS, "replies": texts}
    parser.stdin.write(json.dumps(body) + "\n")
    parser.stdin.flush()
    answer: list[dict[str, Any]] = json.loads(parser.stdout.readline())
    return answer


def ours(chat: ChatFormat, text: str) -> dict[str, Any]:
    turn = prepare(chat, [HI], tools=TOOLS)
    splitter, reply = turn.splitter(), ParsedReply()
    for delta in (splitter.feed(text), splitter.finish()):
        reply.add(delta)
    calls = [{"name": call.name, "arguments": call.arguments} for call in reply.calls]
    return {"reasoning": reply.reasoning, "content": reply.content, "calls": calls}


def meaning(parsed: dict[str, Any]) -> dict[str, Any]:
    """Without blanks around texts, and arguments as values."""
    if "error" in parsed:
        return parsed
    calls = [(call["name"], json.loads(call["arguments"] or "{}")) for call in parsed["calls"]]
    return {"reasoning": parsed["reasoning"].strip(), "content": parsed["content"].strip(), "calls": calls}


@pytest.mark.parametrize("family", CASES, ids=lambda family: family.name)
def test_replies_mean_the_same(parser: subprocess.Popen[str], family: Family) -> None:
    chat = ChatFormat(family.template(), ByteTokenizer(("<s>", "</s>"), bos="<s>", eos="</s>"))
    turn = prepare(chat, [HI], tools=TOOLS)
    tags = chat.tags
    cases = [
        (what, text.removeprefix(tags.open) if turn.rendered.reply_part == "reasoning" else text)
        for what, text in replies(family)
    ]
    if turn.rendered.reply_part == "reasoning":
        cases = [(what, text if what.startswith("reasoning") else f"{tags.close}{text}") for what, text in cases]
    theirs = ask(parser, family, [text for _, text in cases])
    different = [
        (text, meaning(their), meaning(our))
        for (_, text), their in zip(cases, theirs, strict=True)
        if meaning(our := ours(chat, text)) != meaning(their)
    ]
    known = [text for form, text, _ in REASONS if re.search(form, family.form.name)]
    assert [each for each in different if not any(re.search(text, each[0], re.DOTALL) for text in known)] == []
    print(f"\n{family.name}: {len(cases) - len(different)} of {len(cases)} the same")

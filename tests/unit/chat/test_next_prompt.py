"""The certain beginning of the next prompt, found by two renderings, for every template and any
next message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyctl.chat.chat_format import ChatFormat, ChatRequest
from pyctl.chat.replay import Replay
from pyctl.chat.template import Template
from pyctl.prompt import common_prefix
from tests.functions import function
from tests.unit.chat import toy
from tests.unit.chat.conftest import unpacked
from tests.unit.chat.toy import prepare

TOOL = function("look_up", description="Looks it up.", city={"type": "string"})
SPECIALS = (
    *toy.CHATML_SPECIALS,
    *(
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[AVAILABLE_TOOLS]",
    ),
    *(
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ),
    *(
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|return|>",
        "<|call|>",
        "[SYSTEM_PROMPT]",
    ),
)
REAL = [
    "Qwen3.5-4B",
    "Qwen3-Coder",
    "Qwen-Qwen3-0.6B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "openai-gpt-oss-120b",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "mistralai-Ministral-3-14B-Reasoning-2512",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
]
TEMPLATES: dict[str, Callable[[], str]] = {
    **{name: (lambda name=name: unpacked(f"templates/{name}.jinja").read_text()) for name in REAL},  # type: ignore[misc]
    **{
        name: (lambda name=name: getattr(toy, name))
        for name in ("CHATML", "THINKING", "GEMMA", "LLAMA3", "PLAIN")
    },  # type: ignore[misc]
}
HEAD = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is the weather in Paris?"},
]
REPLIES = {
    "content": {
        "role": "assistant",
        "content": "Sunny, as always.",
        "reasoning_content": "Let me think about it.",
    },
    "call": {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": "Ab3dEf7hI",
                "function": {"name": "look_up", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
}
TEXTS = ["And in Rome?", "x", "\n0 degrees", "中文", " <b>?</b>"]


def chat_of(name: str, replay: Replay | None = None) -> ChatFormat:
    tokenizer = toy.ByteTokenizer(SPECIALS, bos="<s>", eos="</s>")
    return ChatFormat(Template(TEMPLATES[name](), eos_token="</s>"), tokenizer, replay=replay)


def following(reply: dict[str, Any], text: str) -> list[dict[str, Any]]:
    calls = reply.get("tool_calls", [])
    said = [
        {"role": "tool", "tool_call_id": call["id"], "name": "look_up", "content": text}
        for call in calls
    ]
    return said or [{"role": "user", "content": text}]


@pytest.mark.parametrize("kind", REPLIES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_next_prompt_begins_so(name: str, kind: str) -> None:
    """The predicted prompt is a prefix of the next one up to its last boundary, whatever the user
    writes next, with equal boundaries. Prewarming evaluates that prefix before the request comes.
    """
    chat = chat_of(name)
    reply = REPLIES[kind]
    tools = [TOOL] if chat.capabilities.tools else None
    if kind == "call" and not chat.capabilities.tool_calls:
        pytest.skip("the template writes no calls")
    said = {name: value for name, value in reply.items() if name != "reasoning_content"}
    found = prepare(chat, HEAD, tools=tools).next_prompt(reply)
    # All of it up to where the next message begins; behind that, what is said may begin with what
    # is common.
    certain = found.boundaries[-1] if found.boundaries else len(found) - 1
    assert (reply["content"] or "Paris") in chat.tokenizer.detokenize(
        found.tokens[:certain]
    ).decode()
    for next_text in TEXTS:
        prompt = prepare(chat, [*HEAD, said, *following(reply, next_text)], tools=tools).prompt
        assert common_prefix(found.tokens, prompt.tokens) >= certain
        assert [at for at in prompt.boundaries if at < certain] == [
            at for at in found.boundaries if at < certain
        ]


def test_the_reasoning_stays_where_the_conversation_has_some() -> None:
    chat = chat_of("THINKING")
    reply = REPLIES["content"]
    keeps = [
        *HEAD,
        {"role": "assistant", "content": "Hm.", "reasoning_content": "Well."},
        {**HEAD[1]},
    ]
    for messages, is_kept in ((HEAD, False), (keeps, True)):
        found = prepare(chat, messages).next_prompt(reply)
        assert ("Let me think" in chat.tokenizer.detokenize(found.tokens).decode()) == is_kept


def test_a_reply_goes_in_as_it_was_sampled() -> None:
    chat = chat_of("CHATML", Replay())
    turn = prepare(chat, HEAD)
    sampled = b"<tool_call>strange"
    found = turn.next_prompt(
        toy.told(turn, sampled.decode())
    )  # letter by letter, not as the special token
    assert found.tokens.tolist()[len(turn.prompt) :][: len(sampled)] == list(sampled)


def test_a_reply_that_goes_on_takes_the_place_of_what_it_continues() -> None:
    chat = chat_of("CHATML")
    turn = prepare(chat, [*HEAD, {"role": "assistant", "content": "Sunny"}])
    said = toy.told(turn, ", as always.")
    assert said["content"] == "Sunny, as always."
    found = turn.next_prompt(said)
    text = chat.tokenizer.detokenize(found.tokens).decode()
    assert text.count("Sunny") == 1
    assert text.endswith("Sunny, as always.<|im_end|>\n<|im_start|>user\n")


def test_beginnings_of_what_nobody_has_asked_yet() -> None:
    chat = chat_of("CHATML")
    for messages in (None, [], HEAD[:1]):
        found = chat.beginning(ChatRequest(messages))
        text = chat.tokenizer.detokenize(found.tokens).decode()
        assert text.endswith("<|im_start|>user\n")
        assert ("Be brief" in text) == bool(messages)
    whole = chat.beginning(ChatRequest(HEAD))
    assert whole.tokens.tolist() == prepare(chat, HEAD).prompt.tokens.tolist()


def test_a_template_that_takes_no_further_message_has_no_next_prompt() -> None:
    source = (
        "{%- if messages | length > 2 -%}{{- raise_exception('enough') -}}{%- endif -%}"
        + toy.CHATML
    )
    chat = ChatFormat(Template(source), toy.chatml_tokenizer())
    assert prepare(chat, HEAD).next_prompt(REPLIES["content"]) is None
